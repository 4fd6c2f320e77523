"""Each setting of the engine reaches it from the command line, YAML, environment and LLM alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagewire.config import EngineConfig
from pagewire.errors import InvalidArgumentError
from pagewire.settings import SettingsError, build_parser, load_settings, parse_settings
from pagewire_engine.build import assemble_engine
from pagewire_frontend.engine_client import in_process
from pagewire_frontend.llm import LLM
from pagewire_frontend.serve_plan import make_plan, make_services
from pagewire_frontend.serve_settings import ServeSettings
from tests.fakes.fake_executor import FakeExecutor

GIB = 1 << 30
# Field, as text, and what the engine gets.
SETTINGS: list[tuple[str, str, Any]] = [
    ("gpu_memory_utilization", "0.5", 0.5),
    ("block_size", "32", 32),
    ("max_num_seqs", "7", 7),
    ("max_num_batched_tokens", "64", 64),
    ("max_model_len", "99", 99),
    ("num_gpu_blocks_override", "12", 12),
    ("kv_cache_memory", "3GiB", 3 * GIB),
    ("kv_cache_memory", "1000", 1000),
    ("kv_cache_dtype", "bfloat16", "bfloat16"),
    ("swap_space", "0", 0),
    ("swap_space", "1.5 GiB", 3 * GIB // 2),
    ("preemption_mode", "recompute", "recompute"),
    ("enable_prefix_caching", "false", False),
    ("enforce_eager", "true", True),
    ("async_scheduling", "true", True),
    ("max_waiting_requests", "9", 9),
    ("max_queue_time_s", "2.5", 2.5),
]
every_setting = pytest.mark.parametrize(("field", "text", "value"), SETTINGS)


class _Stop(Exception):
    """Ends LLM(...) where it would load a model."""


def parse(*argv: str, env: dict[str, str] | None = None) -> EngineConfig:
    parser = build_parser(EngineConfig, prog="engine-service", description="", positional=["model"])
    return load_settings(EngineConfig, parser, argv, env or {}, positional=["model"])


def flag(field: str, text: str) -> str:
    name = field.replace("_", "-")
    if text in ("true", "false"):
        return f"--{name}" if text == "true" else f"--no-{name}"
    return f"--{name}={text}"


@every_setting
def test_a_flag_sets_it(field: str, text: str, value: Any) -> None:
    assert getattr(parse("m", flag(field, text)), field) == value


@every_setting
def test_a_variable_sets_it(field: str, text: str, value: Any) -> None:
    assert getattr(parse("m", env={f"PAGEWIRE_{field.upper()}": text}), field) == value


@every_setting
def test_a_key_of_the_file_sets_it(field: str, text: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"model: m\n{field.replace('_', '-')}: {text}\n")
    assert getattr(parse("--config", str(file)), field) == value


@every_setting
def test_an_argument_of_llm_sets_it(
    field: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[EngineConfig] = []

    def load(config: EngineConfig) -> None:
        given.append(config)
        raise _Stop

    monkeypatch.setattr(in_process, "InProcessEngineClient", load)
    for argument in (value, text):
        with pytest.raises(_Stop):
            LLM("m", **{field: argument})
    assert [getattr(config, field) for config in given] == [value, value]


@every_setting
def test_serve_hands_it_to_its_engine(field: str, text: str, value: Any) -> None:
    settings = parse_settings(
        ServeSettings,
        ["--model=m", "--http-port=0", "--grpc-port=0", flag(field, text)],
        prog="",
        description="",
        environ={},
    )
    engine, _ = make_services(make_plan(settings, lambda: "m", lambda: "/private"))[:2]
    command = list(engine.command)
    assert getattr(parse(*command[command.index("-m") + 2 :]), field) == value


def test_the_scheduler_gets_the_settings_and_what_the_worker_found() -> None:
    config = parse(
        "m",
        "--max-num-seqs=7",
        "--max-num-batched-tokens=64",
        "--max-waiting-requests=5",
        "--preemption-mode=swap",
        "--no-enable-prefix-caching",
    )
    executor = FakeExecutor(num_blocks=12, block_size=8, num_cpu_blocks=3, max_model_len=90)
    settings = assemble_engine(executor, config, ()).settings
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (7, 64)
    assert settings.max_waiting_requests == 5
    assert (settings.num_blocks, settings.block_size, settings.max_model_len) == (12, 8, 90)
    assert (settings.num_cpu_blocks, settings.preemption_mode) == (3, "swap")
    assert not settings.enable_prefix_caching
    assert assemble_engine(executor, parse("m"), ()).settings.max_num_batched_tokens == 512


@pytest.mark.parametrize("text", ["-1", "4 parsecs", "much"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--swap-space: must be a size, such as 4GiB.*not '"):
        parse("m", f"--swap-space={text}")
    with pytest.raises(InvalidArgumentError, match=r"^swap_space: must be a size, such as 4GiB"):
        LLM("m", swap_space=text)
