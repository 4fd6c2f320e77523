"""The chat page's settings."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from pagewire.logs import LogFormat
from pagewire.setting_checks import check_host_port, check_logins, check_root_path


class UiConfig(BaseModel):
    """Settings of `pagewire-ui`. Field names in kebab-case are its flags."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    frontend: str = Field(
        default="127.0.0.1:50051",
        description="HOST:PORT of the frontend's gRPC API, or unix: and the path of its socket.",
    )
    frontend_ca: str | None = Field(
        default=None,
        description="PEM file of the issuers of the frontend's certificate, which must name its "
        "host: the frontend is then called by TLS.",
    )
    frontend_cert: str | None = Field(
        default=None,
        description="PEM file of the certificate to show a frontend that asks for one (mTLS).",
    )
    frontend_key: str | None = Field(
        default=None, description="PEM file of the private key of frontend-cert."
    )
    api_key: SecretStr | None = Field(
        default=None,
        description="API key that the page shows its frontend. Others of the machine can read a "
        "command line: better set PAGEWIRE_API_KEY.",
    )
    login: bool = Field(
        default=False,
        description="Ask those who open the page for an API key of the frontend.",
    )
    auth: SecretStr | None = Field(
        default=None,
        description="USER:PASSWORD that visitors must enter, or several separated by commas. "
        "Others of the machine can read a command line: better set PAGEWIRE_AUTH.",
    )
    root_path: str = Field(
        default="",
        description="Path under which a reverse proxy shows the page, such as /chat, where the "
        "proxy takes it off before it passes requests on.",
    )
    host: str = Field(
        default="localhost",
        description="Address to listen on; localhost: both loopbacks, 127.0.0.1 and ::1; "
        "*: every address of the machine.",
    )
    port: int = Field(
        default=7860, ge=0, le=65535, description="Port of the chat page; 0: a free one."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe messages to log; debug: each HTTP request too."
    )
    log_format: LogFormat = Field(
        default="text", description="Lines for people, or one JSON object a line."
    )

    @field_validator("frontend")
    @classmethod
    def _check_frontend(cls, value: str) -> str:
        return value if value.startswith("unix:/") else check_host_port(value)

    @field_validator("auth")
    @classmethod
    def _check_auth(cls, value: SecretStr | None) -> SecretStr | None:
        return check_logins(value)

    @field_validator("root_path")
    @classmethod
    def _check_root_path(cls, value: str) -> str:
        return check_root_path(value)

    @model_validator(mode="after")
    def _check_one_login(self) -> Self:
        if self.auth is not None and self.login:
            raise ValueError("auth and login ask for different passwords; set one of them")
        return self
