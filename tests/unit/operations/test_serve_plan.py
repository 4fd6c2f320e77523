"""One set of settings becomes three programs that find one another."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from pagewire.config import EngineConfig
from pagewire.settings import SettingsError, parse_settings
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.serve_plan import ServePlan, make_plan, make_services
from pagewire_frontend.serve_settings import ServeOnlySettings, ServeSettings
from pagewire_frontend.supervisor import Service
from pagewire_ui.config import UiConfig


def settings(*argv: str, environ: dict[str, str] | None = None) -> ServeOnlySettings:
    return parse_settings(
        ServeSettings,
        list(argv),
        prog="pagewire serve",
        description="",
        positional=["model"],
        environ=environ or {},
    )


def plan(*argv: str) -> ServePlan:
    return make_plan(
        settings("--http-port=0", "--grpc-port=0", *argv),
        lambda: "/cache/model.gguf",
        lambda: "/private",
    )


def flags(service: Service) -> list[str]:
    command = list(service.command)
    return command[command.index("-m") + 2 :]


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_each_setting_reaches_the_program_it_belongs_to() -> None:
    made = plan("m", "--max-model-len=77", "--grace-period-s=3", "--log-level=debug", "--ui-port=0")
    engine, frontend = make_services(made)
    engine_config = parse_settings(EngineConfig, flags(engine), prog="", description="", environ={})
    frontend_config = parse_settings(
        FrontendConfig, flags(frontend), prog="", description="", environ={}
    )
    assert (engine_config, frontend_config) == (made.engine, made.frontend)
    assert (engine_config.model, engine_config.max_model_len) == ("m", 77)
    assert frontend_config.grace_period_s == 3
    assert (engine_config.log_level, frontend_config.log_level) == ("debug", "debug")
    assert frontend_config.engine == (f"127.0.0.1:{engine_config.port}",)
    assert made.stall_timeout_s == 120


def test_the_page_talks_to_the_frontend(free_port: object) -> None:
    made = plan("m", f"--ui-port={free_port()}")  # type: ignore[operator]  # the fixture's function
    page = make_services(made)[2]
    config = parse_settings(UiConfig, flags(page), prog="", description="", environ={})
    assert config.frontend == f"127.0.0.1:{made.frontend.grpc_port}"
    assert config.port == made.ui_port
    assert f"chat page http://localhost:{made.ui_port}" in made.ready_line


def test_the_page_asks_for_what_the_operator_chose(free_port: object) -> None:
    port = f"--ui-port={free_port()}"  # type: ignore[operator]  # the fixture's function
    page = make_services(plan("m", port, "--ui-auth=ann:pw", "--ui-root-path=/chat/"))[2]
    assert not any("pw" in word for word in page.command)
    config = parse_settings(
        UiConfig, flags(page), prog="", description="", environ=dict(page.environment)
    )
    assert config.auth is not None
    assert config.auth.get_secret_value() == "ann:pw"
    assert (config.root_path, config.login) == ("/chat", False)
    # In place of an API key, which the page then has for itself.
    guarded = make_services(plan("m", port, "--ui-auth=ann:pw", "--api-key=k"))[2]
    assert "--login" not in guarded.command
    assert "PAGEWIRE_API_KEY" in guarded.environment


def test_without_a_model_the_embedded_one_is_served_by_its_name() -> None:
    made = plan("--ui-port=0")
    assert made.engine.model == "/cache/model.gguf"
    assert made.engine.served_model_name == "SmolLM2-135M-Instruct"
    assert plan("--ui-port=0", "--served-model-name=x").engine.served_model_name == "x"
    assert plan("other", "--ui-port=0").engine.served_model_name is None


def test_free_ports_are_chosen_and_differ() -> None:
    made = plan("m", "--ui-port=0")
    ports = {made.engine.port, made.frontend.http_port, made.frontend.grpc_port}
    assert len(ports) == 3
    assert 0 not in ports


def test_a_port_in_use_is_refused_by_its_flag(taken: int) -> None:
    with pytest.raises(SettingsError, match=f"--ui-port: port {taken} is in use"):
        plan("m", f"--ui-port={taken}")


def test_one_port_for_two_servers_is_refused(free_port: object) -> None:
    port = free_port()  # type: ignore[operator]  # the fixture's function
    with pytest.raises(SettingsError, match="--grpc-port and --ui-port are both"):
        make_plan(
            settings("m", "--http-port=0", f"--grpc-port={port}", f"--ui-port={port}"),
            lambda: "",
            lambda: "",
        )


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(SettingsError, match="no address of this machine"):
        plan("m", "--ui-port=0", "--host=203.0.113.7")


def test_children_see_no_settings_in_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PAGEWIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PAGEWIRE_PORT", "tcp://10.0.0.1:80")  # as Kubernetes sets it
    monkeypatch.setenv("PAGEWIRE_DTYPE", "float16")
    monkeypatch.setenv("PAGEWIRE_CONFIG", "/nowhere.yaml")
    monkeypatch.setenv("PAGEWIRE_CACHE", "/cache")
    for service in make_services(plan("m", "--ui-port=0")):
        ours = {name for name in service.environment if name.startswith("PAGEWIRE_")}
        assert ours == {"PAGEWIRE_CACHE"}


def test_a_missing_part_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gradio" else found(name)
    )
    with pytest.raises(SettingsError, match=r"pip install 'pagewire\[ui\]', or .* --ui-port 0"):
        plan("m", "--ui-port=7860")
    assert plan("m", "--ui-port=0")


def test_the_page_is_no_way_around_certificates(certificates: dict[str, str]) -> None:
    tls = [f"--{name}={certificates[name]}" for name in ("tls-cert", "tls-key")]
    own = f"--tls-client-ca={certificates['tls-client-ca']}"
    beyond = plan("m", "--host=*", *tls)
    assert "--host=localhost" in flags(make_services(beyond)[2])
    assert "https://" in beyond.ready_line
    assert "chat page http://localhost:" in beyond.ready_line
    with pytest.raises(SettingsError, match="--ui-auth"):
        plan("m", *tls, own)
    for allowed in ("--ui-port=0", "--ui-auth=me:secret", "--api-key=k"):
        plan("m", *tls, own, allowed)


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, str]:
    issuer = trustme.CA()
    issued = issuer.issue_cert("localhost")
    paths = {name: str(tmp_path / name) for name in ("tls-cert", "tls-key", "tls-client-ca")}
    issued.cert_chain_pems[0].write_to_path(paths["tls-cert"])
    issued.private_key_pem.write_to_path(paths["tls-key"])
    issuer.cert_pem.write_to_path(paths["tls-client-ca"])
    return paths


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(SettingsError, match="--api-key"):
        plan("m", "--api-key=")
