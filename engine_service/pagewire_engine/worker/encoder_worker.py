"""A worker for encoders: no KV cache, no sampler, every prompt whole in one step."""

from __future__ import annotations

import logging

import torch

from pagewire.config import EngineConfig
from pagewire.errors import InvalidArgumentError
from pagewire.pooling import PoolingParams, Task
from pagewire_engine.cpus import model_threads
from pagewire_engine.executor.base import LandedStep, PendingStep
from pagewire_engine.model_files import ModelDescription, ModelFiles, load_description
from pagewire_engine.models.base import Encoder, EncoderInputs
from pagewire_engine.startup_times import StartupTimes
from pagewire_engine.step import NewSequence, StepPlan, StepResult, WorkerInfo
from pagewire_engine.worker.device import find_device
from pagewire_engine.worker.exhaustion import telling_exhaustion
from pagewire_engine.worker.kernels import Kernels
from pagewire_engine.worker.pooler import Pooler
from pagewire_engine.worker.precision import dtype_name, model_dtype, quantizes
from pagewire_engine.worker.weights import load_weights

logger = logging.getLogger(__name__)


class EncoderWorker:
    """Holds an encoder on one device."""

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        """Loads everything.

        Args:
            config: the engine's settings.
            files: the model's.

        Raises:
            PagewireError: the model, its files or the settings can't be served.
        """
        self._times = StartupTimes()
        with self._times.phase("device"):
            self._device = find_device(config.device)
        quantizes(config.quantization, self._device)  # before anything is loaded
        if self._device.type == "cpu":
            torch.set_num_threads(model_threads(config.num_threads))
        self._description = load_description(files, config)
        assert self._description.pooler is not None  # see `load_worker`
        self._pooler_config = self._description.pooler
        self._dtype = model_dtype(config.dtype, self._description, self._device)
        self._max_model_len = longest_prompt(self._description, config)
        hf_config = self._description.hf_config
        with self._times.phase("kernels"):
            # Attention is torch's; the dense kernels are those that go with the setting.
            head_dim = hf_config.hidden_size // hf_config.num_attention_heads
            self._kernels = Kernels(config.attention_backend, self._device, head_dim)
        with self._times.phase("weights"):
            self._model = self._load_model(config, files)
        self._pooler = Pooler(self._pooler_config)
        self._block_size = config.block_size
        self._sequences: dict[int, NewSequence] = {}
        logger.info(
            "%s in %s on %s, %s dense kernels, prompts up to %d tokens",
            self._description.architecture,
            dtype_name(self._dtype),
            self._device,
            self._kernels.attention.name,
            self._max_model_len,
        )

    def info(self) -> WorkerInfo:
        """What was loaded."""
        return WorkerInfo(
            architecture=self._description.architecture,
            dtype=dtype_name(self._dtype),
            device=str(self._device),
            vocab_size=self._description.vocab_size,
            max_model_len=self._max_model_len,
            num_blocks=0,
            block_size=self._block_size,
            startup_s=self._times.seconds,
        )

    @property
    def launches_ahead(self) -> bool:
        """See Executor.launches_ahead."""
        return False

    def launch(self, plan: StepPlan) -> PendingStep:
        """Computes one step; see Executor.launch."""
        return LandedStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step; see Executor.launch for what an exception leaves behind."""
        with telling_exhaustion(self._device):
            return self._execute(plan)

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepResult:
        if self._kernels.take_built():
            self._model.use_kernels(self._kernels.dense)
        for sequence_id in plan.forgotten:
            self._sequences.pop(sequence_id, None)
        for new in plan.new_sequences:
            self._sequences[new.sequence_id] = new
        if not plan.scheduled:
            return StepResult(plan.step, [])
        sequences = [self._sequences[part.sequence_id] for part in plan.scheduled]
        inputs = self._inputs(sequences)
        hidden = self._model(inputs)
        asked = [(each.sequence_id, each.pooling or PoolingParams()) for each in sequences]
        return self._pooler.result(plan.step, asked, self._pooled(hidden, inputs.lengths))

    def _inputs(self, sequences: list[NewSequence]) -> EncoderInputs:
        lengths = [len(each.prompt_token_ids) for each in sequences]
        token_ids = [token_id for each in sequences for token_id in each.prompt_token_ids]
        positions = torch.cat([torch.arange(length) for length in lengths])
        segments = torch.zeros(len(token_ids), dtype=torch.int64)
        end = 0
        for each, length in zip(sequences, lengths, strict=True):
            end += length
            if each.pooling is not None and each.pooling.second_text_start:
                segments[end - length + each.pooling.second_text_start : end] = 1
        return EncoderInputs(
            torch.tensor(token_ids, dtype=torch.int64, device=self._device),
            positions.to(self._device),
            segments.to(self._device),
            lengths,
        )

    def _pooled(self, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """[T, hidden] to one row a sequence."""
        parts, config = torch.split(hidden, lengths), self._pooler_config
        if config.pooling_type == "mean":
            return torch.stack([part.double().mean(0) for part in parts])
        rows = torch.stack([part[-1 if config.pooling_type == "last" else 0] for part in parts])
        return rows if config.task is Task.EMBED else self._model.classify(rows)

    def _load_model(self, config: EngineConfig, files: ModelFiles) -> Encoder:
        model = load_weights(
            files, self._description, config, self._dtype, self._device, self._kernels.dense
        )
        assert isinstance(model, Encoder)  # a Worker has the others
        return model


def longest_prompt(description: ModelDescription, config: EngineConfig) -> int:
    """What the model takes, or less where a step's tokens are fewer: a prompt is computed in one.

    Raises:
        InvalidArgumentError: where more was asked for by name.
    """
    most = config.max_num_batched_tokens
    longest = description.max_model_len
    if most is None or longest <= most:
        return longest
    if config.max_model_len is not None:
        raise InvalidArgumentError(
            "max_model_len",
            f"{longest} tokens are more than a step computes (max_num_batched_tokens={most}), and "
            "an encoder's prompt is computed in one; lower it, or raise max_num_batched_tokens",
        )
    logger.warning(
        "the model takes prompts of %d tokens, but a step computes %d, and an encoder's prompt is "
        "computed in one: longer ones are refused; raise max_num_batched_tokens for them",
        longest,
        most,
    )
    return most
