"""What several folders share: the small real model, free ports, quiet threads, and how hypothesis
runs."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from pagewire.logs import PACKAGES
from tests.fakes import minilm, ports
from tests.fakes.bad_inputs import tried

# Before torch or tokenizers start: one thread each, so that tests and servers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
# A proxy of the machine must not see what goes to loopback.
os.environ.setdefault("NO_PROXY", "localhost,127.0.0.1,::1")
# Settings of the developer's shell are none of the tests' business.
for _name in [name for name in os.environ if name.startswith("PAGEWIRE_")]:
    if _name != "PAGEWIRE_CACHE" and not _name.startswith("PAGEWIRE_CHAOS_"):
        del os.environ[_name]

# What a shell has started in the background ignores interrupts, and so would its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Limits on the time that examples take would fail on a machine that is busy with something else.
settings.register_profile("pagewire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples each time: what fails in CI fails again at home.
settings.register_profile("ci", settings.get_profile("pagewire"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "pagewire"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What thousands of tests and all that they import leave in memory stays to the end: without
    this, each full garbage collection would go through a million objects, for half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    from tests.side_by_side import SideBySide

    return SideBySide(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["bad inputs tried"] = dict(tried)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What one of several processes tried is told by the one that started them."""
    tried.update(getattr(node, "workeroutput", {}).get("bad inputs tried", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if tried:
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(tried.items()))
        terminalreporter.write_line(f"bad inputs tried: {tried.total()} ({kinds})")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, downloaded on first use."""
    from pagewire_frontend.model_download import smollm2_path as path

    return path()


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The folder of all-MiniLM-L6-v2, downloaded on first use."""
    return minilm.minilm_path()


@pytest.fixture
def free_port() -> Callable[[], int]:
    """`ports.free_port`."""
    return ports.free_port


@pytest.fixture(autouse=True)
def levels_of_logs() -> Iterator[None]:
    """A program that a test runs within the process sets levels for all tests that come after."""
    levels = {name: logging.getLogger(name).level for name in (None, *PACKAGES)}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
