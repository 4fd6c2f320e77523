"""What the Grafana dashboard shows: rows of panels, and what each asks Prometheus.

Frontends tell of their engines too, by the label `engine` where they are several: what is an
engine's is taken once (max by), and what is a frontend's is added up (sum by).
"""

from __future__ import annotations

from dataclasses import dataclass

OURS = 'job="$job",model_name=~"$model"'
WINDOW = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    """A graph.

    Attributes:
        title, unit: as Grafana shows them.
        queries: legend and PromQL of each line or family of lines.
        help: what the reader should make of it.
        single: one number instead of a graph.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    help: str = ""
    single: bool = False


def rate(name: str, by: str = "") -> str:
    """How fast a counter of frontends goes up, in all of them."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({name}{{{OURS}}}[{WINDOW}]))"


def engine_rate(name: str, by: str = "engine") -> str:
    """How fast a counter of each engine goes up."""
    return f"max by ({by}) (rate({name}{{{OURS}}}[{WINDOW}]))"


def quantile(share: float, name: str) -> str:
    """A quantile of a histogram, over all frontends."""
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', 'le')})"


def quantiles(name: str) -> tuple[tuple[str, str], ...]:
    """The usual three."""
    return tuple((f"p{share * 100:.0f}", quantile(share, name)) for share in (0.5, 0.9, 0.99))


def engine(name: str, by: str = "engine") -> str:
    """A gauge of each engine."""
    return f"max by ({by}) ({name}{{{OURS}}})"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Now",
        (
            Panel("Frontends up", "short", (("", 'sum(up{job="$job"})'),), single=True),
            Panel(
                "Frontends with an engine",
                "short",
                (("", f"sum(pagewire_engine_ready{{{OURS}}})"),),
                single=True,
            ),
            Panel(
                "Requests in flight",
                "short",
                (("", f"sum(pagewire_num_requests_in_flight{{{OURS}}})"),),
                single=True,
            ),
            Panel(
                "Produced tokens a second",
                "short",
                (("", rate("pagewire_generation_tokens_total")),),
                single=True,
            ),
            Panel(
                "KV blocks held",
                "percentunit",
                (("", f"max(pagewire_kv_cache_usage_perc{{{OURS}}})"),),
                single=True,
            ),
            Panel(
                "Requests failed, 5 min",
                "short",
                (
                    (
                        "",
                        f"sum(increase(pagewire_request_failure_total{{{OURS}}}[5m])) or vector(0)",
                    ),
                ),
                single=True,
            ),
        ),
    ),
    (
        "What clients see",
        (
            Panel(
                "Time to first token",
                "s",
                quantiles("pagewire_time_to_first_token_seconds"),
                "From acceptance to the first token: the queue, the prefill, and the way back.",
            ),
            Panel(
                "Time between tokens",
                "s",
                quantiles("pagewire_inter_token_latency_seconds"),
                "Grows with the number of running requests, and with long prompts among them.",
            ),
            Panel("Whole request", "s", quantiles("pagewire_e2e_request_latency_seconds")),
            Panel(
                "Mean time a token after the first",
                "s",
                quantiles("pagewire_request_time_per_output_token_seconds"),
            ),
            Panel(
                "Sequences ended",
                "reqps",
                (
                    (
                        "{{finished_reason}}",
                        rate("pagewire_request_success_total", "finished_reason"),
                    ),
                ),
            ),
            Panel(
                "Requests refused or failed",
                "reqps",
                (("{{code}}", rate("pagewire_request_failure_total", "code")),),
                "RESOURCE_EXHAUSTED: refused, come again. UNAVAILABLE: the engine was away for too "
                "long. INTERNAL: ours to mend.",
            ),
        ),
    ),
    (
        "Load",
        (
            Panel(
                "Requests in the engine",
                "short",
                (
                    ("running {{engine}}", engine("pagewire_num_requests_running")),
                    ("waiting {{engine}}", engine("pagewire_num_requests_waiting")),
                    ("swapped {{engine}}", engine("pagewire_num_requests_swapped")),
                ),
            ),
            Panel(
                "Tokens a second",
                "short",
                (
                    ("produced", rate("pagewire_generation_tokens_total")),
                    ("prompts", rate("pagewire_prompt_tokens_total")),
                    ("of these cached", rate("pagewire_prompt_tokens_cached_total")),
                ),
            ),
            Panel(
                "Requests in flight, by frontend",
                "short",
                (
                    (
                        "{{instance}}",
                        f"sum by (instance) (pagewire_num_requests_in_flight{{{OURS}}})",
                    ),
                ),
            ),
            Panel("In the queue", "s", quantiles("pagewire_request_queue_time_seconds")),
            Panel("Prefill", "s", quantiles("pagewire_request_prefill_time_seconds")),
            Panel("Decoding", "s", quantiles("pagewire_request_decode_time_seconds")),
            Panel(
                "Prefill and decoding",
                "s",
                quantiles("pagewire_request_inference_time_seconds"),
            ),
            Panel("Tokens of prompts", "short", quantiles("pagewire_request_prompt_tokens")),
            Panel("Tokens of outputs", "short", quantiles("pagewire_request_generation_tokens")),
        ),
    ),
    (
        "Engine",
        (
            Panel(
                "KV blocks",
                "short",
                (("{{state}} {{engine}}", engine("pagewire_kv_blocks", "engine, state")),),
                "Cached blocks are free ones that remember: they are taken when free ones run out.",
            ),
            Panel(
                "Swap space",
                "percentunit",
                (("held {{engine}}", engine("pagewire_cpu_cache_usage_perc")),),
            ),
            Panel(
                "Preemptions",
                "ops",
                (
                    ("preempted {{engine}}", engine_rate("pagewire_num_preemptions_total")),
                    ("of these swapped {{engine}}", engine_rate("pagewire_num_swaps_total")),
                ),
                "More than a few: fewer requests at once (--max-num-seqs) or more memory.",
            ),
            Panel(
                "Prefix cache",
                "percentunit",
                (
                    (
                        "hits {{engine}}",
                        f"{engine_rate('pagewire_prefix_cache_hits_total')} / "
                        f"{engine_rate('pagewire_prefix_cache_queries_total')}",
                    ),
                ),
            ),
            Panel(
                "Steps",
                "ops",
                (
                    ("steps {{engine}}", engine_rate("pagewire_engine_steps_total")),
                    (
                        "overlapped {{engine}}",
                        engine_rate("pagewire_engine_steps_overlapped_total"),
                    ),
                    (
                        "out of memory {{engine}}",
                        engine_rate("pagewire_engine_steps_out_of_memory_total"),
                    ),
                ),
            ),
            Panel("Time of a step", "s", quantiles("pagewire_step_time_seconds")),
            Panel("Tokens of a step", "short", quantiles("pagewire_iteration_tokens_total")),
            Panel(
                "Engine: requests ended",
                "reqps",
                (
                    ("finished {{engine}}", engine_rate("pagewire_engine_requests_finished_total")),
                    ("failed {{engine}}", engine_rate("pagewire_engine_requests_failed_total")),
                ),
            ),
            Panel(
                "Delta wire: frames dropped",
                "ops",
                (
                    (
                        "by frontends: {{reason}}",
                        rate("pagewire_wire_frames_dropped_total", "reason"),
                    ),
                    (
                        "by engine {{engine}}: {{reason}}",
                        engine_rate("pagewire_engine_wire_frames_dropped_total", "engine, reason"),
                    ),
                ),
                "What is damaged or astray is dropped, and what it carried is sent again.",
            ),
            Panel(
                "Delta wire: sent again",
                "ops",
                (
                    ("asked for by frontends", rate("pagewire_wire_rewinds_total")),
                    (
                        "by engine {{engine}}",
                        engine_rate("pagewire_engine_wire_rewinds_total"),
                    ),
                ),
            ),
            Panel(
                "Engines that get requests",
                "short",
                (
                    ("{{engine}}", f"min by (engine) (pagewire_engine_up{{{OURS}}})"),
                    ("{{engine}}: {{state}}", engine("pagewire_engine_state", "engine, state")),
                ),
            ),
            Panel(
                "Requests by engine",
                "short",
                (
                    (
                        "{{engine}}",
                        f"sum by (engine) (pagewire_engine_requests_in_flight{{{OURS}}})",
                    ),
                ),
            ),
            Panel(
                "Requests sent to engines",
                "reqps",
                (
                    ("to {{engine}}", rate("pagewire_engine_requests_routed_total", "engine")),
                    ("again: {{reason}}", rate("pagewire_requests_resubmitted_total", "reason")),
                ),
            ),
            Panel(
                "Engines lost",
                "ops",
                (
                    ("connections lost", rate("pagewire_engine_connections_lost_total")),
                    ("requests that went on", rate("pagewire_requests_resumed_total")),
                ),
                "Requests that went on in another engine, or in another life of theirs.",
            ),
        ),
    ),
    (
        "Adapters",
        (
            Panel(
                "Adapters by place",
                "short",
                (("{{place}} {{engine}}", engine("pagewire_lora_adapters", "engine, place")),),
            ),
            Panel(
                "Adapters in use",
                "short",
                (
                    (
                        "{{state}} {{engine}}",
                        engine("pagewire_lora_adapters_in_use", "engine, state"),
                    ),
                ),
            ),
            Panel(
                "Adapters moved",
                "ops",
                (
                    ("read from files {{engine}}", engine_rate("pagewire_lora_host_loads_total")),
                    (
                        "given a place in a step {{engine}}",
                        engine_rate("pagewire_lora_device_loads_total"),
                    ),
                    (
                        "left host memory {{engine}}",
                        engine_rate("pagewire_lora_host_evictions_total"),
                    ),
                ),
            ),
        ),
    ),
    (
        "Frontend processes",
        (
            Panel(
                "CPU",
                "percentunit",
                (("{{instance}}", f'rate(process_cpu_seconds_total{{job="$job"}}[{WINDOW}])'),),
                "A frontend process uses one core at most.",
            ),
            Panel(
                "Memory",
                "bytes",
                (("{{instance}}", 'process_resident_memory_bytes{job="$job"}'),),
            ),
            Panel(
                "Certificates end in",
                "s",
                (
                    (
                        "{{certificate}}",
                        f"min by (certificate) (pagewire_tls_certificate_expiry_timestamp_seconds"
                        f"{{{OURS}}}) - time()",
                    ),
                    (
                        "engine {{engine}}",
                        f"min by (engine) (pagewire_engine_tls_certificate_expiry_timestamp_seconds"
                        f"{{{OURS}}}) - time()",
                    ),
                ),
                "Empty without TLS. Renewed files are taken up without a restart.",
            ),
            Panel(
                "File descriptors",
                "percentunit",
                (
                    (
                        "{{instance}}",
                        'process_open_fds{job="$job"} / process_max_fds{job="$job"}',
                    ),
                ),
            ),
        ),
    ),
)
