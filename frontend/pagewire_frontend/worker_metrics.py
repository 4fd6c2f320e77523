"""The metrics of several workers in one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from pagewire_frontend.metrics import Collected
from pagewire_frontend.workers import Worker


async def with_siblings(own: bytes, siblings: Sequence[Worker]) -> bytes:
    """One worker's metrics and those of the others that answer.

    Each figure has a label `worker`: the sum over it is the frontend's. Not added up here, for the
    counters of a worker that was restarted begin anew, which a sum would hide from Prometheus.
    """
    told = await asyncio.gather(
        *(worker.get("/metrics") for worker in siblings), return_exceptions=True
    )
    texts = [own, *(text for text in told if isinstance(text, bytes))]
    return await asyncio.to_thread(merged, texts)


def merged(texts: Iterable[bytes]) -> bytes:
    """Several answers in Prometheus's text format as one."""
    families: dict[str, Metric] = {}
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            known = families.setdefault(family.name, family)
            if known is not family:
                known.samples += family.samples
    return generate_latest(Collected(list(families.values())))
