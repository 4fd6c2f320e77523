"""One question over HTTP, for those who ask servers how they are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def http_get(
    connecting: Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
    path: str,
    *,
    host: str = "localhost",
    timeout_s: float,
) -> bytes:
    """What is answered to a GET.

    Args:
        connecting: to the server; the connection is for this question alone.
        path: what is asked for.
        host: as the server knows itself.
        timeout_s: for all of it.

    Raises:
        OSError: nothing, or not with status 200.
    """
    async with asyncio.timeout(timeout_s):
        reader, writer = await connecting
        try:
            request = f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
            writer.write(request.encode())
            head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        finally:
            writer.close()
    if head.split(b" ", 2)[1:2] != [b"200"]:
        raise OSError(f"{head[:40]!r} was answered to {path}")
    return body
