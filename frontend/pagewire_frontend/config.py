"""The frontend's settings: one definition for flags, YAML and environment."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from pagewire.logs import LogFormat
from pagewire.setting_checks import Guard, check_host_port, check_url

# What other servers call gpt-oss's format.
_HARMONY = frozenset(("harmony", "openai", "openai_gptoss", "gpt_oss", "gpt-oss"))


def _not_harmony(name: Any) -> Any:
    if isinstance(name, str) and name.lower() in _HARMONY:
        raise ValueError(
            "pagewire does not take Harmony apart, the format of gpt-oss's models, of which its "
            "engine has none: serve another model and leave this at auto, or set none and read "
            "answers as the model wrote them"
        )
    return name


ToolCallParserName = Annotated[
    Literal[
        "auto",
        "none",
        "deepseek",
        "firefunction",
        "functionary",
        "glm45",
        "hermes",
        "llama3_json",
        "mistral",
        "pythonic",
        "qwen3_coder",
        "seed_oss",
    ],
    BeforeValidator(_not_harmony),
]
ReasoningParserName = Annotated[
    Literal["auto", "none", "think", "seed_oss", "mistral", "granite"],
    BeforeValidator(_not_harmony),
]


class FrontendConfig(BaseModel):
    """Settings of `pagewire-frontend`. Field names in kebab-case are its flags."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: tuple[str, ...] = Field(
        default=("127.0.0.1:50061",),
        min_length=1,
        description="HOST:PORT of the engine's control API. Several replicas: given several times, "
        "or with commas between them; or a DNS name with an address for each, which is looked up "
        "again and again.",
    )
    engine_ca: str | None = Field(
        default=None,
        description="PEM file of the issuers of the engine's certificate, which must name its "
        "host: the engine is then called by TLS.",
    )
    engine_cert: str | None = Field(
        default=None,
        description="PEM file of the certificate to show an engine that asks for one (mTLS).",
    )
    engine_key: str | None = Field(
        default=None, description="PEM file of the private key of engine-cert."
    )
    host: str = Field(
        default="localhost",
        description="Address to listen on; localhost: both loopbacks, 127.0.0.1 and ::1; "
        "*: every address of the machine.",
    )
    http_port: int = Field(
        default=8000,
        ge=0,
        le=65535,
        description="Port of the OpenAI-compatible API; 0: a free one.",
    )
    grpc_port: int = Field(
        default=50051, ge=0, le=65535, description="Port of the gRPC API; 0: a free one."
    )
    local_socket: str | None = Field(
        default=None,
        description="Path of a Unix socket that serves the gRPC API besides, without TLS, for "
        "programs of this machine that may open it. API keys are asked for there too.",
    )
    api_key: SecretStr | None = Field(
        default=None,
        description="API key, or several with commas between them: every route but health then "
        "asks for one. Others of the machine can read a command line: better set "
        "PAGEWIRE_API_KEY, or api-key-file.",
    )
    api_key_file: Annotated[str | None, Guard()] = Field(
        default=None,
        description="File of API keys, one a line, and after a key, if need be, the name of a "
        "tenant whose fair share it counts on. It is read again when it has changed.",
    )
    open_metrics: bool = Field(
        default=False, description="Let /metrics be read without an API key."
    )
    max_requests_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Requests a minute of each tenant (without API keys: of all clients together) "
        "that a frontend takes; beyond it HTTP 429 or RESOURCE_EXHAUSTED, saying when to come "
        "again. Default: any number.",
    )
    max_concurrent_requests: int | None = Field(
        default=None,
        ge=1,
        description="Requests of each tenant (without API keys: of all clients together) that may "
        "be under way in a frontend; beyond it HTTP 429 or RESOURCE_EXHAUSTED. Default: any "
        "number.",
    )
    response_store: ByteSize = Field(
        default=ByteSize(0),
        ge=0,
        description="Memory for answers of /v1/responses, such as 64MiB, so that clients can read "
        "them again and go on from them (previous_response_id); the oldest are forgotten first. "
        "Default: 0, none are kept.",
    )
    cors_origin: tuple[str, ...] = Field(
        default=(),
        description="Origin whose web pages may call the HTTP API, such as https://example.org; "
        "*: any. May be given several times. Default: none.",
    )
    tls_cert: Annotated[str | None, Guard()] = Field(
        default=None,
        description="PEM file of the certificate of both ports, with those that lead to its "
        "issuer: HTTP and gRPC are then spoken over TLS alone.",
    )
    tls_key: Annotated[str | None, Guard()] = Field(
        default=None, description="PEM file of the certificate's private key, without a password."
    )
    tls_client_ca: Annotated[str | None, Guard()] = Field(
        default=None,
        description="PEM file of the issuers of the certificates that clients must show (mTLS).",
    )
    workers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Frontend processes that share the ports: one is a core's worth of tokens. "
        "Limits count in each of them.",
    )
    chat_template: str | None = Field(
        default=None,
        description="Jinja file (or the template itself) that replaces the model's chat template; "
        "or a folder of named ones, NAME.jinja, which requests may name as their chat_template: "
        "with a default.jinja they replace the model's own, else they come to them.",
    )
    allow_request_chat_template: bool = Field(
        default=False, description="Let requests bring a chat template of their own."
    )
    tool_call_parser: ToolCallParserName = Field(
        default="auto",
        description="How the model writes tool calls, so that chats with tools get them apart from "
        "the text; auto: recognised by its chat template; none: tools are refused.",
    )
    reasoning_parser: ReasoningParserName = Field(
        default="auto",
        description="How the model marks its reasoning, which chats get apart from the answer; "
        "auto: recognised by its chat template; none: it is part of the answer.",
    )
    parse_control_tokens_in_chat: bool = Field(
        default=False,
        description="Read control tokens such as <|im_end|> in chat messages as such, not as text.",
    )
    parse_control_tokens_in_prompts: bool = Field(
        default=True, description="Read control tokens in raw prompts as such, not as text."
    )
    allow_watch_stats: bool = Field(
        default=False,
        description="Let clients of the gRPC API watch the engine's queues and blocks "
        "(Observability.WatchStats; the chat page then draws them), without ids or content.",
    )
    allow_runtime_lora_updating: bool = Field(
        default=False,
        description="Let clients load, unload and list LoRA adapters, from the engine's lora-dir.",
    )
    allow_high_priority: bool = Field(
        default=False,
        description="Let clients send a priority below 0, which goes before all requests that "
        "have none, whoever sent them. Offline use is not limited.",
    )
    max_request_bytes: int = Field(
        default=16 << 20, ge=1024, description="Largest request body or gRPC message, in bytes."
    )
    request_read_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds in which an HTTP request must have come, and one more for each 10 kB "
        "of its body; slower clients are cut off.",
    )
    slow_client_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds that a client may leave its answer unread before it is cut off, over "
        "gRPC by RESOURCE_EXHAUSTED, over HTTP by the end of the connection; its requests are "
        "aborted.",
    )
    failover_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds that streams wait for a lost engine; then they fail as UNAVAILABLE.",
    )
    grace_period_s: float = Field(
        default=10.0, ge=0, description="Seconds that running requests get to end at shutdown."
    )
    sse_keepalive_s: float = Field(
        default=15.0, gt=0, description="Seconds of silence before an SSE stream sends a comment."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe messages to log; debug: each HTTP request too."
    )
    log_format: LogFormat = Field(
        default="text", description="Lines for people, or one JSON object a line."
    )
    log_requests: bool = Field(
        default=False,
        description="Log a line about each generation at its end: its id, tenant, tokens, seconds "
        "and outcome; never its text.",
    )

    otlp_traces_endpoint: str | None = Field(
        default=None,
        description="URL of the collector that OpenTelemetry traces are sent to by OTLP, such as "
        "http://localhost:4317 (gRPC; the extra `otel`). No text is ever in them. Default: none.",
    )

    @model_validator(mode="after")
    def _check_workers(self) -> FrontendConfig:
        if self.workers > 1 and self.response_store:
            raise ValueError(
                "--response-store needs --workers 1: a client's next request may reach another "
                "process, which knows nothing of the answer"
            )
        return self

    @field_validator("cors_origin")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            scheme, _, host = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not host or "/" in host):
                raise ValueError("must be * or like https://example.org:8443, without a path")
        return value

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _check_otlp_traces_endpoint(cls, value: str | None) -> str | None:
        return check_url(value)

    @field_validator("engine", mode="before")
    @classmethod
    def _split_engines(cls, value: object) -> object:
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, (list, tuple)):
            return value
        return tuple(
            part.strip() if isinstance(part, str) else part
            for each in given
            for part in (each.split(",") if isinstance(each, str) else [each])
        )

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            check_host_port(each)
        if len(set(value)) < len(value):
            raise ValueError("names an engine twice")
        return value

    @property
    def engines(self) -> str:
        """The engines, for messages: "the engine at a:1", "the engines at a:1, b:1"."""
        return f"the engine{'s' if len(self.engine) > 1 else ''} at {', '.join(self.engine)}"
