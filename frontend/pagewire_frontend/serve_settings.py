"""The settings of `pagewire serve`: those of engine, frontend and chat page together."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, create_model, field_validator

from pagewire.config import EngineConfig
from pagewire.setting_checks import check_logins, check_root_path
from pagewire.settings import FlagGroup
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.model_download import MODEL_NAME

# Where the parts find one another is the supervisor's business.
ENGINE_INTERNALS = frozenset(
    {
        "model",
        "host",
        "port",
        "stream_endpoint",
        "drain_timeout_s",
        "tls_cert",
        "tls_key",
        "tls_client_ca",
    }
)
FRONTEND_INTERNALS = frozenset({"engine", "engine_ca", "engine_cert", "engine_key"})


class ServeOnlySettings(BaseModel):
    """The settings that belong to `pagewire serve` itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(
        default=None,
        min_length=1,
        description="Model folder, GGUF file, or hub name (org/name). "
        f"Default: {MODEL_NAME}, downloaded (93 MB) on first use.",
    )
    ui_port: int = Field(
        default=7860, ge=0, le=65535, description="Port of the chat page; 0: no page."
    )
    ui_auth: SecretStr | None = Field(
        default=None,
        description="USER:PASSWORD that visitors of the chat page must enter, or several separated "
        "by commas. Others of the machine can read a command line: better set PAGEWIRE_UI_AUTH. "
        "Default: no login, or an API key where clients need one.",
    )
    ui_root_path: str = Field(
        default="",
        description="Path under which a reverse proxy shows the chat page, such as /chat, where "
        "the proxy takes it off before it passes requests on.",
    )
    engine_stall_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds after which an engine that makes no step while requests wait for "
        "one, or a part that does not answer, is killed and started again.",
    )

    @field_validator("ui_auth")
    @classmethod
    def _check_ui_auth(cls, value: SecretStr | None) -> SecretStr | None:
        return check_logins(value)

    @field_validator("ui_root_path")
    @classmethod
    def _check_ui_root_path(cls, value: str) -> str:
        return check_root_path(value)


def _shared_fields() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for config, internal in (
        (FrontendConfig, FRONTEND_INTERNALS),
        (EngineConfig, ENGINE_INTERNALS),
    ):
        for name, field in config.model_fields.items():
            if name not in internal:
                fields.setdefault(name, (field.annotation, field))
    return fields


ServeSettings: type[ServeOnlySettings] = create_model(
    "ServeSettings", __base__=ServeOnlySettings, **_shared_fields()
)
_PAGE_FIELDS = ("ui_port", "ui_auth", "ui_root_path")
FLAG_GROUPS = (
    FlagGroup(
        "addresses, frontend and chat page",
        tuple(
            name
            for name in ServeSettings.model_fields
            if name in _PAGE_FIELDS or name in FrontendConfig.model_fields
        ),
    ),
    FlagGroup(
        "engine",
        tuple(
            name
            for name in ServeSettings.model_fields
            if name not in (*_PAGE_FIELDS, "model") and name not in FrontendConfig.model_fields
        ),
    ),
)
