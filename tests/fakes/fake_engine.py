"""The real engine server over a fake executor: both wires, the loop and the scheduler, no torch.

In this process (`FakeEngine`), or in another that can be killed and started again at the same
addresses (`FakeEngineProcess`). Run as a program it is that other process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pagewire.config import EngineConfig
from pagewire.pooling import PoolingInfo, Task
from pagewire.sampling_params import SamplingParams
from pagewire_engine.adapters.registry import AdapterRegistry
from pagewire_engine.adapters.service import load_from_settings
from pagewire_engine.build import BuiltEngine, assemble_engine
from pagewire_engine.service import EngineServer
from pagewire_engine.step import StepPlan
from tests.fakes.fake_engine_client import byte_tokenizer, tokenizer_files
from tests.fakes.fake_executor import FakeExecutor
from tests.fakes.killable_process import KillableProcess
from tests.fakes.ports import free_port

VOCAB_SIZE = 1000
ROOT = Path(__file__).resolve().parents[2]


def fake_config(**settings: Any) -> EngineConfig:
    """An EngineConfig for a fake model at a free port."""
    defaults: dict[str, Any] = {"model": "fake", "port": 0, "max_num_batched_tokens": 256}
    return EngineConfig(**{**defaults, **settings})


def build_fake_engine(
    config: EngineConfig,
    report: Callable[[str], None] = lambda line: None,
    *,
    num_blocks: int = 512,
    block_size: int = 16,
    num_cpu_blocks: int = 0,
    max_model_len: int = 4096,
    step_time_s: float = 0.0,
    tokenizer_files: Mapping[str, bytes] | None = None,
    on_execute: Callable[[StepPlan], None] | None = None,
    pools: bool = False,
    weights: str = "",
) -> BuiltEngine:
    """An engine over integers, as `pagewire_engine.build.build_engine` would give it; with `pools`
    its model gives vectors, and generates nothing. `weights` tell its model from another."""
    executor = FakeExecutor(
        num_blocks,
        block_size,
        VOCAB_SIZE,
        num_cpu_blocks=num_cpu_blocks,
        max_model_len=config.max_model_len or max_model_len,
        step_time_s=step_time_s,
        on_execute=on_execute,
    )
    served_model_name = config.served_model_name or "fake"
    adapters = None
    if config.enable_lora:
        adapters = AdapterRegistry(
            executor,
            served_model_name=served_model_name,
            max_cpu_loras=config.num_host_adapters,
            tokenizer_files=tokenizer_files or {},
            vocab_size=VOCAB_SIZE,
        )
        load_from_settings(adapters, config)
    return BuiltEngine(
        engine=assemble_engine(executor, config, (), adapters=adapters),
        executor=executor,
        info=executor.info(),
        served_model_name=served_model_name,
        eos_token_ids=(),
        default_sampling_params=SamplingParams(),
        tokenizer_files=tokenizer_files or {},
        tasks=(Task.EMBED, Task.SCORE) if pools else (Task.GENERATE,),
        pooling=PoolingInfo(2) if pools else None,
        adapters=adapters,
        weights_sha256=weights,
    )


class FakeEngine:
    """A fake engine served in this process.

    Args:
        config: addresses and limits.
        knobs: of `build_fake_engine`.
    """

    def __init__(self, config: EngineConfig | None = None, **knobs: Any) -> None:
        self.config = config or fake_config()
        self.built = build_fake_engine(self.config, **knobs)
        self.server = EngineServer(self.built, self.config)
        self.port = 0

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> FakeEngine:
        self.port = self.server.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.stop(grace_s=0.1)


class FakeEngineProcess(KillableProcess):
    """A fake engine in a process of its own, always at the same port.

    Args:
        config: as for EngineConfig; the port is chosen here.
        knobs: `num_blocks`, `block_size`, `step_time_s`, `pools`; `tokenizer`: with texts for its
            ids; and `poison`: a prompt token whose prefill kills the process.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, **knobs: Any) -> None:
        self.port = free_port()
        settings = json.dumps({**(config or {}), "port": self.port})
        super().__init__(
            ["-m", "tests.fakes.fake_engine", settings, json.dumps(knobs)],
            "^ready$",
            {"OMP_NUM_THREADS": "1"},
        )

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=json.loads)
    parser.add_argument("knobs", type=json.loads)
    arguments = parser.parse_args()
    poison = arguments.knobs.pop("poison", None)
    if arguments.knobs.pop("tokenizer", False):
        arguments.knobs["tokenizer_files"] = tokenizer_files(
            tokenizer=byte_tokenizer(num_words=VOCAB_SIZE - 256 - 3)
        )

    def die_of_poison(plan: StepPlan) -> None:
        if any(poison in new.prompt_token_ids for new in plan.new_sequences):
            os.kill(os.getpid(), signal.SIGKILL)

    config = fake_config(**arguments.config)
    built = build_fake_engine(
        config, on_execute=die_of_poison if poison is not None else None, **arguments.knobs
    )
    server = EngineServer(built, config)
    server.start()
    print("ready", flush=True)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    while not stop.wait(0.5):
        pass
    if config.drain_timeout_s:
        server.drain(config.drain_timeout_s, threading.Event())
    server.stop()


if __name__ == "__main__":
    main()
