"""Texts to vectors: the one path for every API and `LLM`, beside `generation`'s to text."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pagewire.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    RequestCancelledError,
)
from pagewire.outputs import RequestTimes
from pagewire.pooling import PoolingParams, check_task
from pagewire_frontend.engine_client.base import EngineRequest
from pagewire_frontend.errors import TooManyTokensError
from pagewire_frontend.generation import Generation
from pagewire_frontend.tokenizer import Tokenizer
from pagewire_frontend.tracing import current_headers, phase

# Prompts of one call that the engine has at a time: enough to fill its steps, and few enough to
# leave room in its queue for other calls.
_USUAL_IN_FLIGHT = 256
# Less than this is tokenised at once: a thread would cost more.
_FEW_CHARACTERS = 8_000
_FEW_PROMPTS = 32


@dataclass(frozen=True, slots=True)
class PoolingPrompt:
    """A text, a pair of texts, or token ids.

    Attributes:
        name: what the client calls it, for errors: `input[3]`.
        text: the text, or the first of a pair.
        second: the other text of a pair.
        token_ids: in place of text.
    """

    name: str
    text: str | None = None
    second: str | None = None
    token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """Prompts that are pooled alike.

    Attributes:
        prompts: in the order of the results.
        params: what is made of each.
        truncate_prompt_tokens: keep the first so many tokens of each prompt, control tokens
            included; -1: as many as the model takes. None: one that is too long is refused.
        request_id: the client's id; "" and one is made.
        model: the name the client asked for; "" is the engine's.
        add_special_tokens: let the tokenizer add its control tokens to a text.
        tenant: whose fair share they count on.
        priority: lower runs first.
        most_in_flight: prompts that the engine has at a time.
    """

    prompts: Sequence[PoolingPrompt]
    params: PoolingParams
    truncate_prompt_tokens: int | None = None
    request_id: str = ""
    model: str = ""
    add_special_tokens: bool = True
    tenant: str = ""
    priority: int = 0
    most_in_flight: int = _USUAL_IN_FLIGHT


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """What became of one prompt."""

    values: list[float]
    token_ids: list[int]
    times: RequestTimes = field(default_factory=RequestTimes)


async def pool(
    generation: Generation, request: PoolingRequest, on_end: Callable[[], object] = lambda: None
) -> list[PooledPrompt]:
    """One result a prompt, in the order of the prompts. When one fails or the caller is cancelled,
    the rest is aborted.

    Args:
        generation: the way to the engine.
        request: the prompts, and what is made of them.
        on_end: called as each is done.

    Raises:
        FailedPreconditionError: the model can't do this.
        InvalidArgumentError: a prompt or a parameter can't be served; nothing has run then.
        ResourceExhaustedError, UnavailableError: the engine did not take it.
    """
    engine_requests = await prepare(generation, request)
    results: list[PooledPrompt | None] = [None] * len(engine_requests)
    rest = iter(enumerate(engine_requests))

    async def work() -> None:
        for n, one in rest:
            results[n] = await _run(generation, one)
            on_end()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(request.most_in_flight, len(engine_requests))):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [result for result in results if result is not None]


async def prepare(generation: Generation, request: PoolingRequest) -> list[EngineRequest]:
    """Checks everything, and tokenises.

    Raises:
        FailedPreconditionError, InvalidArgumentError: see `pool`.
    """
    name, info = generation.check_model(request.model), generation.model_info
    check_task(request.params.task, info.tasks, name)
    if info.pooling is not None:
        info.pooling.check(request.params)
    reader = _PromptReader(generation, request)
    characters = sum(
        len(prompt.text or "") + len(prompt.second or "") for prompt in request.prompts
    )
    with phase("tokenize"):
        if characters <= _FEW_CHARACTERS and len(request.prompts) <= _FEW_PROMPTS:
            read = reader.read_all()
        else:
            read = await asyncio.to_thread(reader.read_all)
    request_id = request.request_id or f"pool-{secrets.token_hex(8)}"
    trace_headers = current_headers()
    return [
        EngineRequest(
            request_id=f"{request_id}-{n}-{secrets.token_hex(4)}",
            prompt_token_ids=token_ids,
            tenant=request.tenant,
            priority=request.priority,
            whole=True,
            pooling=params,
            trace_headers=trace_headers,
        )
        for n, (token_ids, params) in enumerate(read)
    ]


async def _run(generation: Generation, request: EngineRequest) -> PooledPrompt:
    stream = await generation.client.submit(request)
    try:
        async for deltas in stream:
            for delta in deltas:
                if delta.vector is not None:
                    told = delta.times or RequestTimes()
                    times = replace(told, resumptions=stream.resumptions)
                    return PooledPrompt(delta.vector, request.prompt_token_ids, times)
                if delta.finish_reason is not None:
                    raise RequestCancelledError("the request was aborted in the engine")
    except BaseException:
        generation.in_background(stream.abort())
        raise
    raise InternalError("the engine ended the request without a vector")


class _PromptReader:
    """Makes token ids of a request's prompts."""

    def __init__(self, generation: Generation, request: PoolingRequest) -> None:
        self._request = request
        self._vocab_size = generation.model_info.vocab_size
        self._longest = generation.model_info.max_model_len
        self._keeps = _kept_tokens(request.truncate_prompt_tokens, self._longest)
        self._tokenizer = generation.tokenizer_or_none
        self._parses = generation.settings.parse_control_tokens_in_prompts

    def read_all(self) -> list[tuple[list[int], PoolingParams]]:
        """Token ids of each prompt, and what is made of it."""
        return [self._read(prompt) for prompt in self._request.prompts]

    def _read(self, prompt: PoolingPrompt) -> tuple[list[int], PoolingParams]:
        if prompt.token_ids is not None:
            return self._checked(prompt.name, prompt.token_ids), self._request.params
        if self._tokenizer is None:
            raise FailedPreconditionError(
                "this engine runs with --skip-tokenizer-init and serves token ids only; send those",
                field=prompt.name,
            )
        token_ids, second_start = self._encoded(prompt, self._tokenizer)
        if not token_ids:
            raise InvalidArgumentError(prompt.name, "is empty: it makes no token")
        params = self._request.params
        if second_start:
            params = replace(params, second_text_start=second_start)
        return token_ids, params

    def _encoded(self, prompt: PoolingPrompt, tokenizer: Tokenizer) -> tuple[list[int], int]:
        try:
            return tokenizer.encode_pair(
                prompt.text or "",
                prompt.second,
                add_special_tokens=self._request.add_special_tokens,
                parse_special_tokens=self._parses,
                max_tokens=self._keeps or self._longest,
                truncate=self._keeps is not None,
            )
        except TooManyTokensError as error:
            if self._keeps is not None:
                raise InvalidArgumentError(
                    "truncate_prompt_tokens",
                    f"{self._keeps} tokens do not hold what can't be cut of {prompt.name}, which "
                    f"has {error.count}; keep more",
                ) from None
            raise self._too_long(prompt.name, error.count) from None
        except InvalidArgumentError as error:
            error.field = prompt.name
            raise

    def _checked(self, name: str, token_ids: list[int]) -> list[int]:
        if not token_ids:
            raise InvalidArgumentError(name, "must hold at least one token")
        if self._keeps is not None:
            token_ids = token_ids[: self._keeps]
        elif len(token_ids) > self._longest:
            raise self._too_long(name, str(len(token_ids)))
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            wrong = next(i for i in token_ids if not 0 <= i < self._vocab_size)
            raise InvalidArgumentError(
                name, f"{wrong} is outside the vocabulary of {self._vocab_size}"
            )
        return token_ids

    def _too_long(self, name: str, count: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            name,
            f"has {count} tokens, and the model takes {self._longest}; shorten it, or let it be "
            "cut by truncate_prompt_tokens=-1",
        )


def _kept_tokens(asked: int | None, longest: int) -> int | None:
    """How many tokens are kept of a prompt; None: it is not cut.

    Raises:
        InvalidArgumentError: more than the model takes, or none.
    """
    if asked is None:
        return None
    if asked == -1:
        return longest
    if not 1 <= asked <= longest:
        raise InvalidArgumentError(
            "truncate_prompt_tokens",
            f"must be 1 to {longest}, which is what the model takes, or -1 for that; not {asked}",
        )
    return asked
