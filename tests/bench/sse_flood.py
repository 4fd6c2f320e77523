"""The client of the SSE flood: it notes when bytes came and from which stream, and reads them at
the end. An HTTP client in Python would need more of a core than the frontend it measures.

Run as a program, it prints one line of JSON: when it began, and for each stream the arrivals, as
pairs of a time of the monotonic clock and the text of an event.
"""

from __future__ import annotations

import argparse
import gc
import json
import selectors
import socket
import time

Chunks = list[tuple[float, bytes]]
TextArrivals = list[tuple[float, str]]
FIRST_S, SILENCE_S = 30.0, 2.0


def request_bytes(prompt: list[int], max_tokens: int) -> bytes:
    """A streamed completion."""
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    return head % len(body) + body


def run(port: int, prompts: list[list[int]], max_tokens: int) -> list[Chunks]:
    """All prompts at once, a connection each; what each brought, and when."""
    chunks: list[Chunks] = [[] for _ in prompts]
    selector = selectors.DefaultSelector()
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in prompts]
    for number, connection in enumerate(connections):
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, chunks[number])
    for connection, prompt in zip(connections, prompts, strict=True):
        connection.sendall(request_bytes(prompt, max_tokens))
    left, timeout_s = len(connections), FIRST_S
    while left and (ready := selector.select(timeout_s)):
        timeout_s = SILENCE_S if left == len(connections) else FIRST_S
        for key, _ in ready:
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            data = connection.recv(1 << 16)
            key.data.append((time.monotonic(), data))
            if not data:
                selector.unregister(connection)
                connection.close()
                left -= 1
    assert not left, f"{left} streams did not end"
    return chunks


def read(chunks: Chunks) -> TextArrivals:
    """The texts of a stream's events, each as of when its end came; it must have ended well."""
    arrivals: TextArrivals = []
    buffer, body, in_body, ended = b"", b"", False, False
    for at, data in chunks:
        buffer += data
        if not in_body:
            head, found, buffer = buffer.partition(b"\r\n\r\n")
            if not found:
                buffer = head
                continue
            assert head.startswith(b"HTTP/1.1 200"), head
            in_body = True
        while True:
            size, found, rest = buffer.partition(b"\r\n")
            if not found or len(rest) < int(size, 16) + 2:
                break
            body += rest[: int(size, 16)]
            buffer = rest[int(size, 16) + 2 :]
        *events, body = body.split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                ended = True
            elif event.startswith(b"data: "):
                text = json.loads(event[6:])["choices"][0]["text"]
                if text:
                    arrivals.append((at, text))
    assert ended, "a stream ended early"
    return arrivals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--protocol", choices=("sse",))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prompts", type=json.loads, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    arguments = parser.parse_args()
    # Its pauses would be blamed on the wires.
    gc.disable()
    began = time.monotonic()
    chunks = run(arguments.port, arguments.prompts, arguments.max_tokens)
    arrivals = [read(stream) for stream in chunks]
    print(json.dumps({"began": began, "arrivals": arrivals}), flush=True)


if __name__ == "__main__":
    main()
