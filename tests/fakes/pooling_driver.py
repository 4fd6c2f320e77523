"""An engine that pools, run step by step in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pagewire.config import EngineConfig
from pagewire.pooling import PoolingParams
from pagewire_engine.build import BuiltEngine, build_engine
from tests.fakes.engine_run import steps_to_end

Backend = Literal["auto", "torch", "cpu"]


class PoolingDriver:
    """Loads a model on CPU; its settings may be changed."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        config = {"model": str(folder), "device": "cpu", "num_threads": 1, "log_level": "error"}
        self.built: BuiltEngine = build_engine(EngineConfig(**(config | changes)), lambda _: None)
        self._admission = self.built.admission(0)

    def __enter__(self) -> PoolingDriver:
        return self

    def __exit__(self, *_: object) -> None:
        self.built.shutdown()

    def vectors(
        self, prompts: Sequence[Sequence[int]], params: PoolingParams | None = None
    ) -> list[list[float]]:
        """Those of prompts that are handed over together."""
        engine = self.built.engine
        for n, prompt in enumerate(prompts):
            engine.add(
                self._admission.admit_pooling(str(n), list(prompt), params or PoolingParams())
            )
        vectors: dict[str, list[float]] = {}
        for outputs in steps_to_end(engine):
            for told in outputs.sequences:
                assert told.vector is not None
                vectors[told.request_id] = told.vector
        return [vectors[str(n)] for n in range(len(prompts))]
