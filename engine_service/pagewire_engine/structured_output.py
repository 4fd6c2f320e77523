"""Constraints on outputs, compiled by llguidance against the model's vocabulary.

A constraint is compiled when its request is admitted, on a thread of its own: no step waits for it.
The worker then takes a copy of the compiled matcher for each sequence.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from pagewire.errors import FailedPreconditionError, PagewireError, ResourceExhaustedError
from pagewire.structured_output import FIELD, StructuredOutput
from pagewire_engine.grammar_matcher import CompiledGrammar, Matcher
from pagewire_engine.grammar_trial import GrammarTrial
from pagewire_engine.submission import Submission
from pagewire_engine.token_bytes import TokenBytes

if TYPE_CHECKING:
    # Loaded with the first constraint: most engines never see one.
    from llguidance import LLTokenizer

logger = logging.getLogger(__name__)

# Constraints that wait for the compiler; that are in use or kept, and their memory; and that are
# kept when no request has them any more.
_MOST_WAITING = 64
_MOST_LIVE = 1024
_MOST_LIVE_BYTES = 1 << 30
_MOST_KEPT = 64
_MOST_KEPT_BYTES = 128 << 20
_RETRY_AFTER_S = 1.0


class GrammarCompiler:
    """Compiles constraints, and keeps what is in use and what was used last. Its methods may be
    called from any thread.

    Args:
        load_files: gives the files of the model's tokenizer; called with the first constraint.
        vocab_size: rows of the output embedding.
        eos_token_ids: the model's end-of-sequence ids.
    """

    def __init__(
        self,
        load_files: Callable[[], Mapping[str, bytes]],
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
    ) -> None:
        self._load_files = load_files
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(set(eos_token_ids))
        self._lock = threading.Lock()
        self._compiling: dict[StructuredOutput, Future[CompiledGrammar]] = {}
        self._live: WeakValueDictionary[StructuredOutput, CompiledGrammar] = WeakValueDictionary()
        self._kept: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()
        self._compile_lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._token_bytes: TokenBytes | None = None
        self._control_tokens: dict[str, int] = {}
        self._no_vocabulary: str | None = None
        self._trial: GrammarTrial | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")

    def start(
        self, constraint: StructuredOutput, *, resubmission: bool = False
    ) -> Future[CompiledGrammar]:
        """Lets a constraint be compiled, unless it is known.

        Args:
            constraint: what is to be compiled.
            resubmission: its request was admitted before: bounds do not apply.

        Returns:
            Where the result comes, or InvalidArgumentError for a constraint that can't be served,
            or FailedPreconditionError where the model's tokenizer serves none.

        Raises:
            ResourceExhaustedError: too many wait for the compiler, or are in use.
        """
        with self._lock:
            known = self._live.get(constraint)
            if known is not None:
                self._keep(constraint, known)
                done: Future[CompiledGrammar] = Future()
                done.set_result(known)
                return done
            pending = self._compiling.get(constraint)
            if pending is not None:
                return pending
            if not resubmission:
                self._check_bounds()
            future = self._pool.submit(self._compile_and_keep, constraint)
            self._compiling[constraint] = future
            return future

    def matcher(self, constraint: StructuredOutput, max_tokens: int | None = None) -> Matcher:
        """A matcher before the first token. A constraint that is not known any more is compiled
        here and now.

        Args:
            constraint: what the output is held to.
            max_tokens: that it may have; None: it need not come to an end.

        Raises:
            InvalidArgumentError, FailedPreconditionError: see `start`.
        """
        known = self._live.get(constraint)
        if known is None:
            known = self._compile(constraint)
            with self._lock:
                self._keep(constraint, known)
        return known.matcher(max_tokens if constraint.fit_max_tokens else None)

    def close(self) -> None:
        """Ends the thread and the trial. Safe to call twice."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._trial is not None:
            self._trial.close()

    def _keep(self, constraint: StructuredOutput, grammar: CompiledGrammar) -> None:
        """Makes it the one used last. Under the lock."""
        self._live[constraint] = grammar
        self._kept[constraint] = grammar
        self._kept.move_to_end(constraint)
        while (
            len(self._kept) > _MOST_KEPT
            or sum(each.num_bytes for each in self._kept.values()) > _MOST_KEPT_BYTES
        ):
            self._kept.popitem(last=False)

    def _check_bounds(self) -> None:
        num_bytes = sum(each.num_bytes for each in list(self._live.values()))
        for count, most, what in (
            (len(self._compiling), _MOST_WAITING, "constraints on outputs wait to be compiled"),
            (len(self._live), _MOST_LIVE, "constraints on outputs are in use"),
            (num_bytes, _MOST_LIVE_BYTES, "bytes are taken by constraints on outputs"),
        ):
            if count >= most:
                raise ResourceExhaustedError(
                    f"{count} {what}, the most at a time; try again later",
                    field=FIELD,
                    retry_after_s=_RETRY_AFTER_S,
                )

    # -- the compiler's thread -----------------------------------------------------------------

    def _compile_and_keep(self, constraint: StructuredOutput) -> CompiledGrammar:
        try:
            grammar = self._compile(constraint)
        except BaseException:
            with self._lock:
                del self._compiling[constraint]
            raise
        with self._lock:
            self._keep(constraint, grammar)
            del self._compiling[constraint]
        return grammar

    def _compile(self, constraint: StructuredOutput) -> CompiledGrammar:
        with self._compile_lock:
            vocabulary = self._load_vocabulary()
            from pagewire_engine.grammars import compiled_grammar

            assert self._trial is not None
            passed = self._trial.try_out(constraint)
            if self._token_bytes is None:
                self._token_bytes = TokenBytes(vocabulary)
                self._token_bytes.prepare()
            return compiled_grammar(
                constraint,
                passed.grammar,
                vocabulary,
                self._token_bytes,
                passed.num_bytes,
                self._control_tokens,
                passed.growth,
            )

    def _load_vocabulary(self) -> LLTokenizer:
        """The model's vocabulary, made once, with the trial that has another."""
        if self._no_vocabulary is not None:
            raise FailedPreconditionError(self._no_vocabulary, field=FIELD)
        if self._vocabulary is None:
            try:
                self._vocabulary = self._make_vocabulary()
            except PagewireError as error:
                self._no_vocabulary = error.message
                raise
        return self._vocabulary

    def _make_vocabulary(self) -> LLTokenizer:
        started = time.monotonic()
        try:
            from pagewire_engine.grammars import control_token_ids, make_vocabulary
        except ImportError as error:
            raise FailedPreconditionError(
                "this engine has no llguidance: pip install 'pagewire[engine]'", field=FIELD
            ) from error
        tokenizer_json = self._load_files().get("tokenizer.json")
        if tokenizer_json is None:
            raise FailedPreconditionError(
                "constraints on outputs need the model's tokenizer, and this engine runs without "
                "(--skip-tokenizer-init)",
                field=FIELD,
            )
        if not self._eos_token_ids:
            raise FailedPreconditionError(
                "the model has no end-of-sequence id, which a constrained output ends with: set "
                "eos_token_id in its generation_config.json",
                field=FIELD,
            )
        self._control_tokens = control_token_ids(tokenizer_json)
        self._trial = GrammarTrial(tokenizer_json, self._vocab_size, self._eos_token_ids)
        self._trial.start()
        vocabulary = make_vocabulary(tokenizer_json, self._vocab_size, self._eos_token_ids)
        logger.info(
            "The vocabulary of %d tokens is ready for constraints on outputs: %.2f s.",
            self._vocab_size,
            time.monotonic() - started,
        )
        return vocabulary


def start_compiling(
    compiler: GrammarCompiler | None, submission: Submission
) -> Future[CompiledGrammar] | None:
    """Lets the constraint of a request be compiled; None where it has none.

    Args:
        compiler: the engine's; None where it constrains nothing.
        submission: the request.

    Raises:
        FailedPreconditionError: the engine constrains nothing.
        ResourceExhaustedError: see GrammarCompiler.start.
    """
    constraint = submission.sampling_params.structured_output
    if constraint is None:
        return None
    if compiler is None:
        raise FailedPreconditionError("this engine does not constrain outputs", field=FIELD)
    return compiler.start(constraint, resubmission=submission.resubmission)
