"""When certificates end, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pagewire.certificates import RenewedTls, file_expires_at
from pagewire.tls import ClientTls, ServerTls


class CertificateFigures(Collector):
    """The ends of a frontend's certificates, by the flags that name their files: of the one that it
    shows as it is in force, of the others as they are in their files. None where it has no TLS.

    Args:
        shown: what it shows clients.
        server: the files of that.
        client: whom it trusts as engines, and what it shows them.
    """

    def __init__(
        self, shown: RenewedTls | None, server: ServerTls | None, client: ClientTls | None
    ) -> None:
        self._shown = shown
        # Of issuers the last to end counts: old ones often stay in the file for a while.
        self._files: list[tuple[str, Path | None, Callable[[list[float]], float]]] = [
            ("tls-client-ca", None if server is None else server.client_ca, max),
            ("engine-ca", None if client is None else client.ca, max),
            ("engine-cert", None if client is None else client.certificate, min),
        ]

    def describe(self) -> list[Metric]:
        """Nothing: files are not read before somebody asks."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family."""
        ends = GaugeMetricFamily(
            "pagewire_tls_certificate_expiry_timestamp_seconds",
            "When a certificate of the frontend ends, seconds of the Unix clock.",
            labels=["certificate"],
        )
        if self._shown is not None:
            ends.add_metric(["tls-cert"], self._shown.current().expires_at)
        for flag, file, choose in self._files:
            at = None if file is None else file_expires_at(file, choose)
            if at is not None:
                ends.add_metric([flag], at)
        if ends.samples:
            yield ends
