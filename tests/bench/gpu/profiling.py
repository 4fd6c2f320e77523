"""Where the time of a step goes on the GPU: the kernels that take most of it, and the gaps.

A few steps are recorded by torch's profiler in the middle of a workload. Recording makes the host
slower and forbids kernels to overlap: durations of kernels can be relied on, gaps are upper bounds.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.gpu.lines import Line
from tests.bench.gpu.workloads import fixed, mixed

if TYPE_CHECKING:
    from tests.bench.gpu.offline import Offline

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_SHOWN_KERNELS, _SHOWN_CALLS = 14, 4
_NAME_LENGTH = 100
_PROBE_TOKENS = 48
# How long a decode lasts, so that the profiler starts and ends within.
_DECODE_S = 2.0
_MOST_TOKENS = 4000
_SKIPPED_STEPS, _RECORDED_STEPS = 24, 20


@dataclass(frozen=True)
class Summary:
    """What a recording shows; times are of one step.

    Attributes:
        ms_per_step: from the first kernel's begin to the last one's end.
        busy: the part of that in which the GPU did something.
        kernels_per_step: kernels, copies and fills.
        longest_gap_us: the longest time in which it did nothing.
        kernels: (name, us a step, times a step), those that take longest first.
        host_calls: the same of calls to the CUDA runtime.
    """

    ms_per_step: float
    busy: float
    kernels_per_step: float
    longest_gap_us: float
    kernels: list[tuple[str, float, float]]
    host_calls: list[tuple[str, float, float]]


def summarize(events: Sequence[Mapping[str, Any]], steps: int) -> Summary:
    """Sums up a trace in Chrome's format.

    Args:
        events: its `traceEvents`; times in microseconds.
        steps: how many steps it holds.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    on_gpu = [event for event in timed if event.get("cat") in _ON_GPU]
    if not on_gpu:
        raise RuntimeError("the recording holds nothing that ran on a GPU")
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in on_gpu)
    busy, longest_gap, end = 0.0, 0.0, spans[0][0]
    for begin, stop in spans:
        longest_gap = max(longest_gap, begin - end)
        busy += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    length = end - spans[0][0]
    runtime = [event for event in timed if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    return Summary(
        ms_per_step=length / steps / 1e3,
        busy=busy / length,
        kernels_per_step=len(on_gpu) / steps,
        longest_gap_us=longest_gap,
        kernels=_longest(on_gpu, steps, _SHOWN_KERNELS),
        host_calls=_longest(runtime, steps, _SHOWN_CALLS),
    )


def _longest(
    events: Sequence[Mapping[str, Any]], steps: int, count: int
) -> list[tuple[str, float, float]]:
    time_of: Counter[str] = Counter()
    calls_of: Counter[str] = Counter()
    for event in events:
        time_of[event["name"]] += event["dur"]
        calls_of[event["name"]] += 1
    return [
        (name[:_NAME_LENGTH], us / steps, calls_of[name] / steps)
        for name, us in time_of.most_common(count)
    ]


def table(title: str, summary: Summary) -> str:
    """A few lines for people."""
    total = 1e3 * summary.ms_per_step
    lines = [
        f"{title}: {summary.ms_per_step:.3f} ms a step, GPU busy {summary.busy:.1%}, "
        f"{summary.kernels_per_step:.0f} kernels a step, idle "
        f"{total * (1 - summary.busy):.0f} us a step, {summary.longest_gap_us:.0f} us at most"
    ]
    for name, us, calls in summary.kernels:
        lines.append(f"  {us:9.1f} us {us / total:6.1%} {calls:7.1f}x  {name}")
    lines += [
        f"  host {us:9.1f} us {calls:7.1f}x  {name}" for name, us, calls in summary.host_calls
    ]
    return "\n".join(lines)


def run_profile(offline: Offline) -> Iterator[Line]:
    """Decodes at each batch size of B, mixed steps of A, and the first prefill of C."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]):
        pass  # the first start takes seconds
    scale = offline.model.scale
    for batch in scale.decode_batches:
        prompts = fixed(scale, batch, scale.decode_prompt, 100 + batch)
        offline.generate(prompts, [1] * batch, {"temperature": 0.0})
        probed = offline.generate(prompts, [_PROBE_TOKENS] * batch, {"temperature": 0.0})
        tokens = min(_MOST_TOKENS, int(_DECODE_S * _PROBE_TOKENS / probed) + 2 * _SKIPPED_STEPS)
        yield _profiled(offline, f"decode {batch}", prompts, [tokens] * batch, _SKIPPED_STEPS)
    yield _profiled(offline, "mixed", *mixed(scale), 2 * _SKIPPED_STEPS)
    batch, length = scale.prefills[0]
    prompts = fixed(scale, 4 * batch, length, 7)
    yield _profiled(offline, "prefill", prompts, [1] * 4 * batch, 2)


def _profiled(
    offline: Offline, name: str, prompts: list[list[int]], lengths: list[int], skipped: int
) -> Line:
    """Generates on another thread, and records some of its steps after those skipped."""
    from torch.profiler import ProfilerActivity, profile

    work = threading.Thread(target=offline.generate, args=(prompts, lengths, {"temperature": 0.0}))
    first = offline.num_steps
    work.start()
    _wait(offline, work, first + skipped)
    with profile(activities=[ProfilerActivity.CUDA]) as recording:
        begun = offline.num_steps
        _wait(offline, work, begun + _RECORDED_STEPS)
        steps = max(1, offline.num_steps - begun)
    work.join()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recording.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    summary = summarize(events, steps)
    return {
        "test": "profile",
        "phase": name,
        "ms_per_step": round(summary.ms_per_step, 3),
        "gpu_busy": round(summary.busy, 4),
        "steps": steps,
        "text": table(f"{offline.model.name} {name}", summary),
    }


def _wait(offline: Offline, work: threading.Thread, step: int) -> None:
    while offline.num_steps < step and work.is_alive():
        time.sleep(0.0002)
