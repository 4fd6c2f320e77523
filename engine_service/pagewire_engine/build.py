"""From settings to an engine that is ready to run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pagewire.config import DEFAULT_BATCHED_TOKENS, EngineConfig
from pagewire.pooling import PoolingInfo, Task
from pagewire.sampling_params import SamplingParams
from pagewire_engine.adapters.registry import AdapterRegistry
from pagewire_engine.adapters.service import load_from_settings
from pagewire_engine.adapters.turns import AdapterStore, AdapterTurns
from pagewire_engine.admission import Admission
from pagewire_engine.cpus import model_threads
from pagewire_engine.engine import Engine
from pagewire_engine.executor.base import Executor
from pagewire_engine.pooler_config import PoolerConfig
from pagewire_engine.queues import SchedulerSettings
from pagewire_engine.read_ahead import read_ahead
from pagewire_engine.startup_times import StartupTimes
from pagewire_engine.step import WorkerInfo
from pagewire_engine.structured_output import GrammarCompiler


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, and what its users are told of it.

    Attributes:
        engine: to be run by an EngineLoop.
        executor: its worker.
        info: what was loaded.
        served_model_name: the name clients use.
        eos_token_ids: ids that end a sequence.
        default_sampling_params: the model's own.
        tokenizer_files: by Hugging Face file name; empty when there is no tokenizer.
        grammars: compiles constraints on outputs; None where none is served.
        adapters: the LoRA adapters; None where none can be loaded.
        created: Unix time, seconds.
        tasks: what can be asked of it.
        pooling: what it makes of a prompt, if it pools.
        weights_sha256: tells one model's weights from another's; "" where it is not known.
    """

    engine: Engine
    executor: Executor
    info: WorkerInfo
    served_model_name: str
    eos_token_ids: tuple[int, ...]
    default_sampling_params: SamplingParams
    tokenizer_files: Mapping[str, bytes]
    grammars: GrammarCompiler | None = None
    adapters: AdapterRegistry | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    tasks: tuple[Task, ...] = (Task.GENERATE,)
    pooling: PoolingInfo | None = None
    weights_sha256: str = ""

    def admission(self, seed: int) -> Admission:
        """What checks its requests; `seed` is of the seeds given to those without one."""
        return Admission(
            self.info.vocab_size,
            self.info.max_model_len,
            seed,
            num_eos_token_ids=len(self.eos_token_ids),
            tasks=self.tasks,
            pooling=self.pooling,
        )

    def shutdown(self) -> None:
        """Frees the worker. Safe to call twice."""
        self.engine.close()
        if self.adapters is not None:
            self.adapters.close()
        self.executor.shutdown()
        if self.grammars is not None:
            self.grammars.close()


def build_engine(config: EngineConfig, report: Callable[[str], None]) -> BuiltEngine:
    """Loads the model and puts the engine together.

    Args:
        config: the engine's settings.
        report: told in a line each what is being done.

    Raises:
        PagewireError: the settings, the model or its files can't be served; the message says why.
    """
    limit_threads(config.num_threads)
    times = StartupTimes()
    read_ahead(config.device)
    with times.phase("imports"):
        # Late: they load torch, which reads the thread counts once.
        from pagewire_engine.executor.single_process import SingleProcessExecutor
        from pagewire_engine.model_files import load_description, resolve_model
        from pagewire_engine.tokenizer_files import load_model_tokenizer
        from pagewire_engine.weights_fingerprint import weights_fingerprint
        from pagewire_engine.worker.device import wake_device

    # Beside what is read and imported next.
    wake_device(config.device)
    files = resolve_model(config)
    source = str(files.gguf or files.path)
    report(f"loading {config.model}" + (f" from {source}" if source != config.model else ""))
    with times.phase("description"):
        description = load_description(files, config)
    with times.phase("tokenizer"):
        tokenizer_files = load_model_tokenizer(config, files.path, files.gguf)
    grammars = GrammarCompiler(
        lambda: tokenizer_files,
        vocab_size=description.vocab_size,
        eos_token_ids=description.eos_token_ids,
    )
    executor = SingleProcessExecutor(config, files, grammars)
    try:
        info = executor.info()
        served_model_name = config.served_model_name or files.name
        adapters = None
        if config.enable_lora:
            adapters = AdapterRegistry(
                executor,
                served_model_name=served_model_name,
                max_cpu_loras=config.num_host_adapters,
                tokenizer_files=tokenizer_files,
                vocab_size=info.vocab_size,
            )
            with times.phase("adapters"):
                load_from_settings(adapters, config)
        engine = assemble_engine(
            executor, config, description.eos_token_ids, description.pooler, adapters
        )
    except BaseException:
        executor.shutdown()
        raise
    times.add(info.startup_s)
    report(f"loaded in {times}")
    return BuiltEngine(
        engine=engine,
        executor=executor,
        info=info,
        served_model_name=served_model_name,
        eos_token_ids=tuple(description.eos_token_ids),
        default_sampling_params=description.default_sampling_params,
        tokenizer_files=tokenizer_files,
        grammars=grammars,
        tasks=(Task.GENERATE,) if description.pooler is None else description.pooler.tasks,
        pooling=None if description.pooler is None else description.pooler.info,
        adapters=adapters,
        weights_sha256=weights_fingerprint(files, config, info.dtype),
    )


def assemble_engine(
    executor: Executor,
    config: EngineConfig,
    eos_token_ids: tuple[int, ...],
    pooler: PoolerConfig | None = None,
    adapters: AdapterStore | None = None,
) -> Engine:
    """The engine around an executor that has loaded its model.

    Args:
        executor: runs the steps.
        config: the settings.
        eos_token_ids: the model's.
        pooler: of a model that pools.
        adapters: those that requests may name; None: none.
    """
    info = executor.info()
    device = "cuda" if info.device.startswith("cuda") else "cpu"
    max_num_batched_tokens = config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS[device]
    is_encoder = pooler is not None and pooler.is_encoder
    # A vector that is made of every token's hidden state can't do without those of cached ones.
    caches = not is_encoder and not (pooler is not None and pooler.needs_every_token)
    if is_encoder and config.max_num_batched_tokens is None:
        max_num_batched_tokens = max(max_num_batched_tokens, info.max_model_len)
    settings = SchedulerSettings(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=info.max_model_len,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        num_cpu_blocks=info.num_cpu_blocks,
        preemption_mode=config.preemption_mode,
        enable_prefix_caching=config.enable_prefix_caching and caches,
        chunks_prompts=not is_encoder,
        max_waiting_requests=config.max_waiting_requests,
        max_queue_time_s=config.max_queue_time_s,
    )
    overlaps = device == "cuda" if config.async_scheduling is None else config.async_scheduling
    return Engine(
        executor,
        eos_token_ids=eos_token_ids,
        settings=settings,
        overlaps_steps=overlaps,
        adapters=None if adapters is None else AdapterTurns(config.max_loras, adapters),
    )


def limit_threads(num_threads: int | None) -> None:
    """Sets the CPU threads of the model; before torch is imported, else it has its own way.

    Args:
        num_threads: None leaves the environment's choice, or else the CPUs there are.
    """
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(model_threads(num_threads))
    # torch's threads would look for more work for milliseconds after each loop, on the CPUs that
    # the C++ kernels' own threads need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
