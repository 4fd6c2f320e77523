"""The chat page's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from pagewire.settings import check_host_port


class UiConfig(BaseModel):
    """Settings of `pagewire-ui`. Field names in kebab-case are its flags."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    frontend: str = Field(
        default="127.0.0.1:50051", description="HOST:PORT of the frontend's gRPC API."
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

    @field_validator("frontend")
    @classmethod
    def _check_frontend(cls, value: str) -> str:
        return check_host_port(value)
