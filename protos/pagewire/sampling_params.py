"""How tokens are chosen and where a sequence stops: one definition for every API and the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pagewire.errors import InvalidArgumentError
from pagewire.structured_output import StructuredOutput

if TYPE_CHECKING:
    from pagewire.beam_search_params import BeamSettings

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1000
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 4096
MAX_SEQUENCES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    The engine reads all but the text fields (`stop`, `include_stop_str_in_output`,
    `skip_special_tokens`), which
    the frontend applies.

    Attributes:
        n: sequences to produce for the prompt.
        best_of: sequences to run, of which the n with the highest cumulative log probability are
            returned once all have ended; at least n, at most 128. None: n.
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probabilities add up to this; in (0, 1].
        top_k: keep the k likeliest tokens, below 2**31; 0 or -1 keeps all.
        min_p: keep tokens at least this fraction as likely as the likeliest; in [0, 1].
        presence_penalty, frequency_penalty: OpenAI's, in [-2, 2], over produced tokens.
        repetition_penalty: CTRL's (arXiv:1909.05858), over prompt and produced tokens; above 0.
        logit_bias: token id to a value in [-100, 100] added to its logit; at most 4096 ids.
        seed: the same seed gives the same tokens whatever else runs. None: one is drawn at
            admission.
        stop: strings that end a sequence; at most 16 of 1000 characters.
        stop_token_ids: ids that end a sequence; at most 1024.
        ignore_eos: go on past the model's end-of-sequence ids.
        min_tokens: no stop of any kind before this many tokens.
        max_tokens: upper bound on produced tokens. None: the rest of the context. 0: none, where
            `prompt_logprobs` are all that is wanted.
        logprobs: alternatives to report for each produced token, 0 to 20. None: no log
            probabilities.
        prompt_logprobs: the same for the prompt's tokens.
        include_stop_str_in_output: keep the stop string (or the stop token's text) at the end.
        skip_special_tokens: leave control tokens out of the text.
        beam_search: search instead of sampling; made by `BeamSearchParams.as_sampling_params`.
        structured_output: what the output must look like. Where the model's end-of-sequence ids
            are the only tokens it leaves, they end a sequence whatever `min_tokens` and
            `ignore_eos` say.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    beam_search: BeamSettings | None = None
    structured_output: StructuredOutput | None = None

    def __post_init__(self) -> None:
        # Counted before anything looks at each: a client may have sent millions.
        check_count("stop", () if isinstance(self.stop, str) else self.stop, MAX_STOP_STRINGS)
        check_count("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        check_count("logit_bias", self.logit_bias, MAX_LOGIT_BIASES)
        # Lists and single strings are what people pass; frozen fields are what the engine keeps.
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        stop_token_ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        if not isinstance(self.logit_bias, Mapping | None):
            raise InvalidArgumentError("logit_bias", "must map token ids to numbers")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        self._check()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def num_candidates(self) -> int:
        """Sequences that run for the n that are returned."""
        return self.n if self.best_of is None else self.best_of

    def for_candidates(self) -> SamplingParams:
        """What the engine is asked for where `best_of` is above n: all candidates, with the log
        probabilities that rank them."""
        logprobs = 0 if self.logprobs is None else self.logprobs
        return replace(self, n=self.num_candidates, best_of=None, logprobs=logprobs)

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def passes_eos(self) -> bool:
        """Whether a sequence goes on past the model's end-of-sequence ids. Under a constraint those
        are chosen only where the text is complete."""
        return self.ignore_eos and self.structured_output is None

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidArgumentError for a token id the model does not have."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidArgumentError(
                        name, f"token id {token_id} is outside the vocabulary of {vocab_size}"
                    )

    def _check(self) -> None:
        _check_types(self)
        check_range("n", self.n, 1, MAX_SEQUENCES)
        if self.best_of is not None:
            check_range("best_of", self.best_of, 1, MAX_SEQUENCES)
            if self.best_of < self.n:
                raise InvalidArgumentError(
                    "best_of", f"{self.best_of} is below n ({self.n}): the best n can't be chosen"
                )
        check_range("temperature", self.temperature, 0.0, 100.0)
        check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        if not -1 <= self.top_k < 2**31:
            raise InvalidArgumentError(
                "top_k", f"must be 1 to {2**31 - 1}, or 0 or -1 for all tokens, not {self.top_k}"
            )
        check_range("min_p", self.min_p, 0.0, 1.0)
        check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        for token_id, bias in self.logit_bias.items():
            check_range("logit_bias", bias, -100.0, 100.0)
            if token_id < 0:
                raise InvalidArgumentError("logit_bias", f"token id {token_id} is negative")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InvalidArgumentError("seed", "must fit in 64 bits")
        if any(not text for text in self.stop):
            raise InvalidArgumentError("stop", "an empty stop string would stop everything")
        if any(len(text) > MAX_STOP_CHARACTERS for text in self.stop):
            raise InvalidArgumentError(
                "stop", f"at most {MAX_STOP_CHARACTERS} characters a string are allowed"
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidArgumentError(
                "max_tokens",
                "must be at least 1, not 0: that is for the log probabilities of a prompt alone, "
                "and needs prompt_logprobs (or echo, in /v1/completions)",
            )
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidArgumentError("max_tokens", f"must be at least 1, not {self.max_tokens}")
        if self.min_tokens < 0:
            raise InvalidArgumentError("min_tokens", f"must not be negative ({self.min_tokens})")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgumentError(
                "min_tokens", f"{self.min_tokens} is above max_tokens ({self.max_tokens})"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                check_range(name, value, 0, MAX_LOGPROBS)
        if not isinstance(self.structured_output, StructuredOutput | None):
            raise InvalidArgumentError(
                "structured_output",
                f"must be a StructuredOutput, not {self.structured_output!r:.80}",
            )
        if self.beam_search is not None:
            self._check_beam_search(self.beam_search)

    def _check_beam_search(self, beams: BeamSettings) -> None:
        if self.n > beams.beam_width:
            raise InvalidArgumentError(
                "n", f"{self.n} results are more than beam_width ({beams.beam_width}) can give"
            )
        neutral = SamplingParams()
        for name in _NOT_IN_BEAM_SEARCH:
            if getattr(self, name) != getattr(neutral, name):
                raise InvalidArgumentError(
                    name, "is not served with a beam search, which does not sample: leave it out"
                )


# The search compares the model's log probabilities as they are, and knows no text.
_NOT_IN_BEAM_SEARCH = (
    "best_of",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "prompt_logprobs",
    "structured_output",
)
_INT_FIELDS = frozenset(
    ("n", "best_of", "top_k", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs")
)
_FLOAT_FIELDS = frozenset(
    (
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    )
)
_BOOL_FIELDS = frozenset(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"))
_OPTIONAL_FIELDS = frozenset(("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs"))


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is not None and not isinstance(value, Iterable):
        raise InvalidArgumentError(name, f"must be a list, not {value!r}")
    return tuple(value or ())


def _check_types(params: SamplingParams) -> None:
    for spec in fields(params):
        name, value = spec.name, getattr(params, spec.name)
        if value is None and name in _OPTIONAL_FIELDS:
            continue
        if name in _INT_FIELDS:
            check_whole_number(name, value)
        if name in _FLOAT_FIELDS and (
            not isinstance(value, (int, float)) or isinstance(value, bool)
        ):
            raise InvalidArgumentError(name, f"must be a number, not {value!r}")
        if name in _BOOL_FIELDS and not isinstance(value, bool):
            raise InvalidArgumentError(name, f"must be True or False, not {value!r}")
    if not all(isinstance(text, str) for text in params.stop):
        raise InvalidArgumentError("stop", "must be strings")
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in params.stop_token_ids):
        raise InvalidArgumentError("stop_token_ids", "must be whole numbers")
    for token_id, bias in params.logit_bias.items():
        if type(token_id) is not int or not isinstance(bias, (int, float)):
            raise InvalidArgumentError("logit_bias", "must map token ids to numbers")


def check_count(name: str, values: object, most: int) -> None:
    """Raises InvalidArgumentError for more than `most` values."""
    if isinstance(values, Sized) and len(values) > most:
        raise InvalidArgumentError(name, f"holds {len(values)} values; at most {most} are allowed")


def check_whole_number(name: str, value: Any) -> None:
    """Raises InvalidArgumentError for what is no int, or a bool."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgumentError(name, f"must be a whole number, not {value!r}")


def check_range(
    name: str, value: float, low: float, high: float, *, low_open: bool = False
) -> None:
    """Raises InvalidArgumentError for a value outside [low, high], or (low, high]."""
    # NaN is in no range; a whole number of any length can be compared, but not turned into a float.
    if low <= value <= high and not (low_open and value == low):
        return
    bracket = "(" if low_open else "["
    raise InvalidArgumentError(name, f"must be in {bracket}{low}, {high}], not {value}")
