"""From hidden states to the vectors that requests asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pagewire.pooling import PoolingParams, Task
from pagewire_engine.pooler_config import PoolerConfig
from pagewire_engine.step import PooledVector, StepResult

_NOT_NUMBERS = "the vector's values are not all numbers"


class Pooler:
    """Scales and cuts what was pooled, as model and request want it.

    Args:
        config: the model's.
    """

    def __init__(self, config: PoolerConfig) -> None:
        self._config = config

    def result(
        self, step: int, sequences: Sequence[tuple[int, PoolingParams]], pooled: torch.Tensor
    ) -> StepResult:
        """What a step has produced.

        Args:
            step: its number.
            sequences: id and request of those whose prompts are computed.
            pooled: one row each: an embedding or logits.
        """
        rows = pooled.float().cpu()
        finite = torch.isfinite(rows).all(dim=1).tolist()
        result = StepResult(step, [])
        for (sequence_id, params), row, is_finite in zip(sequences, rows, finite, strict=True):
            if is_finite:
                values = self._finished(row, params).tolist()
                result.vectors.append(PooledVector(sequence_id, values))
            else:
                result.failed.append((sequence_id, _NOT_NUMBERS))
        return result

    def _finished(self, row: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """An embedding is cut before it is scaled, so that a shorter one has the length 1 too."""
        config, wanted = self._config, params.use_activation
        if config.task is Task.EMBED:
            scales = config.normalize if wanted is None else wanted
            row = row[: params.dimensions]
            return F.normalize(row, dim=0) if scales else row
        applies = config.default_activation if wanted is None else wanted
        if not applies:
            return row
        return row.sigmoid() if config.activation == "sigmoid" else row.softmax(dim=0)
