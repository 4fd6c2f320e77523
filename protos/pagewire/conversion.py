"""SamplingParams to and from its protobuf message. Pure vocabulary: no torch, no sockets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagewire.sampling_params import SamplingParams
from pagewire.v1 import sampling_pb2

_SCALARS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "min_tokens",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
)


def sampling_params_from_proto(
    message: sampling_pb2.SamplingParams, defaults: SamplingParams | None = None
) -> SamplingParams:
    """What the message sets, over `defaults` (the model's own).

    Raises:
        InvalidArgumentError: a field has a value that can't be served.
    """
    changes: dict[str, Any] = {
        name: getattr(message, name) for name in _SCALARS if message.HasField(name)
    }
    if message.logit_bias:
        changes["logit_bias"] = {entry.token_id: entry.bias for entry in message.logit_bias}
    if message.stop_token_ids:
        changes["stop_token_ids"] = tuple(message.stop_token_ids)
    return replace(defaults or SamplingParams(), **changes)


def sampling_params_to_proto(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """All of the token-level fields, so that the receiver's defaults play no part."""
    scalars = {name: getattr(params, name) for name in _SCALARS}
    return sampling_pb2.SamplingParams(
        **{name: value for name, value in scalars.items() if value is not None},
        logit_bias=[
            sampling_pb2.LogitBias(token_id=token_id, bias=bias)
            for token_id, bias in params.logit_bias.items()
        ],
        stop_token_ids=params.stop_token_ids,
    )
