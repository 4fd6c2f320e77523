"""The engine's settings: one definition for flags, YAML, environment and `LLM(...)` arguments."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from pagewire.logs import LogFormat
from pagewire.lora import LoraModule
from pagewire.setting_checks import Guard, check_url

# What one step computes at most, unless told otherwise, by kind of device.
DEFAULT_BATCHED_TOKENS = {"cuda": 8192, "cpu": 512}
_DEFAULT_CPU_LORAS = 32


class EngineConfig(BaseModel):
    """Settings of `engine-service`. Field names in kebab-case are its flags."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="Model folder, GGUF file, or hub name (org/name).")
    served_model_name: str | None = Field(
        default=None,
        description="Name that clients use. Default: a hub name as it is (org/name), or the last "
        "part of a path, of a folder or a file, without .gguf.",
    )
    model_source: Literal["huggingface", "modelscope"] = Field(
        default="huggingface", description="Hub that a model name is looked up on."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit on the hub.")
    download_dir: str | None = Field(
        default=None, description="Where hub downloads are kept. Default: the hub's own cache."
    )
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = Field(
        default="auto", description="Weight format; dummy: seeded random weights, for benchmarks."
    )
    runner: Literal["auto", "generate", "pooling"] = Field(
        default="auto",
        description="generate: text; pooling: vectors (embeddings, scores, classes); auto: pooling "
        "for encoders and for models with sentence-transformers' modules.json.",
    )
    pooling_type: Literal["cls", "mean", "last"] | None = Field(
        default=None,
        description="Whose hidden state an embedding is: the first token's, the mean, or the last "
        "token's. Default: by the model's files, else mean for encoders, last for other models.",
    )
    normalize_embeddings: bool | None = Field(
        default=None,
        description="Scale embeddings to length 1, unless a request says otherwise. Default: by "
        "the model's files, else yes.",
    )
    tokenizer: str | None = Field(
        default=None, description="Tokenizer folder or hub name, where it is not the model's own."
    )
    tokenizer_mode: Literal["auto", "fast"] = Field(
        default="auto",
        description="auto: tokenizer.json, or converted from GGUF; fast: tokenizer.json only.",
    )
    skip_tokenizer_init: bool = Field(
        default=False, description="Serve token ids only; no tokenizer is looked for."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Weights, KV cache and activations (of the C++ kernels always fp32); auto: the "
        "model's own on CUDA, fp32 on CPU.",
    )
    quantization: Literal["none", "int8"] = Field(
        default="none",
        description="int8: linears' weights rounded to 8 bits while loading, on CPU: less memory, "
        "faster prefill and decoding; their inputs are rounded to 16 bits.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where to run.")
    seed: int = Field(
        default=0, ge=0, description="Seed of dummy weights and of seeds given to requests."
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="Longest prompt plus output. Default: the model's."
    )
    block_size: int = Field(default=16, ge=1, le=256, description="Tokens in a KV block.")
    kv_cache_memory: ByteSize | None = Field(
        default=None,
        ge=1,
        description="Memory of the KV cache, such as 4GiB. Default: on CUDA what "
        "gpu-memory-utilization leaves, on CPU 40% of what is free, at most 4 GiB.",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = Field(
        default="auto",
        description="Numbers in the KV cache; auto: as dtype, with quantization int8 bfloat16. On "
        "CPU bfloat16, on CUDA fp8 (e4m3) holds twice the tokens in the same memory, less exactly.",
    )
    swap_space: ByteSize | None = Field(
        default=None,
        ge=0,
        description="Host memory for the KV blocks of preempted requests, such as 4GiB; 0: none. "
        "Default: 10% of what is free, at most 4 GiB on CUDA, 1 GiB on CPU.",
    )
    preemption_mode: Literal["auto", "recompute", "swap"] = Field(
        default="auto",
        description="What becomes of the KV blocks of a request that must wait: recompute drops "
        "them, swap moves them to swap-space; auto: swap where its sequences share blocks.",
    )
    enable_prefix_caching: bool = Field(
        default=True,
        description="Keep the blocks of finished prompts for prompts that begin alike.",
    )
    num_gpu_blocks_override: int | None = Field(
        default=None, ge=1, description="Number of KV blocks (on CPU too), instead of measuring."
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="Share of the GPU's memory to use."
    )
    max_num_seqs: int = Field(default=256, ge=1, description="Most sequences in one step.")
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens in one step (chunked prefill). Default: 8192 on CUDA, 512 on CPU.",
    )
    async_scheduling: bool | None = Field(
        default=None,
        description="Schedule the next step while one is computed. Default: on CUDA, not on CPU, "
        "where both would compete for the cores.",
    )
    enforce_eager: bool = Field(
        default=False,
        description="Launch steps kernel by kernel, without CUDA graphs: slower, but ready "
        "seconds sooner and with more memory for KV blocks.",
    )
    max_seq_len_to_capture: int | None = Field(
        default=None,
        ge=1,
        description="Longest sequence whose steps are CUDA graphs; with a longer one a step "
        "is launched kernel by kernel. Default: the longest there can be, since the graphs serve "
        "every length.",
    )
    max_waiting_requests: int = Field(
        default=4096,
        ge=1,
        description="Requests that may wait; beyond it RESOURCE_EXHAUSTED (HTTP 429) for tenants "
        "that have their part of the queue already.",
    )
    max_queue_time_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds after which a request that has not started fails as "
        "DEADLINE_EXCEEDED (HTTP 504). Default: it waits on.",
    )
    attention_backend: Literal["auto", "torch", "cpu", "triton", "xformers"] = Field(
        default="auto",
        description="torch: any device; cpu: C++ kernel; triton: CUDA; xformers: CUDA, an extra; "
        "auto: cpu or triton where it is installed, else torch.",
    )
    enable_lora: bool = Field(
        default=False, description="Let requests name LoRA adapters as their model."
    )
    lora_modules: tuple[str, ...] = Field(
        default=(),
        description="Adapter to load at the start: name=folder, or JSON such as "
        '{"name": "a", "path": "folder", "base_model_name": "org/base"}. Can be repeated.',
    )
    lora_dir: str | None = Field(
        default=None,
        description="Folder that adapters may be loaded from while the engine runs. Default: none "
        "may.",
    )
    max_loras: int = Field(
        default=4, ge=1, le=256, description="Most different adapters in one step."
    )
    max_cpu_loras: int | None = Field(
        default=None,
        ge=1,
        description="Most adapters in host memory; others are read again when they are asked for. "
        "Default: 32, or max-loras if that is more.",
    )
    max_lora_rank: int = Field(default=64, ge=1, le=512, description="Highest rank of an adapter.")
    num_threads: int | None = Field(
        default=None, ge=1, description="CPU threads of the model. Default: the machine's cores."
    )
    trust_remote_code: bool = Field(
        default=False, description="Refused: pagewire runs no code that comes with a model."
    )
    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on; localhost: both loopbacks, 127.0.0.1 and ::1; "
        "*: every address of the machine.",
    )
    port: int = Field(
        default=50061, ge=0, le=65535, description="Port of the control API; 0: a free one."
    )
    stream_endpoint: str | None = Field(
        default=None,
        description="ZeroMQ endpoint of the delta wire. Default: ipc on loopback, else tcp.",
    )
    session_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds of silence after which a frontend counts as dead.",
    )
    drain_timeout_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds that running requests get at SIGTERM to end, or to be moved to "
        "replicas by their frontends, before the rest is handed over to whatever engine comes "
        "next. Default: 0, all are handed over at once.",
    )
    tls_cert: Annotated[str | None, Guard()] = Field(
        default=None,
        description="PEM file of the control API's certificate, with those that lead to its "
        "issuer: frontends then call it by TLS alone.",
    )
    tls_key: Annotated[str | None, Guard()] = Field(
        default=None, description="PEM file of the certificate's private key, without a password."
    )
    tls_client_ca: Annotated[str | None, Guard()] = Field(
        default=None,
        description="PEM file of the issuers of the certificates that frontends must show (mTLS).",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe messages to log."
    )
    log_format: LogFormat = Field(
        default="text", description="Lines for people, or one JSON object a line."
    )
    otlp_traces_endpoint: str | None = Field(
        default=None,
        description="URL of the collector that OpenTelemetry traces are sent to by OTLP, such as "
        "http://localhost:4317 (gRPC; the extra `otel`). No text is ever in them. Default: none.",
    )

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _check_otlp_traces_endpoint(cls, value: str | None) -> str | None:
        return check_url(value)

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _lora_modules(cls, value: Any) -> Any:
        """Each as text; YAML may have objects, and a variable a list whose JSON was cut at its
        commas."""
        items = [value] if isinstance(value, str | dict) else value
        if not isinstance(items, list | tuple):
            return value
        texts: list[Any] = []
        for item in items:
            text = json.dumps(item) if isinstance(item, dict) else item
            if texts and isinstance(text, str) and _is_cut(texts[-1]):
                texts[-1] += f",{text}"
            else:
                texts.append(text)
        modules = [LoraModule.parse(text) for text in texts if isinstance(text, str)]
        names = [module.name for module in modules]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{twice[0]!r} is named twice")
        return tuple(texts)

    @model_validator(mode="after")
    def _check_lora(self) -> EngineConfig:
        if (self.lora_modules or self.lora_dir is not None) and not self.enable_lora:
            name = "lora_modules" if self.lora_modules else "lora_dir"
            raise ValueError(f"{name.replace('_', '-')} needs enable-lora")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max-cpu-loras must be at least max-loras, which is {self.max_loras}")
        return self

    @property
    def num_host_adapters(self) -> int:
        """max_cpu_loras, or its default."""
        return self.max_cpu_loras or max(_DEFAULT_CPU_LORAS, self.max_loras)

    @field_validator("kv_cache_memory", "swap_space", mode="wrap")
    @classmethod
    def _size(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            if error.errors()[0]["type"].startswith("byte_size"):
                raise ValueError("must be a size, such as 4GiB, or a number of bytes") from None
            raise


def _is_cut(text: Any) -> bool:
    """Whether a text is the beginning of a JSON object."""
    return isinstance(text, str) and text.lstrip().startswith("{") and "}" not in text
