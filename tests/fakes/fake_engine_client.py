"""An engine client without an engine: it answers from a script, at a pace, and remembers what it
was asked."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from pagewire.errors import PagewireError, UnavailableError
from pagewire.outputs import FinishReason, PositionLogprobs, RequestTimes, TokenLogprob
from pagewire.pooling import PoolingInfo, PoolingParams, Task
from pagewire.sampling_params import SamplingParams
from pagewire.v1 import engine_pb2
from pagewire_frontend.engine_client.base import (
    EngineRequest,
    EngineStatuses,
    ModelInfo,
    TokenDelta,
)

MODEL = "fake-model"
BOS, IM_START, IM_END = "<s>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(num_words: int = 0) -> Tokenizer:
    """One token a byte (ids 0 to 255, in the order of ByteLevel's alphabet), words that no text
    makes, and three control tokens."""
    words = [f"w{i}" for i in range(num_words)]
    vocab = {text: i for i, text in enumerate([*sorted(ByteLevel.alphabet()), *words])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (BOS, IM_START, IM_END)]
    )
    return tokenizer


_TOKENIZER = byte_tokenizer()
VOCAB_SIZE = _TOKENIZER.get_vocab_size()
EOS_ID = int(_TOKENIZER.token_to_id(IM_END) or 0)


def tokenizer_files(
    chat_template: str | None = CHATML, tokenizer: Tokenizer | None = None
) -> dict[str, bytes]:
    """Files as an engine hands them out."""
    config = {"eos_token": IM_END, "bos_token": BOS}
    if chat_template is not None:
        config["chat_template"] = chat_template
    return {
        "tokenizer.json": (tokenizer or _TOKENIZER).to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def ids_of(text: str) -> list[int]:
    """Token ids of a text."""
    return list(_TOKENIZER.encode(text).ids)


@dataclass
class FakeEngineClient:
    """Implements EngineClient.

    Attributes:
        tasks, pooling: what its model can do. Its embeddings count which tokens there are; its
            classes have the probabilities 0, 0.1, 0.2 ..., each more by the second text's start.
        reply: text for (request, sequence index); the end-of-sequence id follows it.
        delay_s: between a request's steps, one token a sequence each.
        tokens_a_step: of each sequence.
        cached_tokens: of each prompt, as it tells.
        hang_after: tokens after which nothing more comes, ever.
        fail_after: tokens after which the request fails with `failure`.
        requests: all that were submitted.
        aborted: ids of those that were aborted while they ran.
        finished_sequences: (request id, index) that a stop string ended.
        live: ids of those that run.
    """

    reply: Callable[[EngineRequest, int], str] = lambda request, index: "Hello, world!"
    delay_s: float = 0.0
    tokens_a_step: int = 1
    cached_tokens: int = 1
    hang_after: int | None = None
    fail_after: int | None = None
    failure: PagewireError = field(default_factory=lambda: UnavailableError("the engine is gone"))
    max_model_len: int = 2048
    tasks: tuple[Task, ...] = (Task.GENERATE,)
    pooling: PoolingInfo | None = None
    chat_template: str | None = CHATML
    has_tokenizer: bool = True
    tokenizer_sha256: str = "fake"
    default_sampling_params: SamplingParams = field(default_factory=SamplingParams)
    is_ready: bool = True
    reachable: bool = True
    requests: list[EngineRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    finished_sequences: list[tuple[str, int]] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    closed: bool = False

    async def start(self) -> None:
        if not self.reachable:
            await asyncio.sleep(0.01)
            raise UnavailableError("nothing listens there")

    async def close(self) -> None:
        self.closed = True

    @property
    def model_info(self) -> ModelInfo:
        return ModelInfo(
            served_model_name=MODEL,
            architecture="Fake",
            dtype="float32",
            device="cpu",
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            block_size=16,
            num_blocks=64,
            eos_token_ids=(EOS_ID,),
            default_sampling_params=self.default_sampling_params,
            tokenizer_sha256=self.tokenizer_sha256,
            created=1_700_000_000,
            epoch=1,
            tasks=self.tasks,
            pooling=self.pooling,
        )

    @property
    def ready(self) -> bool:
        return self.is_ready

    async def fetch_tokenizer(self) -> Mapping[str, bytes]:
        return tokenizer_files(self.chat_template) if self.has_tokenizer else {}

    async def stats(self, timeout_s: float) -> engine_pb2.GetStatsResponse:
        if not self.is_ready:
            raise UnavailableError("the engine is away")
        return engine_pb2.GetStatsResponse(
            step=7,
            num_running=len(self.live),
            num_waiting=2,
            num_blocks=64,
            num_free_blocks=40,
            num_cached_blocks=8,
            prefix_cache_queries=100,
            prefix_cache_hits=25,
            num_preemptions=3,
            num_swapped=5,
            num_swaps=2,
            num_cpu_blocks=16,
            num_free_cpu_blocks=12,
            iteration_tokens=engine_pb2.Histogram(bounds=[1, 8], counts=[4, 2, 1], sum=30),
        )

    def statuses(self) -> EngineStatuses:
        """None: there is but this process."""
        return EngineStatuses()

    async def stats_of_each(self, timeout_s: float) -> Mapping[str, engine_pb2.GetStatsResponse]:
        """What it counts, under no name."""
        return {"": await self.stats(timeout_s)}

    async def watch_stats(
        self, interval_ms: int, *, with_window: bool
    ) -> AsyncGenerator[engine_pb2.GetStatsResponse, None]:
        """Its live requests hold a block each."""
        while True:
            stats = await self.stats(1.0)
            if with_window:
                window = stats.window
                window.blocks = bytes([1] * len(self.live) + [0] * (64 - len(self.live)))
                for block, request_id in enumerate(sorted(self.live)):
                    window.requests.add(id=request_id, state=2, blocks=[block])
            yield stats
            if not interval_ms:
                return
            await asyncio.sleep(interval_ms / 1000)

    async def submit(self, request: EngineRequest) -> FakeStream:
        self.requests.append(request)
        self.live.add(request.request_id)
        return FakeStream(self, request)


class FakeStream:
    """Implements TokenStream."""

    resumptions = 0

    def __init__(self, client: FakeEngineClient, request: EngineRequest) -> None:
        self._client = client
        self._request = request
        self._stopped: set[int] = set()
        self._aborted = asyncio.Event()

    async def finish_sequence(self, sequence_index: int) -> None:
        self._stopped.add(sequence_index)
        self._client.finished_sequences.append((self._request.request_id, sequence_index))

    async def abort(self) -> None:
        if self._request.request_id in self._client.live:
            self._client.live.discard(self._request.request_id)
            self._client.aborted.append(self._request.request_id)
        self._aborted.set()

    async def __aiter__(self) -> AsyncIterator[list[TokenDelta]]:
        client, request = self._client, self._request
        if request.pooling is not None:
            yield [await self._pooled(request.pooling)]
            return
        params = request.sampling_params
        texts = [client.reply(request, index) for index in range(params.n)]
        outputs = [[*ids_of(text), EOS_ID] for text in texts]
        started = time.monotonic()
        sent = 0
        while True:
            if client.hang_after is not None and sent >= client.hang_after:
                await self._aborted.wait()
                return
            if client.fail_after is not None and sent >= client.fail_after:
                client.live.discard(request.request_id)
                raise client.failure
            await asyncio.sleep(client.delay_s)
            deltas = [
                self._delta(index, output, sent, started)
                for index, output in enumerate(outputs)
                if index not in self._stopped
            ]
            sent += client.tokens_a_step
            if not sent - client.tokens_a_step and params.prompt_logprobs is not None and deltas:
                deltas[0].prompt_logprobs = [
                    _position(token_id, params.prompt_logprobs)
                    for token_id in request.prompt_token_ids[1:]
                ]
                deltas[0].prompt_logprobs_start = 1
            self._stopped |= {d.sequence_index for d in deltas if d.finish_reason is not None}
            over = len(self._stopped) == params.n
            if over:
                client.live.discard(request.request_id)
            if deltas:
                yield deltas
            if over or self._aborted.is_set():
                return

    async def _pooled(self, params: PoolingParams) -> TokenDelta:
        client, ids = self._client, self._request.prompt_token_ids
        await asyncio.sleep(client.delay_s)
        if client.hang_after is not None:
            await self._aborted.wait()
        client.live.discard(self._request.request_id)
        if client.fail_after is not None:
            raise client.failure
        assert client.pooling is not None
        vector = [0.0] * client.pooling.size
        if params.task is Task.CLASSIFY:
            vector = [n / 10 + params.second_text_start for n in range(client.pooling.size)]
        else:
            for token_id in ids:
                vector[token_id % client.pooling.size] += 1.0
        times = RequestTimes(0.25, 0.5, cached_tokens=client.cached_tokens, steps=1, step_s=0.5)
        delta = TokenDelta(0, 0, [], finish_reason=FinishReason.STOP, times=times)
        delta.vector = vector[: params.dimensions]
        return delta

    def _delta(self, index: int, output: list[int], start: int, started: float) -> TokenDelta:
        params = self._request.sampling_params
        room = params.max_tokens or 2**31
        token_ids = output[start : min(start + self._client.tokens_a_step, room)]
        delta = TokenDelta(index, start, token_ids)
        if params.logprobs is not None:
            delta.logprobs = [_position(token_id, params.logprobs) for token_id in token_ids]
        if token_ids[-1] == EOS_ID:
            delta.finish_reason = FinishReason.STOP
        elif start + len(token_ids) >= room:
            delta.finish_reason = FinishReason.LENGTH
        if start == 0 and index == 0:
            delta.times = RequestTimes(
                queue_s=0.25,
                prefill_s=0.5,
                cached_tokens=self._client.cached_tokens,
                steps=1,
                step_s=0.5,
            )
        if delta.finish_reason is not None:
            delta.cumulative_logprob = -0.5 * (start + len(token_ids))
            decode_s = time.monotonic() - started
            steps = start // self._client.tokens_a_step + 1
            delta.times = RequestTimes(
                0.25,
                0.5,
                decode_s,
                cached_tokens=self._client.cached_tokens,
                steps=steps,
                step_s=0.5 + decode_s,
            )
        return delta


def _position(token_id: int, num_top: int) -> PositionLogprobs:
    others = [TokenLogprob((token_id + k) % 256, -1.0 - k, 2 + k) for k in range(1, num_top)]
    token = TokenLogprob(token_id, -0.5, 1)
    return PositionLogprobs(token, [token, *others] if num_top else [])
