"""Several frontend processes on the same ports, under one parent."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pagewire.listening import bind, close_all, shown_host
from pagewire.service_name import Program
from pagewire.settings import secrets_to_environment, settings_to_argv
from pagewire.variables import without_settings
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.http_get import http_get
from pagewire_frontend.supervisor import AFTER_GRACE_S, Service, Supervisor

_PROG = "pagewire-frontend"
# A worker finds here what its parent tells it.
_VARIABLE = "_PAGEWIRE_WORKER"
_STALL_TIMEOUT_S = 120.0
_ASK_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Worker:
    """One of several processes.

    Attributes:
        index: which, from 0 on.
        count: how many there are.
        folder: where each has a socket for the others.
    """

    index: int
    count: int
    folder: str

    @staticmethod
    def from_environment() -> Worker | None:
        """This process's place; None where it is alone."""
        told = os.environ.pop(_VARIABLE, None)
        return None if told is None else Worker(**json.loads(told))

    @property
    def socket_path(self) -> str:
        """Where it answers its siblings, over HTTP."""
        return str(Path(self.folder) / str(self.index))

    @property
    def siblings(self) -> list[Worker]:
        """The others."""
        return [
            Worker(index, self.count, self.folder)
            for index in range(self.count)
            if index != self.index
        ]

    async def get(self, path: str) -> bytes:
        """What a worker answers to a GET.

        Raises:
            OSError: it does not, or not with 200.
        """
        connecting = asyncio.open_unix_connection(self.socket_path)
        return await http_get(connecting, path, host="worker", timeout_s=_ASK_TIMEOUT_S)


def run_workers(config: FrontendConfig) -> None:
    """Keeps `config.workers` processes running until SIGINT or SIGTERM.

    Raises:
        OSError, SettingsError: a port or the host can't be used.
        StartFailure: a worker could not be started.
    """
    ports = {}
    kept = []
    for name in ("http_port", "grpc_port"):
        flag = "--" + name.replace("_", "-")
        # Alone first: nobody else's server is to share it.
        alone = bind(config.host, getattr(config, name), flag)
        ports[name] = int(alone[0].getsockname()[1])
        close_all(alone)
        kept += bind(config.host, ports[name], flag, share=True)
    try:
        with tempfile.TemporaryDirectory(prefix="pagewire-workers-") as folder:
            asyncio.run(_supervise(config, ports, folder))
    finally:
        close_all(kept)


async def _supervise(config: FrontendConfig, ports: Mapping[str, int], folder: str) -> None:
    values = {name: getattr(config, name) for name in config.model_fields_set}
    fixed = FrontendConfig(**{**values, **ports})
    scheme = "http" if config.tls_cert is None else "https"
    host = shown_host(config.host)
    supervisor = Supervisor(
        [_service(fixed, Worker(index, config.workers, folder)) for index in range(config.workers)],
        ready_line=f"{_PROG} is ready: HTTP {scheme}://{host}:{ports['http_port']}, "
        f"gRPC {host}:{ports['grpc_port']}, {config.workers} workers",
        shutdown_timeout_s=config.grace_period_s + AFTER_GRACE_S,
        program=Program.FRONTEND,
        log_format=config.log_format,
    )
    await supervisor.run()


def _service(config: FrontendConfig, worker: Worker) -> Service:
    async def is_ready() -> bool:
        try:
            await worker.get("/health")
        except OSError:
            return False
        return True

    async def stalled_s() -> float:
        await worker.get("/health/live")
        return 0.0

    environment = without_settings(os.environ)
    environment |= secrets_to_environment(config)
    environment |= {_VARIABLE: json.dumps(asdict(worker)), "PYTHONUNBUFFERED": "1"}
    return Service(
        name=f"worker {worker.index}",
        program=Program.FRONTEND,
        command=_command(settings_to_argv(config)),
        environment=environment,
        is_ready=is_ready,
        stalled_s=stalled_s,
        stall_timeout_s=_STALL_TIMEOUT_S,
    )


def _command(flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "pagewire_frontend.frontend_cli", *flags]
