"""What is checked of a request before the loop sees it, whichever way it came."""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace

from pagewire.beam_search_params import BeamSettings
from pagewire.errors import InvalidArgumentError
from pagewire.pooling import PoolingInfo, PoolingParams, Task, check_task
from pagewire.sampling_params import SamplingParams
from pagewire_engine.submission import SequencePast, Submission

MAX_REQUEST_ID_LENGTH = 256
_MODEL = "the model"
_NOTHING_SAMPLED = SamplingParams(seed=0)


class Admission:
    """Turns wire values into a Submission, or says which field is wrong.

    Args:
        vocab_size: token ids lie in [0, vocab_size).
        max_model_len: longest prompt plus output.
        seed: of the seeds given to requests without one.
        num_eos_token_ids: end-of-sequence ids of the model.
        tasks: what can be asked of it.
        pooling: what it makes of a prompt, if it pools.
    """

    def __init__(
        self,
        vocab_size: int,
        max_model_len: int,
        seed: int,
        *,
        num_eos_token_ids: int = 0,
        tasks: Collection[Task] = (Task.GENERATE,),
        pooling: PoolingInfo | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._num_eos_token_ids = num_eos_token_ids
        self._tasks = tasks
        self._pooling = pooling
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def admit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        tenant: str = "",
        priority: int = 0,
        past: Sequence[SequencePast] = (),
        resubmission: bool = False,
    ) -> Submission:
        """The submission, with a seed and `max_tokens` filled in.

        Raises:
            InvalidArgumentError: a field can't be served.
            FailedPreconditionError: the model generates nothing.
        """
        check_task(Task.GENERATE, self._tasks, _MODEL)
        _check_request_id(request_id)
        if params.best_of is not None and params.best_of != params.n:
            raise InvalidArgumentError(
                "best_of",
                f"the engine ranks nothing: ask for n={params.best_of} with logprobs=0, and keep "
                "those with the highest cumulative_logprob",
            )
        self._check_prompt(prompt_token_ids, self._max_model_len - 1)
        if params.beam_search is not None:
            self._check_beams(params.beam_search)
        params.check_vocabulary(self._vocab_size)
        params = self._complete(params, len(prompt_token_ids))
        self._check_past(past, params)
        return Submission(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=params,
            priority=priority,
            tenant=tenant,
            past=list(past),
            resubmission=resubmission,
        )

    def admit_pooling(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: PoolingParams,
        *,
        tenant: str = "",
        priority: int = 0,
        past: Sequence[SequencePast] = (),
        resubmission: bool = False,
    ) -> Submission:
        """The same of a request whose answer is a vector.

        Raises:
            InvalidArgumentError: a field can't be served.
            FailedPreconditionError: the model does not pool, or not for this task.
        """
        check_task(params.task, self._tasks, _MODEL)
        _check_request_id(request_id)
        self._check_prompt(prompt_token_ids, self._max_model_len)
        if self._pooling is not None:
            self._pooling.check(params)
        if params.second_text_start >= len(prompt_token_ids):
            raise InvalidArgumentError(
                "second_text_start",
                f"{params.second_text_start} is beyond the prompt's {len(prompt_token_ids)} tokens",
            )
        if any(one.index or one.output_token_ids or one.finish_reason for one in past):
            raise InvalidArgumentError("past", "what is pooled has none: leave it out")
        return Submission(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=_NOTHING_SAMPLED,
            priority=priority,
            tenant=tenant,
            resubmission=resubmission,
            pooling=params,
        )

    def _check_prompt(self, prompt: list[int], longest: int) -> None:
        if not prompt:
            raise InvalidArgumentError("prompt_token_ids", "must hold at least one token")
        if len(prompt) > longest:
            limit = self._max_model_len
            why = f"the model takes {limit}"
            if longest < limit:
                why = "that leaves no room for output: the model's limit for prompt and output "
                why += f"together is {limit}"
            raise InvalidArgumentError("prompt_token_ids", f"has {len(prompt)} tokens, and {why}")
        self._check_ids("prompt_token_ids", prompt)

    def _check_beams(self, beams: BeamSettings) -> None:
        if beams.num_candidates(self._num_eos_token_ids) > self._vocab_size:
            raise InvalidArgumentError(
                "beam_width",
                f"{beams.beam_width} beams are too many for a vocabulary of {self._vocab_size}",
            )

    def _check_ids(self, name: str, ids: list[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
            raise InvalidArgumentError(
                name, f"holds a token id outside the vocabulary of {self._vocab_size}"
            )

    def _complete(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        rest = self._max_model_len - prompt_length
        max_tokens = rest if params.max_tokens is None else params.max_tokens
        if max_tokens < 1:
            raise InvalidArgumentError("max_tokens", "must be at least 1: a step samples a token")
        if max_tokens > rest:
            raise InvalidArgumentError(
                "max_tokens",
                f"{prompt_length} prompt tokens and {max_tokens} more are over the model's limit "
                f"of {self._max_model_len}; at most {rest} are possible here",
            )
        seed = params.seed
        if seed is None:
            with self._lock:
                seed = self._random.getrandbits(63)
        return replace(params, max_tokens=max_tokens, seed=seed)

    def _check_past(self, past: Sequence[SequencePast], params: SamplingParams) -> None:
        if params.beam_search is not None and any(
            sequence.output_token_ids or sequence.finish_reason for sequence in past
        ):
            raise InvalidArgumentError(
                "past", "a beam search starts over from its prompt: leave out what came of it"
            )
        seen: set[int] = set()
        for sequence in past:
            if not 0 <= sequence.index < params.n or sequence.index in seen:
                raise InvalidArgumentError(
                    "past", f"sequence index {sequence.index} is repeated or not below n={params.n}"
                )
            seen.add(sequence.index)
            self._check_ids("past", sequence.output_token_ids)
            # Just as many is fine: its end had not been told, and the engine finds it.
            if len(sequence.output_token_ids) > (params.max_tokens or 0):
                raise InvalidArgumentError(
                    "past", f"sequence {sequence.index} is longer than max_tokens"
                )
        ended = sum(1 for sequence in past if sequence.finish_reason is not None)
        if ended == params.n:
            raise InvalidArgumentError("past", "every sequence has ended already")


def open_sequences(submission: Submission) -> dict[int, int]:
    """For each sequence that is to go on, how many tokens it has produced already."""
    produced = dict.fromkeys(range(submission.sampling_params.n), 0)
    for sequence in submission.past:
        if sequence.finish_reason is not None:
            del produced[sequence.index]
        else:
            produced[sequence.index] = len(sequence.output_token_ids)
    return produced


def _check_request_id(request_id: str) -> None:
    if not request_id or len(request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidArgumentError(
            "request_id", f"must have 1 to {MAX_REQUEST_ID_LENGTH} characters"
        )
