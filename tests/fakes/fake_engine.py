"""The real engine server over a fake executor: both wires, the loop and the scheduler, no torch.

In this process (`FakeEngine`), or in another that can be killed and started again at the same
addresses (`FakeEngineProcess`). Run as a program it is that other process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
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


class FakeEngineProcess:
    """A fake engine in a process of its own, to be killed, stopped and started again at the same
    port.

    Args:
        config: as for EngineConfig; the port is chosen here.
        knobs: `num_blocks`, `block_size`, `step_time_s`, `pools`; `tokenizer`: with texts for its
            ids; and `poison`: a prompt token whose prefill kills the process.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, **knobs: Any) -> None:
        self.port = free_port()
        self._config = {**(config or {}), "port": self.port}
        self._knobs = knobs
        self._process: subprocess.Popen[str] | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts it and waits until it is ready."""
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.fakes.fake_engine",
                json.dumps(self._config),
                json.dumps(self._knobs),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == "ready", "the fake engine did not start"

    def signal(self, number: int) -> None:
        """Sends a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait(self, timeout_s: float) -> None:
        """Waits until it has died of itself."""
        assert self._process is not None
        self._process.wait(timeout_s)

    def __enter__(self) -> FakeEngineProcess:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()


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
