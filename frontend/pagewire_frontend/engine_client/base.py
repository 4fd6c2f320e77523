"""The frontend's view of an engine, whichever way it is reached."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pagewire.outputs import FinishReason, PositionLogprobs, RequestTimes
from pagewire.pooling import PoolingInfo, PoolingParams, Task
from pagewire.sampling_params import SamplingParams
from pagewire.tracing import TraceHeaders
from pagewire.v1 import engine_pb2


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What an engine serves.

    Attributes:
        max_loras: different adapters in one step; 0: it has none.
        weights_sha256: tells its weights from another model's; "" where that is not known.
    """

    served_model_name: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: tuple[int, ...]
    default_sampling_params: SamplingParams
    tokenizer_sha256: str
    created: int
    epoch: int
    tasks: tuple[Task, ...] = (Task.GENERATE,)
    pooling: PoolingInfo | None = None
    max_loras: int = 0
    weights_sha256: str = ""


@dataclass(slots=True)
class TokenDelta:
    """New tokens of one sequence, contiguous with those before.

    Attributes:
        sequence_index: which of the request's n sequences.
        start: index of the first token within the sequence's output.
        token_ids: the new tokens (may be empty when only the end is told).
        logprobs: one entry a token where the request asked, else empty.
        finish_reason: set when the sequence ended.
        stop_token_id: the stop token id that ended it, if one did.
        cumulative_logprob: set with finish_reason.
        times: set with finish_reason; before, when the request's first token came.
        prompt_logprobs: positions from `prompt_logprobs_start` on (1 or above), where asked for;
            sequence 0 only.
        vector: what pooling made of the prompt; comes with finish_reason.
    """

    sequence_index: int
    start: int
    token_ids: list[int]
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cumulative_logprob: float = 0.0
    times: RequestTimes | None = None
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs_start: int = 0
    vector: list[float] | None = None


@dataclass(frozen=True, slots=True)
class PastSequence:
    """What a sequence has produced before its request is handed over."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    cumulative_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request in token ids.

    Attributes:
        request_id: internal id: the client's plus a random suffix.
        prompt_token_ids: at least one.
        sampling_params: resolved; only the token-level fields are read.
        tenant: whose quota and fair share it counts on.
        priority: lower runs first.
        adapter: "" is the base model.
        adapter_version: the engine must have it in this version; "": in any.
        past: of each of the n sequences, where the request was admitted before and goes on from
            there; its stream then begins after these tokens.
        whole: the stream is read for its end alone. An engine in this process then wakes the reader
            once; over the wires tokens come as ever.
        pooling: the answer is a vector; then `sampling_params` says nothing.
        trace_headers: of the trace that it belongs to, if it belongs to one.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = ""
    priority: int = 0
    adapter: str = ""
    adapter_version: str = ""
    past: tuple[PastSequence, ...] = ()
    whole: bool = False
    pooling: PoolingParams | None = None
    trace_headers: TraceHeaders = ()


class TokenStream(Protocol):
    """The tokens of one live request.

    Iterating yields lists of deltas (all that came since the last turn, coalesced; never an empty
    list), and ends after
    every sequence has finished. A failed request raises its PagewireError.
    """

    def __aiter__(self) -> AsyncIterator[list[TokenDelta]]: ...

    @property
    def resumptions(self) -> int:
        """How often it went on in another engine, or in another life of its own."""
        ...

    async def finish_sequence(self, sequence_index: int) -> None:
        """A stop string ended this sequence: the engine need not go on. No further delta of it is
        delivered."""
        ...

    async def abort(self) -> None:
        """Ends the request in the engine. Safe to call twice and after the end."""
        ...


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One of the engines behind a client.

    Attributes:
        name: HOST:PORT.
        state: one of `LinkState`'s values, such as "ready" or "draining".
        num_requests: of ours that it has now.
        num_routed: requests of ours that were submitted to it, again ones too.
    """

    name: str
    state: str
    num_requests: int
    num_routed: int


@dataclass(frozen=True, slots=True)
class EngineStatuses:
    """The engines behind a client, in the order in which they were named.

    Attributes:
        moved: requests that were submitted again, by the reason.
    """

    engines: tuple[EngineStatus, ...] = ()
    moved: Mapping[str, int] = field(default_factory=dict)


class EngineClient(Protocol):
    """An engine, or several that serve the same."""

    async def start(self) -> None:
        """Connects, and waits until the engine's model is known. Raises UnavailableError after its
        window."""
        ...

    async def close(self) -> None:
        """Ends what lives. May be called at the interpreter's exit, when no thread can be started
        any more."""
        ...

    @property
    def model_info(self) -> ModelInfo: ...

    @property
    def ready(self) -> bool:
        """Whether requests can be served now."""
        ...

    async def fetch_tokenizer(self) -> Mapping[str, bytes]:
        """The files that make the tokenizer, by Hugging Face's file names; empty when the engine
        has none."""
        ...

    async def stats(self, timeout_s: float) -> engine_pb2.GetStatsResponse:
        """What the engine counts, as of now.

        Raises:
            UnavailableError: it is away, or has not answered in time.
        """
        ...

    def statuses(self) -> EngineStatuses:
        """How each engine is. None are told of where there is but this process."""
        ...

    async def stats_of_each(self, timeout_s: float) -> Mapping[str, engine_pb2.GetStatsResponse]:
        """What each engine counts, as of now, by its name; those that are away or have not answered
        in time are left out."""
        ...

    def watch_stats(
        self, interval_ms: int, *, with_window: bool
    ) -> AsyncGenerator[engine_pb2.GetStatsResponse, None]:
        """The same again and again, until the reader closes it.

        Args:
            interval_ms: between two; 0: one only.
            with_window: show who holds which block, too.

        Raises:
            UnavailableError: the engine is away.
            ResourceExhaustedError: too many watch it.
        """
        ...

    async def load_adapter(self, request: engine_pb2.LoadAdapterRequest) -> engine_pb2.AdapterInfo:
        """Loads an adapter; returns when requests may name it.

        Raises:
            PagewireError: it can't be loaded; the error says why.
        """
        ...

    async def unload_adapter(
        self, request: engine_pb2.UnloadAdapterRequest
    ) -> engine_pb2.UnloadAdapterResponse:
        """Unloads an adapter, as its requests have ended or are ended.

        Raises:
            PagewireError: it stays; the error says why.
        """
        ...

    async def list_adapters(self, unless_revision: str = "") -> engine_pb2.ListAdaptersResponse:
        """What is loaded, and where it is.

        Args:
            unless_revision: nothing but its revision comes back where that is still this one.

        Raises:
            FailedPreconditionError: the engine has no adapters.
            UnavailableError: it is away.
        """
        ...

    async def adapter_files(self, name: str, version: str) -> Mapping[str, bytes]:
        """The files of a tokenizer and chat template that an adapter ships, maybe none.

        Raises:
            NotFoundError, FailedPreconditionError: it has gone, or is in another version now.
        """
        ...

    async def submit(self, request: EngineRequest) -> TokenStream:
        """Hands a request over; returns once the engine has accepted it.

        Raises:
            InvalidArgumentError, ResourceExhaustedError, UnavailableError: it was not accepted.
        """
        ...
