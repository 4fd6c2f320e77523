"""An engine client that answers with token ids decided beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence

from pagewire.outputs import FinishReason
from pagewire.sampling_params import SamplingParams
from pagewire.v1 import engine_pb2
from pagewire_frontend.engine_client.base import (
    EngineRequest,
    EngineStatuses,
    ModelInfo,
    TokenDelta,
)


class ReplayingStream:
    """Yields the given turns; records what it was told."""

    resumptions = 0

    def __init__(self, turns: Sequence[list[TokenDelta] | Exception], endless: bool) -> None:
        self._turns = list(turns)
        self._endless = endless
        self.finished_sequences: list[int] = []
        self.aborts = 0

    async def __aiter__(self) -> AsyncIterator[list[TokenDelta]]:
        for turn in self._turns:
            await asyncio.sleep(0)
            if isinstance(turn, Exception):
                raise turn
            kept = [d for d in turn if d.sequence_index not in self.finished_sequences]
            if kept:
                yield kept
        if self._endless:
            await asyncio.Event().wait()

    async def finish_sequence(self, sequence_index: int) -> None:
        self.finished_sequences.append(sequence_index)

    async def abort(self) -> None:
        self.aborts += 1


class ReplayingClient:
    """Implements EngineClient.

    Args:
        answer: request to the turns of its stream; an exception in it is raised there.
        endless: streams wait for ever after their last turn.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        answer: Callable[[EngineRequest], Sequence[list[TokenDelta] | Exception]],
        *,
        vocab_size: int,
        max_model_len: int = 256,
        eos_token_ids: tuple[int, ...] = (),
        endless: bool = False,
    ) -> None:
        self._files = files
        self._answer = answer
        self._endless = endless
        self.requests: list[EngineRequest] = []
        self.streams: list[ReplayingStream] = []
        self.model_info = ModelInfo(
            served_model_name="replay",
            architecture="Replay",
            dtype="float32",
            device="cpu",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            block_size=16,
            num_blocks=64,
            eos_token_ids=eos_token_ids,
            default_sampling_params=SamplingParams(),
            tokenizer_sha256="",
            created=0,
            epoch=1,
        )
        self.ready = True

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def fetch_tokenizer(self) -> Mapping[str, bytes]:
        return self._files

    async def stats(self, timeout_s: float) -> engine_pb2.GetStatsResponse:
        return engine_pb2.GetStatsResponse()

    def statuses(self) -> EngineStatuses:
        """None: there is but this process."""
        return EngineStatuses()

    async def stats_of_each(self, timeout_s: float) -> Mapping[str, engine_pb2.GetStatsResponse]:
        """What it counts, under no name."""
        return {"": await self.stats(timeout_s)}

    async def watch_stats(
        self, interval_ms: int, *, with_window: bool
    ) -> AsyncGenerator[engine_pb2.GetStatsResponse, None]:
        yield engine_pb2.GetStatsResponse()

    async def submit(self, request: EngineRequest) -> ReplayingStream:
        self.requests.append(request)
        stream = ReplayingStream(self._answer(request), self._endless)
        self.streams.append(stream)
        return stream


def turns_of(
    ids: Sequence[int],
    sizes: Sequence[int] = (),
    *,
    finish_reason: FinishReason | None = FinishReason.LENGTH,
    sequence_index: int = 0,
    stop_token_id: int | None = None,
) -> list[list[TokenDelta]]:
    """The ids as one sequence's deltas, of the given sizes first and of one token each after."""
    turns: list[list[TokenDelta]] = []
    at = 0
    rest = iter(sizes)
    while at < len(ids):
        size = max(1, next(rest, 1))
        turns.append([TokenDelta(sequence_index, at, list(ids[at : at + size]))])
        at += size
    if not turns:
        turns.append([TokenDelta(sequence_index, 0, [])])
    turns[-1][0].finish_reason = finish_reason
    turns[-1][0].stop_token_id = stop_token_id
    return turns
