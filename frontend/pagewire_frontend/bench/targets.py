"""What a workload runs against: an engine in this process, or a frontend on the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import grpc

from pagewire.conversion import times_from_proto
from pagewire.errors import PagewireError, UnavailableError
from pagewire.outputs import RequestTimes
from pagewire.sampling_params import SamplingParams
from pagewire.tls import ClientTls
from pagewire.v1 import inference_pb2, inference_pb2_grpc
from pagewire_frontend.bench.workload import WORDS, BenchRequest
from pagewire_frontend.engine_client.grpc_errors import typed_error
from pagewire_frontend.generation import Generation
from pagewire_frontend.generation_types import GenerationRequest

_CALL_TIMEOUT_S = 10.0
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1))
# Prompts for an engine that knows no text: ids that every vocabulary has.
_PLAIN_IDS = range(3, 100)


class Target(Protocol):
    """Something that answers requests."""

    model: str
    max_model_len: int

    async def token_pool(self) -> list[int]:
        """Token ids that prompts may be made of."""
        ...

    async def run(self, request: BenchRequest, on_tokens: Callable[[int], None]) -> RequestTimes:
        """Runs a request to its end.

        Args:
            request: what to ask for; neither end-of-sequence nor stop strings end it.
            on_tokens: told how many tokens have come, as they come.

        Raises:
            PagewireError: it failed.
        """
        ...


class OfflineTarget:
    """An engine in this process."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.model = generation.model_info.served_model_name
        self.max_model_len = generation.model_info.max_model_len

    async def token_pool(self) -> list[int]:
        """Ids of common words, or plain ones where the engine has no tokenizer."""
        tokenizer = self._generation.tokenizer_or_none
        if tokenizer is None:
            return [i for i in _PLAIN_IDS if i < self._generation.model_info.vocab_size]
        return tokenizer.encode(WORDS, add_special_tokens=False)

    async def run(self, request: BenchRequest, on_tokens: Callable[[int], None]) -> RequestTimes:
        """See `Target.run`."""
        length = request.output_len
        params = SamplingParams(
            temperature=0.0, max_tokens=length, min_tokens=length, ignore_eos=True
        )
        running = await self._generation.start(
            GenerationRequest(prompt_token_ids=request.token_ids, sampling_params=params)
        )
        times = RequestTimes()
        try:
            async for update in running:
                if num_tokens := sum(len(delta.token_ids) for delta in update.deltas):
                    on_tokens(num_tokens)
                times = update.times or times
        finally:
            await running.aclose()
        return times


class ServerTarget:
    """A frontend's gRPC API.

    Args:
        address: HOST:PORT.
        api_key: to show it; None: it asks for none.
        tls: of the channel; None: it has none.
    """

    def __init__(
        self, address: str, api_key: str | None = None, tls: ClientTls | None = None
    ) -> None:
        self.model = ""
        self.max_model_len = 0
        self._address = address
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._channel = (
            grpc.aio.insecure_channel(address, options=_OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(address, tls.grpc_credentials(), options=_OPTIONS)
        )
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def connect(self) -> None:
        """Asks which model is served.

        Raises:
            PagewireError: nothing serves there.
        """
        try:
            answer = await self._stub.ListModels(
                inference_pb2.ListModelsRequest(), timeout=_CALL_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise self._unreachable(error) from None
        self.model, self.max_model_len = answer.models[0].id, answer.models[0].max_model_len

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close(None)

    async def token_pool(self) -> list[int]:
        """Ids of common words, or plain ones where the engine has no tokenizer."""
        request = inference_pb2.TokenizeRequest(text=WORDS, add_special_tokens=False)
        try:
            answer = await self._stub.Tokenize(
                request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                return list(_PLAIN_IDS)
            raise self._unreachable(error) from None
        return list(answer.token_ids)

    async def run(self, request: BenchRequest, on_tokens: Callable[[int], None]) -> RequestTimes:
        """See `Target.run`."""
        length = request.output_len
        limits: Mapping[str, int] = {"max_tokens": length, "min_tokens": length}
        message = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=request.token_ids),
            sampling_params={"temperature": 0.0, "ignore_eos": True, **limits},
        )
        times = RequestTimes()
        try:
            async for part in self._stub.Generate(message, metadata=self._metadata):
                if num_tokens := sum(len(output.token_ids) for output in part.outputs):
                    on_tokens(num_tokens)
                if part.HasField("usage"):
                    times = times_from_proto(part.usage)
        except grpc.aio.AioRpcError as error:
            raise typed_error(error) from None
        return times

    def _unreachable(self, error: grpc.aio.AioRpcError) -> PagewireError:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return UnavailableError(
                f"--target: no pagewire frontend answers at {self._address}: {error.details()}"
            )
        return typed_error(error)
