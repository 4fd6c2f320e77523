"""What `pagewire serve` runs: its settings split over engine, frontend and chat page."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from pagewire.config import EngineConfig
from pagewire.listening import LOOPBACK, addresses_of, free_port
from pagewire.settings import (
    CONFIG_VARIABLE,
    SettingsError,
    secrets_to_environment,
    settings_to_argv,
    variable_name,
)
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.model_download import MODEL_NAME
from pagewire_frontend.ports import choose_ports
from pagewire_frontend.probes import ENGINE_SERVICE, INFERENCE_SERVICE, GrpcProbe, http_answers
from pagewire_frontend.serve_settings import (
    ENGINE_INTERNALS,
    FRONTEND_INTERNALS,
    ServeOnlySettings,
    ServeSettings,
)
from pagewire_frontend.supervisor import Service


@dataclass(frozen=True)
class ServePlan:
    """Settings of the three services, their ports chosen and free."""

    engine: EngineConfig
    frontend: FrontendConfig
    ui_port: int
    stall_timeout_s: float

    @property
    def ready_line(self) -> str:
        """The line that tells people where everything is."""
        host = _shown_host(self.frontend.host)
        parts = [
            f"OpenAI API http://{host}:{self.frontend.http_port}/v1",
            f"gRPC {host}:{self.frontend.grpc_port}",
        ]
        if self.ui_port:
            parts.append(f"chat page http://{host}:{self.ui_port}")
        return "pagewire is ready: " + ", ".join(parts)


def make_plan(settings: ServeOnlySettings, embedded_model: Callable[[], str]) -> ServePlan:
    """Checks the settings of all services and chooses their ports.

    Args:
        settings: what the user gave.
        embedded_model: the path of the model to serve where none was named.

    Raises:
        SettingsError: a package, a port or a setting is not as it must be.
    """
    _require_packages(with_page=settings.ui_port != 0)
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    defaults = FrontendConfig()
    host = given.get("host", defaults.host)
    ports = choose_ports(
        host,
        {
            "http_port": given.get("http_port", defaults.http_port),
            "grpc_port": given.get("grpc_port", defaults.grpc_port),
        },
        {"ui_port": settings.ui_port},
    )
    engine_port = free_port(addresses_of(LOOPBACK))
    engine_values = _part(given, EngineConfig, ENGINE_INTERNALS)
    if settings.model is None:
        engine_values = {"served_model_name": MODEL_NAME} | engine_values
    model = settings.model if settings.model is not None else embedded_model()
    return ServePlan(
        engine=EngineConfig(**engine_values, model=model, host=LOOPBACK, port=engine_port),
        frontend=FrontendConfig(
            **_part(given, FrontendConfig, {*FRONTEND_INTERNALS, *ports}),
            engine=f"{LOOPBACK}:{engine_port}",
            **ports,
        ),
        ui_port=settings.ui_port,
        stall_timeout_s=settings.stall_timeout_s,
    )


def make_services(plan: ServePlan) -> list[Service]:
    """The services of a plan, in the order in which they are started."""
    engine_probe = GrpcProbe(f"{plan.engine.host}:{plan.engine.port}")
    host = _probed_host(plan.frontend.host)
    grpc_probe = GrpcProbe(f"{_bracketed(host)}:{plan.frontend.grpc_port}")
    http_port = plan.frontend.http_port

    async def frontend_is_ready() -> bool:
        return await http_answers(host, http_port, "/health") and await grpc_probe.is_serving(
            INFERENCE_SERVICE
        )

    services = [
        Service(
            name="engine",
            command=_module("pagewire_engine.cli", settings_to_argv(plan.engine)),
            environment=_environment(secrets_to_environment(plan.engine)),
            is_ready=lambda: engine_probe.is_serving(ENGINE_SERVICE),
            stalled_s=engine_probe.engine_stalled_s,
            stall_timeout_s=plan.stall_timeout_s,
        ),
        Service(
            name="frontend",
            command=_module("pagewire_frontend.frontend_cli", settings_to_argv(plan.frontend)),
            environment=_environment(secrets_to_environment(plan.frontend)),
            is_ready=frontend_is_ready,
            stalled_s=_answering(host, http_port, "/health/live"),
            stall_timeout_s=plan.stall_timeout_s,
            after=["engine"],
        ),
    ]
    if plan.ui_port:
        services.append(_page(plan, host))
    return services


def _page(plan: ServePlan, host: str) -> Service:
    flags = [
        f"--frontend={_bracketed(host)}:{plan.frontend.grpc_port}",
        f"--host={plan.frontend.host}",
        f"--port={plan.ui_port}",
        f"--log-level={plan.frontend.log_level}",
    ]

    async def is_ready() -> bool:
        return await http_answers(host, plan.ui_port, "/")

    return Service(
        name="page",
        command=_module("pagewire_ui.cli", flags),
        environment=_environment({}),
        is_ready=is_ready,
        stalled_s=_answering(host, plan.ui_port, "/"),
        stall_timeout_s=plan.stall_timeout_s,
    )


def _answering(host: str, port: int, path: str) -> Callable[[], Any]:
    async def stalled_s() -> float:
        if not await http_answers(host, port, path):
            raise ConnectionError(f"no answer from {host}:{port}")
        return 0.0

    return stalled_s


def _part(
    given: Mapping[str, Any], config: type[BaseModel], without: Collection[str]
) -> dict[str, Any]:
    return {
        name: value
        for name, value in given.items()
        if name in config.model_fields and name not in without
    }


def _module(name: str, flags: Sequence[str]) -> list[str]:
    # -P: a folder called `kernels` in the current directory must not be importable (transformers
    # looks for a package of that name).
    return [sys.executable, "-P", "-m", name, *flags]


def _environment(secrets: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without the settings in it, which were read and resolved here."""
    ours = {CONFIG_VARIABLE}
    for config in (EngineConfig, FrontendConfig, ServeSettings):
        ours |= {variable_name(name) for name in config.model_fields}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"PYTHONUNBUFFERED": "1"} | dict(secrets)


def _require_packages(*, with_page: bool) -> None:
    # Looked for without importing them.
    if importlib.util.find_spec("torch") is None:
        raise SettingsError("the engine needs torch: pip install 'pagewire[engine]'")
    if with_page and importlib.util.find_spec("gradio") is None:
        raise SettingsError(
            "the chat page needs gradio: pip install 'pagewire[ui]', or leave it out by --ui-port 0"
        )


def _shown_host(host: str) -> str:
    return "localhost" if host in ("*", "0.0.0.0", "::") else _bracketed(host)


def _probed_host(host: str) -> str:
    """Where this process reaches a server that listens on `host`."""
    if host == "::":
        return "::1"
    return LOOPBACK if host in ("*", "0.0.0.0", "localhost") else host


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
