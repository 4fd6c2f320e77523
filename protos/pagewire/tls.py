"""Certificates of servers and of those who call them, as PEM files."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from pagewire.settings import SettingsError


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What a server shows, and what it asks its clients for.

    Attributes:
        certificate: its own, and after it those that lead to its issuer.
        key: its private key, without a password.
        client_ca: issuers of the certificates that clients must show (mTLS); None: they need none.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @staticmethod
    def from_settings(
        tls_cert: str | None, tls_key: str | None, tls_client_ca: str | None
    ) -> ServerTls | None:
        """None where no TLS is asked for.

        Raises:
            SettingsError: a flag lacks another one, or the files can't be used.
        """
        if tls_cert is None and tls_key is None and tls_client_ca is None:
            return None
        if tls_cert is None or tls_key is None:
            raise SettingsError("TLS needs both --tls-cert and --tls-key")
        tls = ServerTls(
            Path(tls_cert), Path(tls_key), None if tls_client_ca is None else Path(tls_client_ca)
        )
        tls.context()
        return tls

    def context(self) -> ssl.SSLContext:
        """For sockets of Python's.

        Raises:
            SettingsError: the files can't be used; the text names the flag.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load_pair(context, self.certificate, self.key, "--tls-cert", "--tls-key")
        if self.client_ca is not None:
            _load_issuers(context, self.client_ca, "--tls-client-ca")
            context.verify_mode = ssl.CERT_REQUIRED
        return context


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Whom a gRPC client trusts, and what it shows.

    Attributes:
        ca: issuers of the server's certificate, which must name the host that was called.
        certificate, key: its own pair, for servers that ask for one.
    """

    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    @staticmethod
    def from_settings(
        prefix: str, ca: str | None, cert: str | None, key: str | None
    ) -> ClientTls | None:
        """None where no TLS is asked for.

        Args:
            prefix: what the flags begin with, such as `--engine-`.
            ca, cert, key: paths, by the flags PREFIXca, PREFIXcert and PREFIXkey.

        Raises:
            SettingsError: a flag lacks another one, or the files can't be used.
        """
        if ca is None and cert is None and key is None:
            return None
        if ca is None:
            raise SettingsError(f"TLS needs {prefix}ca: whose certificates to trust")
        if (cert is None) != (key is None):
            raise SettingsError(f"{prefix}cert and {prefix}key belong together: give both")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_issuers(context, Path(ca), f"{prefix}ca")
        if cert is None or key is None:
            return ClientTls(Path(ca))
        _load_pair(context, Path(cert), Path(key), f"{prefix}cert", f"{prefix}key")
        return ClientTls(Path(ca), Path(cert), Path(key))

    def grpc_credentials(self) -> grpc.ChannelCredentials:
        """For a gRPC channel."""
        return grpc.ssl_channel_credentials(
            self.ca.read_bytes(),
            None if self.key is None else self.key.read_bytes(),
            None if self.certificate is None else self.certificate.read_bytes(),
        )


def _load_pair(
    context: ssl.SSLContext, certificate: Path, key: Path, cert_flag: str, key_flag: str
) -> None:
    _check_readable(certificate, cert_flag)
    _check_readable(key, key_flag)
    try:
        # A key with a password would ask for it at the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        raise SettingsError(
            f"{cert_flag} and {key_flag}: {certificate} and {key} must be a certificate and its "
            f"private key as PEM, the key without a password ({error.reason or 'no PEM'})"
        ) from None


def _load_issuers(context: ssl.SSLContext, file: Path, flag: str) -> None:
    _check_readable(file, flag)
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise SettingsError(
            f"{flag}: {file} must hold certificates as PEM ({error.reason or 'no PEM'})"
        ) from None


def _check_readable(file: Path, flag: str) -> None:
    try:
        file.read_bytes()
    except OSError as error:
        raise SettingsError(f"{flag}: can't read {file}: {error.strerror}") from None
