"""Who may ask, and whose fair share a request counts on."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from pagewire.errors import UnauthenticatedError
from pagewire.settings import SettingsError

logger = logging.getLogger(__name__)

# A changed file of keys counts after this time at the latest.
_LOOK_INTERVAL_S = 1.0

_Stamp = tuple[int, int, int]


class ApiKeys:
    """The keys that clients may show; none at all: everybody may ask.

    Only digests are kept. A key is compared with every known one, each in constant time, so that
    the time of an answer tells nothing of them.

    Args:
        keys: given as a setting.
        file: one key a line, and after it, if need be, the name of a tenant: keys of one tenant
            share its fair share. Lines that begin with # don't count. It is read again when it has
            changed.

    Raises:
        SettingsError: a key can't be one, or the file can't be read.
    """

    def __init__(self, keys: Iterable[str] = (), file: Path | None = None) -> None:
        self._given = dict(_entry(key, "", "--api-key") for key in keys)
        self._file = file
        self._stamp: _Stamp | None = None
        self._looked_at = time.monotonic()
        self._tenants: dict[bytes, str] = dict(self._given)
        if file is not None:
            self._stamp = _stamp(file)
            self._tenants |= _read(file)

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._given) or self._file is not None

    def tenant(self, authorization: str | None) -> str:
        """The tenant that an `Authorization: Bearer KEY` header stands for.

        Where keys are required: the name beside the key, else a digest of the key, for the engine
        and its logs need not see it. Where they are not: a digest of whatever key is sent, which
        nobody has checked, and "" for none.

        Raises:
            UnauthenticatedError: a key is required, and this is none.
        """
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if not self.required:
            return _name(_digest(key)) if key else ""
        if not key:
            raise UnauthenticatedError(
                "this server asks for an API key: send it as `Authorization: Bearer KEY` (over "
                "gRPC as metadata)"
            )
        self._look_at_file()
        digest = _digest(key)
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise UnauthenticatedError("this API key is not known here")
        return found

    def _look_at_file(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._looked_at < _LOOK_INTERVAL_S:
            return
        self._looked_at = now
        try:
            stamp = _stamp(self._file)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._tenants = self._given | _read(self._file)
        except SettingsError as error:
            # Once for each change: those who have keys go on with them.
            logger.error("%s; the keys that were known stay", error)
            return
        logger.info("read the API keys again: %d are known", len(self._tenants))


def _read(file: Path) -> dict[bytes, str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise SettingsError(f"--api-key-file: can't read {file}: {reason}") from None
    found: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"--api-key-file: {file}, line {number}"
        key, *tenant = line.split()
        if len(tenant) > 1:
            raise SettingsError(f"{where} must be a key and, after it, at most one name")
        digest, name = _entry(key, tenant[0] if tenant else "", where)
        if found.setdefault(digest, name) != name:
            raise SettingsError(f"{where} has a key of another tenant")
    if not found:
        raise SettingsError(f"--api-key-file: {file} holds no key")
    return found


def _entry(key: str, tenant: str, where: str) -> tuple[bytes, str]:
    # Header values and metadata carry no more than this.
    if not key or not all("!" <= character <= "~" for character in key):
        raise SettingsError(f"{where}: a key is made of ASCII characters other than spaces")
    digest = _digest(key)
    return digest, tenant or _name(digest)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _name(digest: bytes) -> str:
    return digest.hex()[:16]


def _stamp(file: Path) -> _Stamp | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
