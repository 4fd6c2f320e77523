"""Fixtures that several folders share: the small real model, free ports, quiet threads."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

# Before torch or tokenizers start: one thread each, so that tests and servers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
# A proxy of the machine must not see what goes to loopback.
os.environ.setdefault("NO_PROXY", "localhost,127.0.0.1,::1")
# Settings of the developer's shell are none of the tests' business.
for _name in [name for name in os.environ if name.startswith("PAGEWIRE_")]:
    if _name != "PAGEWIRE_CACHE":
        del os.environ[_name]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, downloaded on first use."""
    from pagewire_frontend.model_download import smollm2_path as path

    return path()


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function that names a TCP port nobody listens on, a new one each time."""
    given: set[int] = set()

    def choose() -> int:
        while True:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            if port not in given:
                given.add(port)
                return port

    return choose
