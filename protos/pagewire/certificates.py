"""Certificates that are renewed while a server shows them, and when each of them ends."""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from pagewire.settings import SettingsError
from pagewire.tls import ServerTls

logger = logging.getLogger(__name__)

# A changed file counts after this time at the latest.
LOOK_INTERVAL_S = 1.0

_Stamp = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class LoadedTls:
    """What a server's files held when they were last fit to be used.

    Attributes:
        number: one more with each change.
        context: for sockets of Python's.
        key, certificate, client_ca: PEM.
        expires_at: when the certificate, or one that leads to its issuer, ends; Unix seconds.
    """

    number: int
    context: ssl.SSLContext
    key: bytes
    certificate: bytes
    client_ca: bytes | None
    expires_at: float

    def grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        """For gRPC's servers."""
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.certificate)], self.client_ca
        )


class RenewedTls:
    """A server's certificates, read again when their files have changed: new connections get the
    new ones. Files that can't be used change nothing, and are logged once. Safe to use from any
    thread.

    Args:
        tls: the files.

    Raises:
        SettingsError: they can't be used; the text names the flag.
    """

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._looked_at = time.monotonic()
        # Before they are read: a change meanwhile is seen at the next look.
        self._stamps = self._now()
        self._loaded = self._load(0)

    def current(self) -> LoadedTls:
        """What to show now."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked_at >= LOOK_INTERVAL_S:
                self._looked_at = now
                self._look()
            return self._loaded

    def context(self) -> ssl.SSLContext:
        """For event loops: each connection takes what is current when it begins."""
        return _CurrentContext(self)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For one port of a gRPC server: each asks by itself whether there are new ones."""
        loaded = self.current()
        shown = loaded.number

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            now = self.current()
            if now.number == shown:
                return None
            shown = now.number
            return now.grpc_configuration()

        return grpc.dynamic_ssl_server_credentials(
            loaded.grpc_configuration(),
            renewed,  # type: ignore[arg-type]  # None: those of before
            require_client_authentication=self._tls.client_ca is not None,
        )

    def _look(self) -> None:
        stamps = self._now()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self._loaded = self._load(self._loaded.number + 1)
        except (SettingsError, OSError, ValueError) as error:
            # A pair is often written one file after the other, or a file gone for a moment: then
            # the next look mends it.
            logger.error("%s; the certificate in use stays", error)
            return
        logger.info("certificates were renewed: %s", self._tls.certificate)

    def _load(self, number: int) -> LoadedTls:
        tls = self._tls
        context = tls.context()
        try:
            certificate, key = tls.certificate.read_bytes(), tls.key.read_bytes()
            client_ca = None if tls.client_ca is None else tls.client_ca.read_bytes()
        except OSError as error:  # gone since the line above
            raise SettingsError(f"--tls-cert: {error}") from None
        return LoadedTls(number, context, key, certificate, client_ca, min(expiries(certificate)))

    def _now(self) -> list[_Stamp]:
        return stamps_of([self._tls.certificate, self._tls.key, self._tls.client_ca])


class _CurrentContext(ssl.SSLContext):
    """Wraps connections in the context that is current, rather than one that is changed for another
    in the middle of a handshake (by `sni_callback`): there, OpenSSL would go on taking sessions and
    tickets of the one before, and let clients in whose issuer is not trusted any more."""

    def __new__(cls, renewed: RenewedTls) -> _CurrentContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, renewed: RenewedTls) -> None:
        self._renewed = renewed

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """See ssl.SSLContext."""
        return self._renewed.current().context.wrap_bio(*arguments, **named)


def stamps_of(files: Sequence[Path | None]) -> list[_Stamp]:
    """What tells a changed file from the one before; None for one that is not there."""
    return [None if file is None else _stamp(file) for file in files]


def _stamp(file: Path) -> _Stamp:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def expiries(pem: bytes) -> list[float]:
    """When each certificate of a PEM text ends, Unix seconds.

    Raises:
        SettingsError: it holds none, or one that can't be read.
    """
    from cryptography import x509  # only servers with TLS need it

    try:
        return [
            certificate.not_valid_after_utc.timestamp()
            for certificate in x509.load_pem_x509_certificates(pem)
        ]
    except ValueError as error:
        raise SettingsError(f"--tls-cert: {error}") from None


def file_expires_at(file: Path, choose: Callable[[list[float]], float]) -> float | None:
    """When a file of certificates ends, for people to be told; None where it can't be read.

    Args:
        file: of PEM.
        choose: `min` where all are needed, `max` where any will do.
    """
    try:
        return choose(expiries(file.read_bytes()))
    except (OSError, SettingsError):
        return None
