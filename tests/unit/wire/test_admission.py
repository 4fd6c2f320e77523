"""What the engine refuses at its edge, by the name of the field."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.beam_search_params import BeamSearchParams
from pagewire.conversion import (
    pooling_info_from_proto,
    pooling_info_to_proto,
    pooling_params_from_proto,
    pooling_params_to_proto,
    tasks_from_proto,
    tasks_to_proto,
)
from pagewire.errors import FailedPreconditionError, InvalidArgumentError
from pagewire.outputs import FinishReason
from pagewire.pooling import PoolingInfo, PoolingParams, Task, check_task
from pagewire.sampling_params import SamplingParams
from pagewire_engine.admission import Admission, open_sequences
from pagewire_engine.submission import SequencePast


@pytest.mark.parametrize(
    ("field", "request_id", "prompt", "params", "past"),
    [
        ("request_id", "", [1], {}, []),
        ("request_id", "x" * 300, [1], {}, []),
        ("prompt_token_ids", "r", [], {}, []),
        ("prompt_token_ids", "r", [1, 100], {}, []),
        ("prompt_token_ids", "r", [1] * 50, {}, []),
        ("max_tokens", "r", [1] * 10, {"max_tokens": 41}, []),
        ("max_tokens", "r", [1], {"max_tokens": 0, "prompt_logprobs": 0}, []),
        ("min_tokens", "r", [1] * 10, {"min_tokens": 41}, []),
        ("stop_token_ids", "r", [1], {"stop_token_ids": (100,)}, []),
        ("logit_bias", "r", [1], {"logit_bias": {100: 1.0}}, []),
        ("past", "r", [1], {"n": 2}, [SequencePast(2, [1])]),
        ("past", "r", [1], {"n": 2}, [SequencePast(0, [1]), SequencePast(0, [1])]),
        ("past", "r", [1], {}, [SequencePast(0, [100])]),
        ("past", "r", [1], {"max_tokens": 2}, [SequencePast(0, [1, 2, 3])]),
        ("past", "r", [1], {}, [SequencePast(0, [1], FinishReason.STOP)]),
    ],
)
def test_a_bad_field_is_named(
    field: str, request_id: str, prompt: list[int], params: dict[str, Any], past: list[SequencePast]
) -> None:
    admission = Admission(vocab_size=100, max_model_len=50, seed=0)
    with pytest.raises(InvalidArgumentError) as caught:
        admission.admit(request_id, prompt, SamplingParams(**params), past=past)
    assert caught.value.field == field


BEAMS = BeamSearchParams(beam_width=10).as_sampling_params()


@pytest.mark.parametrize(
    ("field", "params", "past", "num_eos"),
    [
        ("best_of", SamplingParams(n=2, best_of=3), [], 1),
        # Ten beams and nine ends of sequence take 100 candidates, more do not fit.
        ("beam_width", BEAMS, [], 10),
        ("past", BEAMS, [SequencePast(0, [1])], 1),
        ("past", BEAMS, [SequencePast(0, [], FinishReason.LENGTH)], 1),
    ],
)
def test_what_the_engine_can_not_search_is_named(
    field: str, params: SamplingParams, past: list[SequencePast], num_eos: int
) -> None:
    admission = Admission(100, 50, 0, num_eos_token_ids=num_eos)
    with pytest.raises(InvalidArgumentError) as caught:
        admission.admit("r", [1], params, past=past)
    assert caught.value.field == field


def test_a_beam_search_that_starts_over_is_admitted() -> None:
    admission = Admission(100, 50, 0, num_eos_token_ids=9)
    past = [SequencePast(index, []) for index in range(10)]
    submission = admission.admit("r", [1], BEAMS, past=past, resubmission=True)
    assert open_sequences(submission) == dict.fromkeys(range(10), 0)


def test_a_request_without_a_seed_is_given_one_that_the_engines_seed_repeats() -> None:
    def seeds(engine_seed: int) -> list[int | None]:
        admission = Admission(100, 50, engine_seed)
        return [admission.admit("r", [1], SamplingParams()).sampling_params.seed for _ in range(3)]

    assert seeds(1) == seeds(1)
    assert seeds(1) != seeds(2)
    assert len(set(seeds(1))) == 3


def test_max_tokens_defaults_to_the_rest_of_the_context() -> None:
    submission = Admission(100, 50, 0).admit("r", [1] * 10, SamplingParams())
    assert submission.sampling_params.max_tokens == 40


def test_only_sequences_that_had_not_ended_go_on() -> None:
    submission = Admission(100, 50, 0).admit(
        "r",
        [1],
        SamplingParams(n=3),
        past=[SequencePast(0, [1, 2]), SequencePast(2, [1], FinishReason.STOP)],
    )
    assert open_sequences(submission) == {0: 2, 1: 0}


def test_a_past_whose_end_was_not_told_is_admitted() -> None:
    submission = Admission(100, 50, 0).admit(
        "r", [1], SamplingParams(max_tokens=2), past=[SequencePast(0, [1, 2])]
    )
    assert open_sequences(submission) == {0: 2}


EMBEDS = (Task.EMBED, Task.SCORE)


def pooling_admission(**info: Any) -> Admission:
    return Admission(100, 50, 0, tasks=EMBEDS, pooling=PoolingInfo(8, **info))


@pytest.mark.parametrize(
    ("field", "prompt", "params", "past"),
    [
        ("prompt_token_ids", [], {}, []),
        ("prompt_token_ids", [100], {}, []),
        ("prompt_token_ids", [1] * 51, {}, []),
        ("dimensions", [1], {"dimensions": 4}, []),
        ("dimensions", [1], {"dimensions": 9}, []),
        ("second_text_start", [1, 2], {"second_text_start": 2}, []),
        ("past", [1], {}, [SequencePast(0, [1])]),
    ],
)
def test_what_can_not_be_pooled_is_named(
    field: str, prompt: list[int], params: dict[str, Any], past: list[SequencePast]
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        pooling_admission().admit_pooling("r", prompt, PoolingParams(**params), past=past)
    assert caught.value.field == field


def test_a_pooled_prompt_may_fill_the_context_and_come_again() -> None:
    submission = pooling_admission().admit_pooling(
        "r", [1] * 50, PoolingParams(dimensions=8), past=[SequencePast(0, [])], resubmission=True
    )
    assert submission.resubmission
    assert open_sequences(submission) == {0: 0}


@pytest.mark.parametrize(
    ("info", "allowed", "refused"),
    [
        ({"dimensions": (2, 4)}, (2, 4, 8), (3, 9)),
        ({"any_dimensions": True}, (1, 7, 8), (9,)),
    ],
)
def test_embeddings_are_cut_where_the_model_was_trained_for_it(
    info: dict[str, Any], allowed: tuple[int, ...], refused: tuple[int, ...]
) -> None:
    admission = pooling_admission(**info)
    for dimensions in allowed:
        admission.admit_pooling("r", [1], PoolingParams(dimensions=dimensions))
    for dimensions in refused:
        with pytest.raises(InvalidArgumentError, match="may be cut to"):
            admission.admit_pooling("r", [1], PoolingParams(dimensions=dimensions))


@pytest.mark.parametrize(
    ("tasks", "task", "remedy"),
    [
        ((Task.GENERATE,), Task.EMBED, "--runner pooling"),
        ((Task.GENERATE,), Task.SCORE, "--runner pooling"),
        ((Task.GENERATE,), Task.CLASSIFY, "serve a sequence classifier"),
        (EMBEDS, Task.GENERATE, "serve a model that generates"),
        (EMBEDS, Task.CLASSIFY, "serve a sequence classifier"),
        ((Task.CLASSIFY,), Task.EMBED, "serve an embedding model"),
        ((Task.CLASSIFY,), Task.SCORE, "serve a cross-encoder"),
        ((Task.CLASSIFY, Task.SCORE), Task.GENERATE, "serve a model that generates"),
    ],
)
def test_a_model_that_can_not_do_a_task_says_what_would(
    tasks: tuple[Task, ...], task: Task, remedy: str
) -> None:
    with pytest.raises(FailedPreconditionError, match=remedy) as caught:
        check_task(task, tasks, "m")
    assert caught.value.field == "model"


def test_the_engine_refuses_what_its_model_can_not_do() -> None:
    with pytest.raises(FailedPreconditionError, match="generates no text"):
        pooling_admission().admit("r", [1], SamplingParams())
    with pytest.raises(FailedPreconditionError, match="--runner pooling"):
        Admission(100, 50, 0).admit_pooling("r", [1], PoolingParams())
    with pytest.raises(FailedPreconditionError, match="sequence classifier"):
        pooling_admission().admit_pooling("r", [1], PoolingParams(task=Task.CLASSIFY))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", "generate"),
        ("task", 3),
        ("dimensions", 0),
        ("dimensions", True),
        ("dimensions", 2.0),
        ("dimensions", 2**31),
        ("use_activation", 1),
        ("second_text_start", -1),
    ],
)
def test_pooling_parameters_are_checked(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        PoolingParams(**{field: value})
    assert caught.value.field == field


def test_pooling_crosses_the_wire_as_it_is() -> None:
    params = PoolingParams(
        task=Task.CLASSIFY, dimensions=3, use_activation=False, second_text_start=2
    )
    for each in (params, PoolingParams()):
        assert pooling_params_from_proto(pooling_params_to_proto(each)) == each
    info = PoolingInfo(3, (1, 2), True, ("a", "b", "c"))
    assert pooling_info_from_proto(pooling_info_to_proto(info)) == info
    assert tasks_from_proto(tasks_to_proto(Task)) == tuple(Task)
    assert tasks_from_proto([]) == (Task.GENERATE,)
