"""Where the delta wire listens: a private ipc path on one machine, tcp between machines."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket as sockets
import tempfile
from pathlib import Path

import zmq

from pagewire_engine.errors import StartupError, UnmetStartupError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
# sun_path holds 108 bytes, the last of them zero.
_MAX_IPC_PATH = 107
_PREFIX = "pagewire-"
_SOCKET = "stream"


def is_loopback(host: str) -> bool:
    """Whether an address only reaches this machine."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class StreamEndpoint:
    """A bound endpoint, and what frontends are told of it.

    Args:
        wanted: the endpoint of the configuration (`ipc://PATH` or `tcp://HOST:PORT`), or None to
            choose by `host`.
        host: address of the control API.

    Attributes:
        advertised: what Attach answers; a host of "*" stands for the host the control channel
            reached.
        curve_public_key: set where the wire is encrypted (tcp beyond loopback).
    """

    def __init__(self, wanted: str | None, host: str) -> None:
        self._directory: Path | None = None
        self._wanted = wanted
        self._host = host
        self.advertised = ""
        self._path: Path | None = None
        self.curve_public_key: bytes | None = None

    def bind(self, socket: zmq.Socket[bytes]) -> None:
        """Binds a ROUTER socket whose other options are set.

        Raises:
            StartupError: the endpoint is malformed or taken.
        """
        if self._wanted is not None:
            check_endpoint(self._wanted)
        endpoint = self._wanted or self._choose()
        scheme, _, rest = endpoint.partition("://")
        if scheme == "tcp":
            self._encrypt_beyond_loopback(socket, rest)
        try:
            _bind(socket, endpoint)
        except zmq.ZMQError as error:
            raise UnmetStartupError(
                f"cannot bind the delta wire to {endpoint}: {error}", field="stream_endpoint"
            ) from None
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if scheme == "ipc":
            self._path = Path(bound.removeprefix("ipc://"))
            os.chmod(self._path, 0o600)
        self.advertised = _advertised(bound)

    def hide(self) -> None:
        """Lets nobody connect any more; connections that are there last. To unbind would cut them.

        Only on ipc: a path that is gone can't be connected to.
        """
        if self._path is not None:
            self._path.rename(self._hidden(self._path))

    def show(self) -> None:
        """Lets frontends connect again."""
        if self._path is not None:
            self._hidden(self._path).rename(self._path)

    def _hidden(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.hidden")

    def close(self) -> None:
        """Removes what `bind` made on disk. Safe to call twice."""
        if self._path is not None:
            self._hidden(self._path).unlink(missing_ok=True)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _choose(self) -> str:
        if is_loopback(self._host):
            directory = _private_folder()
            self._directory = Path(directory)
            return f"ipc://{directory}/{_SOCKET}"
        host = f"[{self._host}]" if ":" in self._host and "[" not in self._host else self._host
        return f"tcp://{host}:*"

    def _encrypt_beyond_loopback(self, socket: zmq.Socket[bytes], address: str) -> None:
        if is_loopback(address.rpartition(":")[0]):
            return
        self.curve_public_key, secret_key = zmq.curve_keypair()
        socket.curve_server = True
        socket.curve_secretkey = secret_key
        socket.curve_publickey = self.curve_public_key


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Binds; every address is those of both families, as for the control API, where there are both.

    Raises:
        zmq.ZMQError: it can't be.
    """
    everywhere = endpoint.startswith("tcp://*:")
    socket.setsockopt(zmq.IPV6, int(everywhere or "[" in endpoint))
    try:
        socket.bind(endpoint)
    except zmq.ZMQError:
        if not everywhere:
            raise
        socket.setsockopt(zmq.IPV6, 0)
        socket.bind(endpoint)


def _private_folder() -> str:
    """A folder for the socket that only we can enter: mkdtemp makes it 0700.

    Raises:
        StartupError: there is no room for it.
    """
    try:
        _sweep(Path(tempfile.gettempdir()))
        directory = tempfile.mkdtemp(prefix=_PREFIX)
        if len(f"{directory}/{_SOCKET}") > _MAX_IPC_PATH:
            os.rmdir(directory)
            directory = tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")
        return directory
    except OSError as error:
        raise UnmetStartupError(
            f"there is no folder for the delta wire's socket ({error}): make room, set TMPDIR to a "
            "folder that can be written, or name a path: ipc://PATH",
            field="stream_endpoint",
        ) from None


def check_endpoint(endpoint: str) -> None:
    """Raises StartupError for an endpoint that is not ipc or tcp."""
    scheme, _, rest = endpoint.partition("://")
    if scheme not in ("ipc", "tcp") or not rest:
        raise StartupError(
            f"must be ipc://PATH or tcp://HOST:PORT, not {endpoint!r}", field="stream_endpoint"
        )


def _sweep(parent: Path) -> None:
    """Removes the folders of engines that were killed: ours, and nobody listens there."""
    for path in parent.glob(f"{_PREFIX}*/{_SOCKET}"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            with sockets.socket(sockets.AF_UNIX) as probe:
                probe.setblocking(False)
                probe.connect(str(path))
        except ConnectionRefusedError:
            shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:
            continue


def _advertised(bound: str) -> str:
    for everywhere in ("tcp://0.0.0.0:", "tcp://[::]:"):
        if bound.startswith(everywhere):
            return "tcp://*:" + bound.removeprefix(everywhere)
    return bound
