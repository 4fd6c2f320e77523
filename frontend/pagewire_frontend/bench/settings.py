"""The settings of `pagewire bench`: the workload's, and those of an engine that is loaded here."""

from __future__ import annotations

import re
import warnings
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, create_model, field_validator

from pagewire.config import EngineConfig
from pagewire.setting_checks import check_api_key, check_host_port
from pagewire.settings import FlagGroup, SettingsError, flag_name
from pagewire_frontend.model_download import MODEL_NAME

# Of an engine that serves others.
_SERVER_FIELDS = frozenset(
    {"model", "seed", "host", "port", "stream_endpoint", "session_timeout_s", "log_level"}
)
_DEFAULT_CONCURRENCY = 32
_LENGTHS = re.compile(r"(\d+)(?:-(\d+))?")

with warnings.catch_warnings():
    # The flag is called --json; that pydantic once had a method of the name is none of its concern.
    warnings.filterwarnings("ignore", message='Field name "json"')

    class BenchOnlySettings(BaseModel):
        """The settings that belong to `pagewire bench` itself."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        model: str | None = Field(
            default=None,
            min_length=1,
            description="Model folder, GGUF file, or hub name (org/name) to load. "
            f"Default: {MODEL_NAME}, downloaded (93 MB) on first use.",
        )
        target: str | None = Field(
            default=None,
            description="HOST:PORT of a running frontend's gRPC API, to be measured instead.",
        )
        api_key: SecretStr | None = Field(
            default=None,
            description="API key to show the target. Others of the machine can read a command "
            "line: better set PAGEWIRE_API_KEY.",
        )
        target_ca: str | None = Field(
            default=None,
            description="PEM file of the issuers of the target's certificate, which must name its "
            "host: it is then called by TLS.",
        )
        target_cert: str | None = Field(
            default=None,
            description="PEM file of the certificate to show a target that asks for one (mTLS).",
        )
        target_key: str | None = Field(
            default=None, description="PEM file of the private key of target-cert."
        )
        num_prompts: int = Field(default=32, ge=1, description="Requests to measure.")
        warmup: int = Field(default=1, ge=0, description="Requests to run before, unmeasured.")
        prompt_len: str = Field(
            default="128", description="Tokens of a prompt: N, or MIN-MAX for a random length each."
        )
        output_len: str = Field(
            default="128",
            description="Tokens of an answer: N, or MIN-MAX for a random length each.",
        )
        shared_prefix_len: int = Field(
            default=0, ge=0, description="Tokens before each prompt's own that all prompts share."
        )
        max_concurrency: int | None = Field(
            default=None,
            ge=1,
            description="Most requests in flight. "
            f"Default: {_DEFAULT_CONCURRENCY}; with --request-rate, no limit.",
        )
        request_rate: float | None = Field(
            default=None,
            gt=0,
            description="Mean requests a second, arriving at random (a Poisson process). "
            "Latencies count from a request's arrival, whether or not it could be sent then. "
            "Default: as many as may be in flight, at once.",
        )
        seed: int = Field(
            default=0, ge=0, description="Seed of lengths, prompts and arrivals, and dummy weights."
        )
        json: bool = Field(  # type: ignore[assignment]  # pydantic's own, deprecated
            default=False, description="Print one JSON object instead of the table."
        )

        @property
        def concurrency_limit(self) -> int | None:
            """Most requests in flight; None: no limit, for one would hide that a rate is too high
            for the server."""
            if self.max_concurrency is None and self.request_rate is None:
                return _DEFAULT_CONCURRENCY
            return self.max_concurrency

        @field_validator("prompt_len", "output_len")
        @classmethod
        def _check_lengths(cls, value: str) -> str:
            parse_lengths(value)
            return value

        @field_validator("target")
        @classmethod
        def _check_target(cls, value: str | None) -> str | None:
            return value if value is None else check_host_port(value)

        @field_validator("api_key")
        @classmethod
        def _check_api_key(cls, value: SecretStr | None) -> SecretStr | None:
            return check_api_key(value)


def parse_lengths(text: str) -> tuple[int, int]:
    """The shortest and the longest of `128` or `64-256`.

    Raises:
        ValueError: it is neither.
    """
    match = _LENGTHS.fullmatch(text)
    low = int(match[1]) if match else 0
    high = int(match[2]) if match and match[2] else low
    if not 0 < low <= high:
        raise ValueError("must be a number of tokens, or MIN-MAX, such as 128 or 64-256")
    return low, high


def _engine_fields() -> dict[str, Any]:
    return {
        name: (field.annotation, field)
        for name, field in EngineConfig.model_fields.items()
        if name not in _SERVER_FIELDS
    }


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message='Field name "json"')
    BenchSettings: type[BenchOnlySettings] = create_model(
        "BenchSettings", __base__=BenchOnlySettings, **_engine_fields()
    )
FLAG_GROUPS = (FlagGroup("engine, where one is loaded here", tuple(_engine_fields())),)


def engine_config(settings: BenchOnlySettings, model: str, **defaults: str) -> EngineConfig:
    """Of the engine to load.

    Args:
        settings: what the user gave.
        model: path or name of the model.
        defaults: for settings that the user did not give.

    Raises:
        pydantic.ValidationError: a rule over several settings is broken.
    """
    given = {
        name: getattr(settings, name)
        for name in settings.model_fields_set
        if name in EngineConfig.model_fields and name != "model"
    }
    return EngineConfig(**(defaults | given), model=model)


def check_target(settings: BenchOnlySettings) -> None:
    """Raises SettingsError where settings of an engine to load stand beside a running server, or
    those of a server beside none."""
    for name in ("target_ca", "target_cert", "target_key"):
        if settings.target is None and getattr(settings, name) is not None:
            raise SettingsError(f"{flag_name(name)} is about a running server: name it by --target")
    idle = [name for name in settings.model_fields_set if name in ("model", *_engine_fields())]
    if settings.target is not None and idle:
        raise SettingsError(
            f"{flag_name(sorted(idle)[0])} is about a model that is loaded here; leave it out, or "
            "leave out --target"
        )
