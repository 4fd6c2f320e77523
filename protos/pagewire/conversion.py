"""Parameters, constraints, pooling and times to and from protobuf messages. Pure vocabulary: no
torch, no sockets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pagewire.beam_search_params import BeamSearchParams, EarlyStopping
from pagewire.errors import InvalidArgumentError
from pagewire.outputs import RequestTimes
from pagewire.pooling import PoolingInfo, PoolingParams, Task
from pagewire.sampling_params import SamplingParams
from pagewire.structured_output import MAX_CHOICES, StructuredOutput
from pagewire.v1 import pooling_pb2, sampling_pb2

if TYPE_CHECKING:
    from pagewire.v1 import inference_pb2, token_deltas_pb2

_SCALARS = (
    "n",
    "best_of",
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
    if message.HasField("structured_output"):
        changes["structured_output"] = structured_output_from_proto(message.structured_output)
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
        structured_output=structured_output_to_proto(params.structured_output),
    )


def structured_output_from_proto(message: sampling_pb2.StructuredOutput) -> StructuredOutput:
    """The constraint.

    Raises:
        InvalidArgumentError: none is set, or one that can't be served.
    """
    kind = message.WhichOneof("constraint")
    given: dict[str, Any] = {}
    if kind == "json_object":
        given = {kind: True}
    elif kind == "choice":
        # Converted one more than may be, so that too many are refused, and not all looked at.
        given = {kind: message.choice.texts[: MAX_CHOICES + 1]}
        if not message.choice.texts:
            raise InvalidArgumentError("structured_output.choice", "has no texts")
    elif kind is not None:
        given = {kind: getattr(message, kind)}
    for name in ("fit_max_tokens", "reasoning_start", "reasoning_end"):
        if message.HasField(name):
            given[name] = getattr(message, name)
    return StructuredOutput(**given, lenient=message.lenient)


def structured_output_to_proto(
    constraint: StructuredOutput | None,
) -> sampling_pb2.StructuredOutput | None:
    """The constraint's message; None for none."""
    if constraint is None:
        return None
    message = sampling_pb2.StructuredOutput(
        json_schema=constraint.json_schema,
        regex=constraint.regex,
        grammar=constraint.grammar,
        lenient=constraint.lenient,
        fit_max_tokens=constraint.fit_max_tokens,
        reasoning_start=constraint.reasoning_start,
        reasoning_end=constraint.reasoning_end,
    )
    if constraint.json_object:
        message.json_object.SetInParent()
    if constraint.choice:
        message.choice.texts.extend(constraint.choice)
    return message


_BEAM_SCALARS = ("n", "max_tokens", "ignore_eos", "temperature", "length_penalty", "logprobs")
_EARLY_STOPPING: dict[int, EarlyStopping] = {
    sampling_pb2.EARLY_STOPPING_UNSPECIFIED: False,
    sampling_pb2.EARLY_STOPPING_FALSE: False,
    sampling_pb2.EARLY_STOPPING_TRUE: True,
    sampling_pb2.EARLY_STOPPING_NEVER: "never",
}
_EARLY_STOPPING_NAMES = {
    False: sampling_pb2.EARLY_STOPPING_FALSE,
    True: sampling_pb2.EARLY_STOPPING_TRUE,
    "never": sampling_pb2.EARLY_STOPPING_NEVER,
}


def beam_search_from_proto(message: sampling_pb2.BeamSearchParams) -> SamplingParams:
    """A beam search as a request carries it. The model's own defaults, which are about sampling,
    play no part.

    Raises:
        InvalidArgumentError: a field has a value that can't be served.
    """
    if message.early_stopping not in _EARLY_STOPPING:
        raise InvalidArgumentError("early_stopping", f"{message.early_stopping} is not known here")
    given = {name: getattr(message, name) for name in _BEAM_SCALARS if message.HasField(name)}
    return BeamSearchParams(
        beam_width=message.beam_width,
        early_stopping=_EARLY_STOPPING[message.early_stopping],
        **given,
    ).as_sampling_params()


def beam_search_to_proto(params: SamplingParams) -> sampling_pb2.BeamSearchParams:
    """The token-level fields of a request's beam search."""
    beams = params.beam_search
    if beams is None:
        raise ValueError("these parameters sample")
    return sampling_pb2.BeamSearchParams(
        beam_width=beams.beam_width,
        n=params.n,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        temperature=params.temperature,
        length_penalty=beams.length_penalty,
        early_stopping=_EARLY_STOPPING_NAMES[beams.early_stopping],
        logprobs=params.logprobs,
    )


_TASKS = {
    pooling_pb2.TASK_GENERATE: Task.GENERATE,
    pooling_pb2.TASK_EMBED: Task.EMBED,
    pooling_pb2.TASK_CLASSIFY: Task.CLASSIFY,
    pooling_pb2.TASK_SCORE: Task.SCORE,
}
_TASK_NUMBERS = {task: number for number, task in _TASKS.items()}


def tasks_to_proto(tasks: Iterable[Task]) -> list[pooling_pb2.Task]:
    """What can be asked of a model."""
    return [_TASK_NUMBERS[task] for task in tasks]


def tasks_from_proto(tasks: Iterable[pooling_pb2.Task]) -> tuple[Task, ...]:
    """The same; what this version does not know is left out. None: an engine that generates."""
    return tuple(_TASKS[task] for task in tasks if task in _TASKS) or (Task.GENERATE,)


def pooling_params_from_proto(message: pooling_pb2.PoolingParams) -> PoolingParams:
    """What is asked of a prompt that is pooled.

    Raises:
        InvalidArgumentError: a field has a value that can't be served.
    """
    if message.task not in (pooling_pb2.TASK_EMBED, pooling_pb2.TASK_CLASSIFY):
        raise InvalidArgumentError("task", "must be EMBED or CLASSIFY")
    return PoolingParams(
        task=_TASKS[message.task],
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        use_activation=message.use_activation if message.HasField("use_activation") else None,
        second_text_start=message.second_text_start,
    )


def pooling_params_to_proto(params: PoolingParams) -> pooling_pb2.PoolingParams:
    """Its message."""
    return pooling_pb2.PoolingParams(
        task=_TASK_NUMBERS[params.task],
        dimensions=params.dimensions,
        use_activation=params.use_activation,
        second_text_start=params.second_text_start,
    )


def pooling_info_from_proto(message: pooling_pb2.PoolingInfo) -> PoolingInfo:
    """What a model makes of a prompt."""
    return PoolingInfo(
        size=message.size,
        dimensions=tuple(message.dimensions),
        any_dimensions=message.any_dimensions,
        labels=tuple(message.labels),
    )


def pooling_info_to_proto(info: PoolingInfo) -> pooling_pb2.PoolingInfo:
    """Its message."""
    return pooling_pb2.PoolingInfo(
        size=info.size,
        dimensions=info.dimensions,
        any_dimensions=info.any_dimensions,
        labels=info.labels,
    )


def fill_times(
    message: token_deltas_pb2.RequestTimes | inference_pb2.Usage, times: RequestTimes
) -> None:
    """Writes what the engine tells of a request's life; not how often it went on elsewhere."""
    message.queue_s = times.queue_s
    message.prefill_s = times.prefill_s
    message.decode_s = times.decode_s
    message.cached_tokens = times.cached_tokens
    message.preemptions = times.preemptions
    message.steps = times.steps
    message.step_time_s = times.step_s


def times_from_proto(
    message: token_deltas_pb2.RequestTimes | inference_pb2.Usage,
) -> RequestTimes:
    """What `fill_times` has written."""
    return RequestTimes(
        queue_s=message.queue_s,
        prefill_s=message.prefill_s,
        decode_s=message.decode_s,
        cached_tokens=message.cached_tokens,
        preemptions=message.preemptions,
        steps=message.steps,
        step_s=message.step_time_s,
    )
