"""Plans and results as JSON: what crosses to a worker is data, never a pickled object."""

from __future__ import annotations

import math
from typing import Any

import orjson

from pagewire.beam_search_params import BeamSettings
from pagewire.outputs import PositionLogprobs, TokenLogprob
from pagewire.pooling import PoolingParams
from pagewire.sampling_params import SamplingParams
from pagewire.structured_output import StructuredOutput
from pagewire_engine.adapters.description import AdapterDescription, AdapterMemory
from pagewire_engine.step import (
    Candidates,
    NewSequence,
    PooledVector,
    PromptLogprobsChunk,
    SampledToken,
    ScheduledSequence,
    StepPlan,
    StepResult,
    WorkerInfo,
)


def encode(
    value: StepPlan | StepResult | WorkerInfo | AdapterDescription | AdapterMemory | dict[str, Any],
) -> bytes:
    """Any of the boundary's dataclasses. NaN becomes null, which `decode_result` knows."""
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


def decode_plan(data: bytes) -> StepPlan:
    """The inverse of `encode` for a StepPlan."""
    fields = orjson.loads(data)
    return StepPlan(
        step=fields["step"],
        new_sequences=[_new_sequence(entry) for entry in fields["new_sequences"]],
        scheduled=[
            ScheduledSequence(**entry | {"sample_for": tuple(entry["sample_for"])})
            for entry in fields["scheduled"]
        ],
        forgotten=fields["forgotten"],
        swap_out=_pairs(fields["swap_out"]),
        swap_in=_pairs(fields["swap_in"]),
        block_copies=_pairs(fields["block_copies"]),
        appended=_pairs(fields["appended"]),
    )


def decode_result(data: bytes) -> StepResult:
    """The inverse of `encode` for a StepResult."""
    fields = orjson.loads(data)
    return StepResult(
        step=fields["step"],
        sampled=[_sampled_token(entry) for entry in fields["sampled"]],
        prompt_logprobs=[
            PromptLogprobsChunk(
                entry["sequence_id"],
                entry["start"],
                [_position(position) for position in entry["positions"]],
            )
            for entry in fields["prompt_logprobs"]
        ],
        failed=_reasons(fields["failed"]),
        candidates=[
            Candidates(
                entry["sequence_id"], entry["token_ids"], [_score(v) for v in entry["logprobs"]]
            )
            for entry in fields["candidates"]
        ],
        refused=_reasons(fields["refused"]),
        vectors=[PooledVector(**entry) for entry in fields["vectors"]],
    )


def decode_info(data: bytes) -> WorkerInfo:
    """The inverse of `encode` for a WorkerInfo."""
    return WorkerInfo(**orjson.loads(data))


def decode_description(data: bytes) -> AdapterDescription:
    """The inverse of `encode` for an AdapterDescription."""
    return AdapterDescription(**orjson.loads(data))


def decode_memory(data: bytes) -> AdapterMemory:
    """The inverse of `encode` for an AdapterMemory."""
    fields = orjson.loads(data)
    device = {int(number): size for number, size in fields["device"].items()}
    return AdapterMemory(**fields | {"device": device})


def _pairs(entries: list[list[int]]) -> list[tuple[int, int]]:
    return [(source, destination) for source, destination in entries]


def _reasons(entries: list[list[Any]]) -> list[tuple[int, str]]:
    return [(sequence_id, why) for sequence_id, why in entries]


def _new_sequence(entry: dict[str, Any]) -> NewSequence:
    params = entry["sampling_params"]
    params["logit_bias"] = {int(key): bias for key, bias in params["logit_bias"].items()}
    if params["beam_search"] is not None:
        params["beam_search"] = BeamSettings(**params["beam_search"])
    if params["structured_output"] is not None:
        params["structured_output"] = StructuredOutput(**params["structured_output"])
    pooling = entry["pooling"]
    return NewSequence(
        **entry
        | {
            "sampling_params": SamplingParams(**params),
            "pooling": None if pooling is None else PoolingParams(**pooling),
        }
    )


def _sampled_token(entry: dict[str, Any]) -> SampledToken:
    return SampledToken(
        sequence_id=entry["sequence_id"],
        token_id=entry["token_id"],
        logprob=_number(entry["logprob"]),
        logprobs=_position(entry["logprobs"]) if entry["logprobs"] is not None else None,
    )


def _position(entry: dict[str, Any]) -> PositionLogprobs:
    return PositionLogprobs(_token(entry["token"]), [_token(token) for token in entry["top"]])


def _token(entry: dict[str, Any]) -> TokenLogprob:
    return TokenLogprob(entry["token_id"], _number(entry["logprob"]), entry["rank"])


def _score(value: float | None) -> float:
    """A candidate's log probability, which is never NaN: null is minus infinity."""
    return -math.inf if value is None else value


def _number(value: float | None) -> float:
    return math.nan if value is None else value
