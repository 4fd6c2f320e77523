"""What the engine refuses at its edge, by the name of the field."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.beam_search_params import BeamSearchParams
from pagewire.errors import InvalidArgumentError
from pagewire.outputs import FinishReason
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
