"""Random bytes, pickles and broken HTTP/2 at every socket of `pagewire serve`: nothing
dies, nothing is unpickled, and all of it goes on answering."""

from __future__ import annotations

import pickle
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import psutil

from pagewire.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.serve_process import Served
from tests.fakes.bad_inputs import tried

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CONNECTIONS = 40
DATA, HEADERS, SETTINGS, WINDOW_UPDATE, CONTINUATION = 0, 1, 4, 8, 9
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """An HTTP/2 frame; `length` stands in for its true one."""
    told = len(payload) if length is None else length
    return struct.pack(">I", told)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def call_headers(path: bytes) -> bytes:
    """HPACK literals of a gRPC call."""
    fields = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"),
        (b"content-type", b"application/grpc"), (b"te", b"trailers"),
    ]  # fmt: skip
    return b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields
    )


class Trap:
    """Who unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def broken_messages(chance: random.Random, trap: bytes) -> Iterator[bytes]:
    """What a client may send by mistake or by malice."""
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/%s\r\n"
    start = PREFACE + frame(SETTINGS, 0, 0, b"")
    headers = frame(HEADERS, END_HEADERS, 1, call_headers(b"/pagewire.v1.Inference/Chat"))
    while True:
        noise = chance.randbytes(chance.randrange(1, 400))
        whole = start + headers + frame(DATA, END_STREAM, 1, b"\x00\x00\x00\x00\x08" + noise[:8])
        yield noise
        yield trap
        for kind in (b"json", b"x-pickle", b"octet-stream"):
            yield post % kind + b"content-length: %d\r\n\r\n" % len(trap) + trap
        message = b"\x00" + struct.pack(">I", len(trap)) + trap
        yield start_of_call() + frame(DATA, END_STREAM, 1, message)
        # ZeroMQ's greeting and handshake, then a message.
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        yield greeting + b"\x04" + bytes([len(ready)]) + ready + b"\x00" + bytes([len(trap)]) + trap
        yield PREFACE + noise
        yield whole[: chance.randrange(len(whole))]
        yield start + frame(HEADERS, END_HEADERS, 1, noise)
        yield start + headers + frame(DATA, END_STREAM, 1, b"\x00\xff\xff\xff\xff" + noise)
        yield start + headers + frame(DATA, END_STREAM, 1, b"\x01" + noise)
        yield start + frame(chance.randrange(256), chance.randrange(256), 1, noise)
        yield start + frame(HEADERS, 0, 1, b"\x00") + frame(CONTINUATION, 0, 3, noise)
        yield start + headers + frame(WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff" * 2)
        yield start + frame(DATA, 0, 1, b"", length=0xFFFFFF)
        yield b"GET /health HTTP/1.1\r\n" + noise
        yield b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n" + noise
        yield b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n" + noise
        yield b"\x16\x03\x01\x02\x00\x01" + noise  # a TLS client


def start_of_call() -> bytes:
    """A gRPC call to the engine, up to its message."""
    path = b"/pagewire.v1.Engine/Submit"
    return PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, call_headers(path))


def unix_sockets_of(served: Served) -> set[str]:
    """Every path that one of the services listens at."""
    return {
        connection.laddr
        for process in served.process.children().values()
        for connection in process.net_connections("unix")
        if connection.laddr and Path(connection.laddr).is_socket()
    }


def ports_of(served: Served) -> dict[int, str]:
    """Every port that one of the services listens on."""
    found: dict[int, str] = {}
    for module, process in served.process.children().items():
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found[connection.laddr.port] = module
    return found


def connect(address: int | str) -> socket.socket:
    if isinstance(address, int):
        return socket.create_connection(("127.0.0.1", address), timeout=60)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(60)
    connection.connect(address)
    return connection


def test_nothing_dies_of_what_is_no_request(served: Served, tmp_path: Path) -> None:
    before = {name: process.pid for name, process in served.process.children().items()}
    ports = ports_of(served)
    named = {urlsplit(served.http).port, int(served.grpc.rpartition(":")[2])}
    assert named <= ports.keys()
    assert "pagewire_engine.cli" in ports.values()
    chance = random.Random(0)
    paths = unix_sockets_of(served)
    assert any(Path(path).parent.name.startswith("pagewire-") for path in paths)  # the delta wire
    trapped = tmp_path / "unpickled"
    for address in (*ports, *paths):
        messages = broken_messages(chance, pickle.dumps(Trap(trapped)))
        for _ in range(CONNECTIONS):
            with connect(address) as connection:
                connection.sendall(next(messages))
                tried["connections of strangers"] += 1
                if chance.random() < 0.5:
                    connection.shutdown(socket.SHUT_WR)
                connection.settimeout(0.01)
                try:
                    connection.recv(1024)
                except OSError:
                    pass  # it waits for more, or has reset the connection
    assert (
        "Paris"
        in served.chat("What is the capital of France?", temperature=0, max_tokens=20)["choices"][
            0
        ]["message"]["content"]
    )
    with grpc.insecure_channel(served.grpc) as channel:
        models = inference_pb2_grpc.InferenceStub(channel).ListModels(
            inference_pb2.ListModelsRequest(), timeout=60
        )
    assert models.models
    assert not trapped.exists()
    assert "Invalid HTTP request received" in served.process.output
    assert {name: process.pid for name, process in served.process.children().items()} == before
