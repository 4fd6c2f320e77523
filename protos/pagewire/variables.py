"""Environment variables that are set for pagewire and that no program of it knows: misspelt, most
likely, and without a word they would be left out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

ENVIRONMENT_PREFIX = "PAGEWIRE_"
CONFIG_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG"

# Settings of any program: they may share an environment, and each knows its own only.
_SETTINGS = """
    allow_high_priority allow_request_chat_template allow_runtime_lora_updating
    allow_watch_stats api_key api_key_file async_scheduling attention_backend auth block_size
    chat_template cors_origin device download_dir drain_timeout_s dtype enable_lora
    enable_prefix_caching enforce_eager engine engine_ca engine_cert engine_key
    engine_stall_timeout_s failover_timeout_s frontend frontend_ca frontend_cert frontend_key
    gpu_memory_utilization grace_period_s grpc_port host http_port json kv_cache_dtype
    kv_cache_memory load_format local_socket log_format log_level log_requests login lora_dir
    lora_modules max_concurrency max_concurrent_requests max_cpu_loras max_lora_rank max_loras
    max_model_len max_num_batched_tokens max_num_seqs max_queue_time_s max_request_bytes
    max_requests_per_minute max_seq_len_to_capture max_waiting_requests model model_source
    normalize_embeddings num_gpu_blocks_override num_prompts num_threads open_metrics
    otlp_traces_endpoint output_len parse_control_tokens_in_chat parse_control_tokens_in_prompts
    pooling_type port preemption_mode prompt_len quantization reasoning_parser request_rate
    request_read_timeout_s response_store revision root_path runner seed served_model_name
    session_timeout_s shared_prefix_len skip_tokenizer_init slow_client_timeout_s
    sse_keepalive_s stream_endpoint swap_space target target_ca target_cert target_key tls_cert
    tls_client_ca tls_key tokenizer tokenizer_mode tool_call_parser trust_remote_code ui_auth
    ui_port ui_root_path warmup workers
"""
SETTINGS = frozenset(_SETTINGS.split())
# What is no setting.
_OTHERS = frozenset(("CONFIG", "CACHE", "COMMIT", "TEST_MODEL"))
_PREFIXES = ("CHAOS_",)
# What Kubernetes sets for each Service, such as one called pagewire-frontend.
_SERVICE_LINK = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_\w+)?)?)"
)
_LINKED_PORT = re.compile(r"(tcp|udp)://.*")


def variable_name(field: str) -> str:
    """`max_model_len` -> `PAGEWIRE_MAX_MODEL_LEN`."""
    return ENVIRONMENT_PREFIX + field.upper()


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Those whose names begin as pagewire's do, and that are none."""
    return sorted(
        name
        for name, value in environ.items()
        if name.startswith(ENVIRONMENT_PREFIX)
        and not _is_known(name.removeprefix(ENVIRONMENT_PREFIX), value)
    )


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for a program whose settings were read and resolved by another one, which has
    also told what is unknown."""
    left_out = {*map(variable_name, SETTINGS), CONFIG_VARIABLE, *unknown_variables(environ)}
    return {name: value for name, value in environ.items() if name not in left_out}


def warnings_about(unknown: Iterable[str], fields: Iterable[str]) -> list[str]:
    """A line about each unknown variable, which names the nearest of a program's own.

    Args:
        unknown: names of variables.
        fields: the program's settings.
    """
    known = [*map(str.upper, fields), "CONFIG"]
    return [
        f"{name} is set, and no setting is called so"
        + nearest(name.removeprefix(ENVIRONMENT_PREFIX).upper(), known, prefix=ENVIRONMENT_PREFIX)
        for name in unknown
    ]


def nearest(word: str, known: Sequence[str], *, prefix: str = "") -> str:
    """`; did you mean X?` where a known word is close, else nothing; X with a prefix before it."""
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {prefix}{matches[0]}?" if matches else ""


def _is_known(name: str, value: str) -> bool:
    if name.lower() in SETTINGS and name.isupper():
        return True
    if name in _OTHERS or name.startswith(_PREFIXES):
        return True
    return _SERVICE_LINK.fullmatch(name) is not None or _LINKED_PORT.match(value) is not None
