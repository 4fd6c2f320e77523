"""What a beam search looks for: one definition for every API and the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pagewire.errors import InvalidArgumentError
from pagewire.sampling_params import MAX_SEQUENCES, SamplingParams, check_range, check_whole_number

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSettings:
    """The part of a beam search that sampling has no words for; see BeamSearchParams."""

    beam_width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        check_whole_number("beam_width", self.beam_width)
        check_range("beam_width", self.beam_width, 1, MAX_SEQUENCES)
        if isinstance(self.length_penalty, bool) or not isinstance(
            self.length_penalty, (int, float)
        ):
            raise InvalidArgumentError(
                "length_penalty", f"must be a number, not {self.length_penalty!r}"
            )
        check_range("length_penalty", self.length_penalty, -10.0, 10.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidArgumentError(
                "early_stopping", f"must be True, False or 'never', not {self.early_stopping!r}"
            )

    def num_candidates(self, num_eos_token_ids: int) -> int:
        """Continuations that are looked at in each step: enough for `beam_width` of them to go on
        when all others end their sequence."""
        return max(2, 1 + num_eos_token_ids) * self.beam_width


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search, which looks for the likeliest sequences instead of sampling.

    In each step every beam is continued by its likeliest tokens, and the `beam_width` best of all
    these continuations go on. A sequence that ended has the score `cumulative log probability /
    length ** length_penalty`, its end-of-sequence token included. The results are those of Hugging
    Face's `generate(num_beams=beam_width, do_sample=False)`.

    Attributes:
        beam_width: sequences that are followed side by side, 1 to 128.
        max_tokens: upper bound on produced tokens. None: the rest of the context.
        n: results, best score first; at most `beam_width`. None: `beam_width`.
        ignore_eos: go on past the model's end-of-sequence ids.
        temperature: 0, as 1, compares the model's own log probabilities; another value divides the
            logits first, which makes unlikely continuations cheaper (above 1) or dearer (below).
        length_penalty: above 0 favours long sequences, below 0 short ones; in [-10, 10].
        early_stopping: when to stop. True: as soon as `beam_width` sequences have ended. False:
            when no beam, at its present length, has a better score than the worst of those.
            "never": when no beam could reach one at any length.
        logprobs: alternatives to report for each token, 0 to 20. None: no log probabilities.
    """

    beam_width: int
    max_tokens: int | None = None
    n: int | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self.as_sampling_params()

    def as_sampling_params(self, **text_fields: Any) -> SamplingParams:
        """The form in which a request carries it.

        Args:
            text_fields: fields of SamplingParams that the engine does not read.

        Raises:
            InvalidArgumentError: a value that can't be served.
        """
        return SamplingParams(
            n=self.beam_width if self.n is None else self.n,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            beam_search=BeamSettings(
                beam_width=self.beam_width,
                length_penalty=self.length_penalty,
                early_stopping=self.early_stopping,
            ),
            **text_fields,
        )
