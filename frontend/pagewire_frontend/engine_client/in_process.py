"""An engine inside this process, for offline use and tests: the same streams, no sockets.

The only module of the frontend that may import the engine.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

from pagewire.config import EngineConfig
from pagewire.errors import InternalError, UnavailableError
from pagewire.outputs import FinishReason
from pagewire.v1 import engine_pb2
from pagewire_engine.adapters.service import AdapterService
from pagewire_engine.admission import Admission
from pagewire_engine.build import BuiltEngine, build_engine
from pagewire_engine.engine_loop import EngineLoop
from pagewire_engine.outputs import StepOutputs
from pagewire_engine.servicer import tokenizer_hash
from pagewire_engine.stats_message import stats_message, window_message
from pagewire_engine.structured_output import start_compiling
from pagewire_engine.submission import SequencePast, Submission
from pagewire_frontend.engine_client.base import (
    EngineRequest,
    EngineStatuses,
    ModelInfo,
    TokenDelta,
)
from pagewire_frontend.engine_client.mailbox import Mailbox, MissingTokensError

_SWITCH_INTERVAL_S = 0.001
_LOOK_TIMEOUT_S = 2.0
_STOP_POLL_S = 0.005


class InProcessTokenStream:
    """The tokens of one request in the engine of this process. See `TokenStream`.

    A stream that is dropped before its end aborts its request.
    """

    resumptions = 0

    def __init__(self, engine_id: str, mailbox: Mailbox, loop: EngineLoop) -> None:
        self._engine_id = engine_id
        self._mailbox = mailbox
        self._loop = loop

    def __aiter__(self) -> AsyncIterator[list[TokenDelta]]:
        return self

    async def __anext__(self) -> list[TokenDelta]:
        deltas = await self._mailbox.take()
        if not deltas:
            raise StopAsyncIteration
        return deltas

    async def finish_sequence(self, sequence_index: int) -> None:
        """A stop string ended this sequence; no further delta of it is delivered."""
        if self._mailbox.sequences[sequence_index].finish_reason is None:
            self._loop.abort(self._engine_id, sequence_index, FinishReason.STOP)
        self._mailbox.mute(sequence_index, FinishReason.STOP)

    async def abort(self) -> None:
        """Ends the request in the engine. Safe to call twice and after the end."""
        if not self._mailbox.ended:
            self._loop.abort(self._engine_id)
        self._mailbox.mute_all(FinishReason.ABORT)

    def __del__(self) -> None:
        if not self._mailbox.ended:
            self._loop.abort(self._engine_id)


class InProcessEngineClient:
    """Implements EngineClient with an engine of its own.

    Args:
        config: the engine's settings.
        report: told in a line each what is being loaded.
        build: makes the engine; tests put a fake one in.
    """

    def __init__(
        self,
        config: EngineConfig,
        report: Callable[[str], None] = lambda line: None,
        build: Callable[[EngineConfig, Callable[[str], None]], BuiltEngine] = build_engine,
    ) -> None:
        self._config = config
        self._report = report
        self._build = build
        self._built: BuiltEngine | None = None
        self._engine_loop: EngineLoop | None = None
        self._adapters: AdapterService | None = None
        self._model_info: ModelInfo | None = None
        self._admission: Admission | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._numbers = itertools.count(1)
        self._closed = False
        self._dead = False

    async def start(self) -> None:
        """Loads the model, off the event loop.

        Raises:
            PagewireError: the settings or the model can't be served.
        """
        if self._built is not None:
            return
        self._event_loop = asyncio.get_running_loop()
        sys.setswitchinterval(min(_SWITCH_INTERVAL_S, sys.getswitchinterval()))
        built = await asyncio.to_thread(self._build, self._config, self._report)
        info = built.info
        self._model_info = ModelInfo(
            served_model_name=built.served_model_name,
            architecture=info.architecture,
            dtype=info.dtype,
            device=info.device,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            eos_token_ids=built.eos_token_ids,
            default_sampling_params=built.default_sampling_params,
            tokenizer_sha256=tokenizer_hash(built.tokenizer_files),
            created=built.created,
            epoch=built.created,
            max_loras=0 if built.adapters is None else self._config.max_loras,
            tasks=built.tasks,
            pooling=built.pooling,
        )
        self._admission = built.admission(self._config.seed)
        self._engine_loop = EngineLoop(built.engine, self._publish, self._on_engine_death)
        self._adapters = AdapterService(
            built.adapters, self._engine_loop, self._config, built.served_model_name
        )
        self._engine_loop.start()
        self._built = built

    async def close(self) -> None:
        """Ends every live request, and frees the model. Safe to call twice, and at the
        interpreter's exit, when no thread can be started any more."""
        if self._closed or self._built is None or self._engine_loop is None:
            return
        self._closed = True
        self._fail_all("the engine was closed")
        self._engine_loop.ask_to_stop()
        while self._engine_loop.alive:  # noqa: ASYNC110 (to join it would take a thread)
            await asyncio.sleep(_STOP_POLL_S)
        self._built.shutdown()

    @property
    def model_info(self) -> ModelInfo:
        """What the engine serves; known after `start`."""
        if self._model_info is None:
            raise UnavailableError("the engine client is not started")
        return self._model_info

    @property
    def ready(self) -> bool:
        """Whether requests can be served now."""
        return self._built is not None and not self._closed and not self._dead

    @property
    def engine_loop(self) -> EngineLoop:
        """The loop that runs the engine, for its statistics."""
        if self._engine_loop is None:
            raise UnavailableError("the engine client is not started")
        return self._engine_loop

    @property
    def adapters(self) -> AdapterService:
        """The engine's adapters."""
        if self._adapters is None:
            raise UnavailableError("the engine client is not started")
        return self._adapters

    async def load_adapter(self, request: engine_pb2.LoadAdapterRequest) -> engine_pb2.AdapterInfo:
        """Loads an adapter from any folder: who calls is this machine's operator."""
        loaded = await asyncio.to_thread(self.adapters.load, request, confined=False)
        return loaded.adapter

    async def unload_adapter(
        self, request: engine_pb2.UnloadAdapterRequest
    ) -> engine_pb2.UnloadAdapterResponse:
        """Unloads an adapter, as its requests have ended or are ended."""
        # A call that is cancelled leaves its thread, which must end too.
        cancelled = False
        unloading = asyncio.to_thread(self.adapters.unload, request, lambda: not cancelled)
        try:
            return await unloading
        except asyncio.CancelledError:
            cancelled = True
            raise

    async def list_adapters(self, unless_revision: str = "") -> engine_pb2.ListAdaptersResponse:
        """What is loaded, and where it is; nothing where that is known in this revision."""
        return self.adapters.list(unless_revision)

    async def adapter_files(self, name: str, version: str) -> Mapping[str, bytes]:
        """The files of a tokenizer and chat template that an adapter ships, maybe none."""
        return self.adapters.files_of(name, version)

    async def stats(self, timeout_s: float) -> engine_pb2.GetStatsResponse:
        """What the engine counts, as of now; it is read at once.

        Raises:
            UnavailableError: the client is not started.
        """
        return self._stats()

    def statuses(self) -> EngineStatuses:
        """None: there is but this process."""
        return EngineStatuses()

    async def stats_of_each(self, timeout_s: float) -> Mapping[str, engine_pb2.GetStatsResponse]:
        """What it counts, under no name."""
        return {"": await self.stats(timeout_s)}

    async def watch_stats(
        self, interval_ms: int, *, with_window: bool
    ) -> AsyncGenerator[engine_pb2.GetStatsResponse, None]:
        """The same again and again, until the reader closes it.

        Raises:
            UnavailableError: the client is not started.
        """
        while True:
            stats = self._stats()
            if with_window:
                snapshot = await asyncio.to_thread(self.engine_loop.look, _LOOK_TIMEOUT_S)
                if snapshot is not None:
                    stats.window.CopyFrom(window_message(snapshot))
            yield stats
            if not interval_ms:
                return
            await asyncio.sleep(interval_ms / 1000)

    def _stats(self) -> engine_pb2.GetStatsResponse:
        return stats_message(
            self.engine_loop.stats(),
            epoch=self.model_info.epoch,
            adapters=self.adapters.stats(),
        )

    async def fetch_tokenizer(self) -> Mapping[str, bytes]:
        """The files that make the tokenizer; empty when the engine has none."""
        if self._built is None:
            raise UnavailableError("the engine client is not started")
        return self._built.tokenizer_files

    async def submit(self, request: EngineRequest) -> InProcessTokenStream:
        """Hands a request to the loop.

        Raises:
            InvalidArgumentError, AlreadyExistsError, ResourceExhaustedError: it was refused.
            UnavailableError: the client is not started, or closed.
        """
        built, admission = self._built, self._admission
        if self._engine_loop is None or built is None or admission is None or self._closed:
            raise UnavailableError("the engine client is not running")
        submission = _admitted(admission, request)
        compiling = start_compiling(built.grammars, submission)
        if compiling is not None:
            # Others may wait for the same grammar: it is compiled even if this call is cancelled.
            grammar = await asyncio.shield(asyncio.wrap_future(compiling))
            submission = replace(submission, grammar=grammar)
        # A name of its own: the outputs of an aborted request and of its successor never mix.
        engine_id = f"{request.request_id}#{next(self._numbers)}"
        mailboxes = self._mailboxes
        mailbox = Mailbox(
            request.sampling_params.n,
            on_end=lambda: _remove(mailboxes, engine_id),
            whole=request.whole,
            past=request.past,
        )
        mailboxes[engine_id] = mailbox
        try:
            at_end = request.whole and not request.past and request.sampling_params.logprobs is None
            self.adapters.hand_over(
                replace(submission, request_id=engine_id, told_at_end=at_end),
                request.adapter,
                request.adapter_version,
                functools.partial(self._engine_loop.submit, more_follow=request.whole),
            )
        except BaseException:
            _remove(mailboxes, engine_id)
            raise
        if request.whole:
            # Behind the tasks that are about to submit the other prompts of the same call.
            asyncio.get_running_loop().call_soon(self._engine_loop.wake)
        return InProcessTokenStream(engine_id, mailbox, self._engine_loop)

    def _publish(self, outputs: StepOutputs) -> None:
        """On the engine's thread."""
        loop = self._event_loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._deliver, outputs)

    def _on_engine_death(self) -> None:
        """On the engine's thread. There is no other engine that requests could go on in."""
        self._dead = True
        loop = self._event_loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._fail_all, "the engine failed; its log has the details")

    def _fail_all(self, message: str) -> None:
        for mailbox in list(self._mailboxes.values()):
            mailbox.fail(UnavailableError(message))

    def _deliver(self, outputs: StepOutputs) -> None:
        touched: dict[str, Mailbox] = {}
        for prompt in outputs.prompt_logprobs:
            mailbox = self._mailboxes.get(prompt.request_id)
            if mailbox is not None:
                touched[prompt.request_id] = mailbox
                mailbox.add_prompt_logprobs(prompt.start, prompt.positions)
        for output in outputs.sequences:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:
                continue
            touched[output.request_id] = mailbox
            try:
                if output.token_ids:
                    mailbox.add_tokens(
                        output.sequence_index,
                        output.start,
                        output.token_ids,
                        output.logprobs or (),
                    )
                    if output.times is not None and output.finish_reason is None:
                        mailbox.add_start(output.sequence_index, output.times)
                if output.finish_reason is not None:
                    mailbox.finish(
                        output.sequence_index,
                        output.finish_reason,
                        stop_token_id=output.stop_token_id,
                        cumulative_logprob=output.cumulative_logprob,
                        times=output.times,
                        vector=output.vector,
                    )
            except MissingTokensError as error:
                mailbox.fail(InternalError(f"the engine lost count of its tokens: {error}"))
        for mailbox in touched.values():
            if mailbox.ended or not mailbox.whole:
                mailbox.wake()
        for failure in outputs.failures:
            mailbox = self._mailboxes.get(failure.request_id)
            if mailbox is not None:
                mailbox.fail(failure.error)


def _remove(mailboxes: dict[str, Mailbox], engine_id: str) -> None:
    mailboxes.pop(engine_id, None)


def _admitted(admission: Admission, request: EngineRequest) -> Submission:
    common: dict[str, Any] = {
        "tenant": request.tenant,
        "priority": request.priority,
        "past": [
            SequencePast(index, one.token_ids, one.finish_reason, one.cumulative_logprob)
            for index, one in enumerate(request.past)
        ],
        "resubmission": bool(request.past),
    }
    if request.pooling is not None:
        return admission.admit_pooling(
            request.request_id, request.prompt_token_ids, request.pooling, **common
        )
    return admission.admit(
        request.request_id, request.prompt_token_ids, request.sampling_params, **common
    )
