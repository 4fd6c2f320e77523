"""What the bodies of all generating requests share, with pagewire's extensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from pagewire.beam_search_params import BeamSearchParams, BeamSettings
from pagewire.errors import InvalidArgumentError
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.openai_api.field_types import Integers, Numbers, Texts
from pagewire_frontend.openai_api.structured_output import (
    GUIDED,
    Constraint,
    requested_constraint,
)


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class SamplingBody(BaseModel):
    """What both generating endpoints share."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Numbers | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    user: str | None = None
    # pagewire's extensions, named as in vLLM.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: Integers | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    structured_outputs: dict[str, Any] | None = None
    fit_max_tokens: bool | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    _constraint: Constraint = PrivateAttr(default_factory=Constraint)

    def model_post_init(self, context: Any) -> None:
        # Here, where a long body has a thread to itself.
        guided = {name: getattr(self, name) for name in GUIDED}
        self._constraint = requested_constraint(
            self.response_format, self.structured_outputs, guided
        )

    def sampling_params(self, defaults: SamplingParams, **changes: Any) -> SamplingParams:
        """What is set here, over the model's defaults, `changes` over both.

        Raises:
            InvalidArgumentError: a value that can't be served.
        """
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        changes |= {name: value for name, value in given.items() if value is not None}
        if self.prompt_logprobs is not None:
            changes.setdefault("prompt_logprobs", self.prompt_logprobs)
        if self.logit_bias is not None:
            changes["logit_bias"] = _logit_bias(self.logit_bias)
        if self._constraint.value is not None:
            changes["structured_output"] = self._constraint.value
        if self.fit_max_tokens is not None:
            changes |= self._fitting(self.fit_max_tokens)
        if self.use_beam_search:
            return self._beam_search(changes)
        for name in ("length_penalty", "early_stopping"):
            if getattr(self, name) not in (None, getattr(BeamSettings(beam_width=1), name)):
                raise InvalidArgumentError(name, "needs use_beam_search=true")
        return replace(defaults, **changes)

    def _fitting(self, fit_max_tokens: bool) -> dict[str, Any]:
        """The changes that `fit_max_tokens` asks for."""
        if self._constraint.value is None:
            raise InvalidArgumentError(
                "fit_max_tokens", "needs a constraint, such as response_format"
            )
        return {"structured_output": replace(self._constraint.value, fit_max_tokens=fit_max_tokens)}

    def _beam_search(self, given: dict[str, Any]) -> SamplingParams:
        """A beam search of the width best_of, or else n. The model's defaults are about sampling
        and play no part; nor does a seed."""
        given.pop("seed", None)
        n = given.pop("n", 1)
        length_penalty = 1.0 if self.length_penalty is None else self.length_penalty
        early_stopping: Any = self.early_stopping  # which strings it may be is checked there
        search = BeamSearchParams(
            n=n,
            beam_width=given.pop("best_of", n),
            temperature=given.pop("temperature", 0.0),
            length_penalty=length_penalty,
            early_stopping=False if self.early_stopping is None else early_stopping,
        )
        return replace(search.as_sampling_params(), **given)

    @property
    def field_names(self) -> dict[str, str]:
        """What the client called fields that errors name otherwise."""
        names = dict(self._constraint.field_names)
        if self.use_beam_search:
            width = "n" if self.best_of is None else "best_of"
            names |= {"beam_width": width}
        return names

    @property
    def streams(self) -> bool:
        """Raises InvalidArgumentError for stream_options without a stream, and for best_of or
        prompt_logprobs with one."""
        if self.stream_options is not None and not self.stream:
            raise InvalidArgumentError("stream_options", "is only allowed with stream=true")
        if self.stream and not self.use_beam_search and self.best_of not in (None, self.n or 1):
            raise InvalidArgumentError(
                "best_of",
                "can't be streamed: the best are known at the end. Leave out stream, or best_of",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidArgumentError(
                "prompt_logprobs", "can't be streamed over HTTP: leave out stream, or use gRPC"
            )
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


_SAMPLING_FIELDS = (
    "n",
    "best_of",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "max_tokens",
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    converted = {}
    for key, bias in given.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise InvalidArgumentError("logit_bias", "its keys must be token ids")
        converted[int(key)] = bias
    return converted
