"""What `pagewire serve` runs: its settings split over engine, frontend and chat page."""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, SecretStr

from pagewire.config import EngineConfig
from pagewire.listening import LOOPBACK, addresses_of, free_port, shown_host
from pagewire.service_name import Program
from pagewire.settings import (
    SettingsError,
    UnmetSettingError,
    secrets_to_environment,
    settings_to_argv,
)
from pagewire.tls import ServerTls
from pagewire.variables import variable_name, without_settings
from pagewire_frontend.access import Access
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.model_download import MODEL_NAME
from pagewire_frontend.ports import choose_ports
from pagewire_frontend.probes import ENGINE_SERVICE, INFERENCE_SERVICE, GrpcProbe, http_answers
from pagewire_frontend.serve_settings import (
    ENGINE_INTERNALS,
    FRONTEND_INTERNALS,
    ServeOnlySettings,
)
from pagewire_frontend.supervisor import Service


@dataclass(frozen=True)
class ServePlan:
    """Settings of the three services, their ports chosen and free.

    Attributes:
        page_key: the API key that the page shows; None: the frontend asks for none.
        page_auth: what visitors of the page must enter; None: nothing, or an API key.
        page_root_path: where a reverse proxy shows the page.
    """

    engine: EngineConfig
    frontend: FrontendConfig
    ui_port: int
    stall_timeout_s: float
    page_key: str | None = None
    page_auth: SecretStr | None = None
    page_root_path: str = ""

    @property
    def page_host(self) -> str:
        """Where the page listens: it has no TLS, so with TLS others reach it through a proxy of
        this machine only."""
        return self.frontend.host if self.frontend.tls_cert is None else "localhost"

    @property
    def ready_line(self) -> str:
        """The line that tells people where everything is."""
        host = shown_host(self.frontend.host)
        scheme = "http" if self.frontend.tls_cert is None else "https"
        parts = [
            f"OpenAI API {scheme}://{host}:{self.frontend.http_port}/v1",
            f"gRPC {host}:{self.frontend.grpc_port}",
        ]
        if self.ui_port:
            parts.append(f"chat page http://{shown_host(self.page_host)}:{self.ui_port}")
        return "pagewire is ready: " + ", ".join(parts)


def make_plan(
    settings: ServeOnlySettings,
    embedded_model: Callable[[], str],
    private_folder: Callable[[], str],
) -> ServePlan:
    """Checks the settings of all services and chooses their ports.

    Args:
        settings: what the user gave.
        embedded_model: the path of the model to serve where none was named.
        private_folder: makes a folder that this user alone may enter.

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
    frontend = FrontendConfig(
        **_part(given, FrontendConfig, {*FRONTEND_INTERNALS, *ports}),
        engine=(f"{LOOPBACK}:{engine_port}",),
        **ports,
    )
    frontend, page_key = _let_us_in(frontend, private_folder)
    if frontend.tls_client_ca and settings.ui_port and not page_key and settings.ui_auth is None:
        raise SettingsError(
            "--tls-client-ca: the chat page asks nobody for a certificate; give it a login "
            "(--ui-auth), or do without it (--ui-port 0)"
        )
    model = settings.model if settings.model is not None else embedded_model()
    return ServePlan(
        engine=EngineConfig(**engine_values, model=model, host=LOOPBACK, port=engine_port),
        frontend=frontend,
        ui_port=settings.ui_port,
        stall_timeout_s=settings.engine_stall_timeout_s,
        page_key=page_key,
        page_auth=settings.ui_auth,
        page_root_path=settings.ui_root_path,
    )


def _let_us_in(
    frontend: FrontendConfig, private_folder: Callable[[], str]
) -> tuple[FrontendConfig, str | None]:
    """Doors for the page and for the probes, where clients need keys or certificates: a key made up
    for this run, and a socket without TLS.

    Raises:
        SettingsError: keys or certificates can't be used.
    """
    changes: dict[str, Any] = {}
    page_key = None
    ServerTls.from_settings(frontend.tls_cert, frontend.tls_key, frontend.tls_client_ca)
    if Access(frontend).keys.required:
        page_key = secrets.token_urlsafe(32)
        given = frontend.api_key
        known = "" if given is None else given.get_secret_value() + ","
        changes["api_key"] = SecretStr(known + page_key)
    if frontend.tls_cert is not None and frontend.local_socket is None:
        changes["local_socket"] = os.path.join(private_folder(), "frontend")
    values = {name: getattr(frontend, name) for name in frontend.model_fields_set}
    return FrontendConfig(**{**values, **changes}), page_key


def make_services(plan: ServePlan) -> list[Service]:
    """The services of a plan, in the order in which they are started."""
    engine_probe = GrpcProbe(f"{plan.engine.host}:{plan.engine.port}")
    host = _probed_host(plan.frontend.host)
    grpc_probe = GrpcProbe(_grpc_target(plan.frontend))
    http_port = plan.frontend.http_port

    async def frontend_is_ready() -> bool:
        # A certificate for the world does not name the loopback: with TLS, gRPC speaks for both
        # APIs, which share one process and one event loop.
        http_is_ready = plan.frontend.tls_cert is not None or await http_answers(
            host, http_port, "/health"
        )
        return http_is_ready and await grpc_probe.is_serving(INFERENCE_SERVICE)

    async def frontend_stalled_s() -> float:
        if plan.frontend.tls_cert is None:
            return await _stalled_s(host, http_port, "/health/live")
        if not await grpc_probe.is_serving():
            raise ConnectionError("no answer from the frontend's local socket")
        return 0.0

    services = [
        Service(
            name="engine",
            program=Program.ENGINE,
            command=_module("pagewire_engine.cli", settings_to_argv(plan.engine)),
            environment=_environment(secrets_to_environment(plan.engine)),
            is_ready=lambda: engine_probe.is_serving(ENGINE_SERVICE),
            stalled_s=engine_probe.engine_stalled_s,
            stall_timeout_s=plan.stall_timeout_s,
        ),
        Service(
            name="frontend",
            program=Program.FRONTEND,
            command=_module("pagewire_frontend.frontend_cli", settings_to_argv(plan.frontend)),
            environment=_environment(secrets_to_environment(plan.frontend)),
            is_ready=frontend_is_ready,
            stalled_s=frontend_stalled_s,
            stall_timeout_s=plan.stall_timeout_s,
            after=["engine"],
        ),
    ]
    if plan.ui_port:
        services.append(_page(plan))
    return services


def _page(plan: ServePlan) -> Service:
    flags = [
        f"--frontend={_grpc_target(plan.frontend)}",
        f"--host={plan.page_host}",
        f"--port={plan.ui_port}",
        f"--log-level={plan.frontend.log_level}",
        f"--log-format={plan.frontend.log_format}",
    ]
    if plan.page_root_path:
        flags.append(f"--root-path={plan.page_root_path}")
    secret = {}
    if plan.page_key is not None:
        secret[variable_name("api_key")] = plan.page_key
    if plan.page_auth is not None:
        secret[variable_name("auth")] = plan.page_auth.get_secret_value()
    elif plan.page_key is not None:
        # The page's own key must not let everybody in who opens it.
        flags.append("--login")

    host = _probed_host(plan.page_host)

    async def is_ready() -> bool:
        return await http_answers(host, plan.ui_port, "/")

    return Service(
        name="page",
        program=Program.PAGE,
        command=_module("pagewire_ui.cli", flags),
        environment=_environment(secret),
        is_ready=is_ready,
        stalled_s=lambda: _stalled_s(host, plan.ui_port, "/"),
        stall_timeout_s=plan.stall_timeout_s,
    )


async def _stalled_s(host: str, port: int, path: str) -> float:
    if not await http_answers(host, port, path):
        raise ConnectionError(f"no answer from {host}:{port}")
    return 0.0


def _grpc_target(frontend: FrontendConfig) -> str:
    """Where this machine reaches the frontend's gRPC API without TLS."""
    if frontend.tls_cert is not None:
        return f"unix:{os.path.abspath(frontend.local_socket or '')}"
    return f"{_bracketed(_probed_host(frontend.host))}:{frontend.grpc_port}"


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
    return without_settings(os.environ) | {"PYTHONUNBUFFERED": "1"} | dict(secrets)


def _require_packages(*, with_page: bool) -> None:
    # Looked for without importing them.
    if importlib.util.find_spec("torch") is None:
        raise UnmetSettingError("the engine needs torch: pip install 'pagewire[engine]'")
    if with_page and importlib.util.find_spec("gradio") is None:
        raise UnmetSettingError(
            "the chat page needs gradio: pip install 'pagewire[ui]', or leave it out by --ui-port 0"
        )


def _probed_host(host: str) -> str:
    """Where this process reaches a server that listens on `host`."""
    if host == "::":
        return "::1"
    return LOOPBACK if host in ("*", "0.0.0.0", "localhost") else host


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
