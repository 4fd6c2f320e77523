"""A frontend that answers chats by rule, for tests of the page."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from pagewire.v1 import inference_pb2, inference_pb2_grpc, operations_pb2_grpc, sampling_pb2
from tests.ui.fake_observability import FakeObservability


class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Answers by what the last message says.

    "slow ...": a word each 100 ms, for a minute. "fail ...": RESOURCE_EXHAUSTED. "break ...": two
    words, then UNAVAILABLE. Else: "You said: ..." word by word.

    Attributes:
        requests: all chats asked for.
        cancelled: set when the client cancelled a call.
    """

    def __init__(self, observability: FakeObservability | None = None) -> None:
        self._observability = observability
        self.requests: list[inference_pb2.ChatRequest] = []
        self.cancelled = threading.Event()
        self._server: grpc.Server | None = None

    def start(self, port: int = 0) -> int:
        """Listens on loopback; the port."""
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)
        if self._observability is not None:
            operations_pb2_grpc.add_ObservabilityServicer_to_server(
                self._observability, self._server
            )
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()
        return bound

    def stop(self) -> None:
        """Ends the server and its calls."""
        if self._server is not None:
            self._server.stop(None).wait()

    def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        """One model."""
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id="fake-model")])

    def Chat(
        self, request: inference_pb2.ChatRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.ChatResponse]:
        """Streams the answer that the class's docstring describes."""
        self.requests.append(request)
        text = request.messages[-1].content[0].text
        rule = text.split(maxsplit=1)[0]
        if rule == "fail":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "4096 requests wait")
        if rule == "slow":
            context.add_callback(self.cancelled.set)
            words = [f"word{index} " for index in range(600)]
        else:
            words = [f"{word} " for word in f"You said: {text}".split()]
        for index, word in enumerate(words):
            if rule == "break" and index == 2:
                context.abort(grpc.StatusCode.UNAVAILABLE, "engine gone")
            if not context.is_active():
                return
            yield _piece(content=word, token_ids=[index])
            time.sleep(0.1 if rule == "slow" else 0.02)
        yield inference_pb2.ChatResponse(
            choices=[inference_pb2.ChatChoice(finish_reason=sampling_pb2.FINISH_REASON_STOP)],
            usage=inference_pb2.Usage(prompt_tokens=7, completion_tokens=len(words)),
        )


def _piece(**fields: Any) -> inference_pb2.ChatResponse:
    return inference_pb2.ChatResponse(choices=[inference_pb2.ChatChoice(**fields)])
