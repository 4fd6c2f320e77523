"""Who a request counts on."""

from __future__ import annotations

import hashlib


def tenant_of(authorization: str | None) -> str:
    """The tenant that an `Authorization: Bearer KEY` header stands for.

    A digest of the key, for the engine and its logs need not see it. The key is not checked here:
    it only says whose requests belong together. A client that invents a key for each request gets
    the share of a new tenant each time: keys must be verified by a proxy or other authentication.

    Returns:
        16 hexadecimal digits; "" where there is no key.
    """
    scheme, _, key = (authorization or "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        return ""
    return hashlib.sha256(key.encode()).hexdigest()[:16]
