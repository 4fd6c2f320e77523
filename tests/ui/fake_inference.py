"""A frontend that answers chats by rule, for tests of the page."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from pagewire.v1 import inference_pb2, inference_pb2_grpc, operations_pb2_grpc, sampling_pb2
from tests.ui.fake_adapters import FakeAdapters
from tests.ui.fake_observability import FakeObservability


class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Answers by what the last message says.

    "slow ...": a word each 100 ms, for a minute. "fail ...": RESOURCE_EXHAUSTED. "break ...": two
    words, then UNAVAILABLE. "think ...": reasoning first. "write ...": what follows, word by word.
    "fast N": N words at 100 a second. Else: "You said: ..." word by word. A model that is not the
    base model signs its answers.

    Attributes:
        requests: all chats asked for.
        refuses: whether it is too busy for any.
    """

    def __init__(
        self,
        observability: FakeObservability | None = None,
        adapters: FakeAdapters | None = None,
    ) -> None:
        self._observability = observability
        self._adapters = adapters
        self.requests: list[inference_pb2.ChatRequest] = []
        self.refuses = False
        # Last messages of the chats that are being answered.
        self._running: list[str] = []
        self._some_ended = threading.Condition()
        self._server: grpc.Server | None = None

    def start(self, port: int = 0) -> int:
        """Listens on loopback; the port."""
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)
        if self._observability is not None:
            operations_pb2_grpc.add_ObservabilityServicer_to_server(
                self._observability, self._server
            )
        if self._adapters is not None:
            operations_pb2_grpc.add_AdaptersServicer_to_server(self._adapters, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()
        return bound

    def stop(self) -> None:
        """Ends the server and its calls."""
        if self._server is not None:
            self._server.stop(None).wait()

    def times_asked(self, text: str) -> int:
        """How many chats had this as their last message."""
        return sum(_last_message(request) == text for request in self.requests)

    def is_answering(self, text: str) -> bool:
        """Whether a chat with this last message runs."""
        return text in self._running

    def stops_answering(self, text: str, timeout_s: float = 30.0) -> bool:
        """Waits until each chat with this last message has ended, or its client has left; whether
        they have. Others may have had the same last message before: all of them count."""
        with self._some_ended:
            return self._some_ended.wait_for(lambda: text not in self._running, timeout_s)

    def _end(self, text: str) -> None:
        with self._some_ended:
            self._running.remove(text)
            self._some_ended.notify_all()

    def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        """The base model, and what adapters there are."""
        models = [inference_pb2.Model(id="fake-model", root="fake-model")]
        if self._adapters is not None:
            models += [
                inference_pb2.Model(id=adapter.name, parent=adapter.parent, root="fake-model")
                for adapter in self._adapters.listed()
            ]
        return inference_pb2.ListModelsResponse(models=models)

    def Chat(
        self, request: inference_pb2.ChatRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.ChatResponse]:
        """Streams the answer that the class's docstring describes."""
        text = _last_message(request)
        self._running.append(text)
        self.requests.append(request)
        if not context.add_callback(lambda: self._end(text)):
            self._end(text)  # it was cancelled before it came this far
        rule, _, rest = text.partition(" ")
        if rule == "fail" or self.refuses:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "4096 requests wait")
        pause_s = {"slow": 0.1, "fast": 0.01}.get(rule, 0.005)
        if rule == "think":
            for index, word in enumerate(("First ", "I think ", "<b>hard</b>.")):
                yield _piece(reasoning_content=word, token_ids=[900 + index])
        words = _words(rule, rest, text)
        if request.model:
            words.append(f"({request.model})")
        for index, word in enumerate(words):
            if rule == "break" and index == 2:
                context.abort(grpc.StatusCode.UNAVAILABLE, "engine gone")
            if not context.is_active():
                return
            yield _piece(
                content=word, token_ids=[index], logprobs=_alternatives(request, index, word)
            )
            time.sleep(pause_s)
        yield inference_pb2.ChatResponse(
            choices=[inference_pb2.ChatChoice(finish_reason=sampling_pb2.FINISH_REASON_STOP)],
            usage=inference_pb2.Usage(prompt_tokens=7, completion_tokens=len(words)),
        )


def _last_message(request: inference_pb2.ChatRequest) -> str:
    return request.messages[-1].content[0].text


def _words(rule: str, rest: str, text: str) -> list[str]:
    if rule == "slow":
        return [f"word{index} " for index in range(600)]
    if rule == "fast":
        return [f"word{index} " for index in range(int(rest))]
    answer = rest if rule in ("write", "think") else f"You said: {text}"
    return re.findall(r"\S+\s*|\s+", answer)


def _alternatives(
    request: inference_pb2.ChatRequest, index: int, word: str
) -> list[inference_pb2.PositionText]:
    if not request.sampling_params.HasField("logprobs"):
        return []
    token = inference_pb2.TokenText(token_id=index, logprob=-0.25, rank=1, text=word)
    other = inference_pb2.TokenText(token_id=77, logprob=-2.5, rank=2, text="<i>else</i>")
    return [inference_pb2.PositionText(token=token, top=[token, other])]


def _piece(**fields: Any) -> inference_pb2.ChatResponse:
    return inference_pb2.ChatResponse(choices=[inference_pb2.ChatChoice(**fields)])
