"""One token budget a step, decodes first; who starts, who waits, who is refused."""

from __future__ import annotations

import pytest

from pagewire.errors import AlreadyExistsError, InvalidArgumentError
from pagewire.outputs import FinishReason
from pagewire_engine.submission import Submission
from tests.unit.engine.harness import Harness, alone, settings, submission


def scheduled(harness: Harness) -> list[int]:
    """Tokens of each entry of the last plan."""
    return [entry.num_tokens for entry in harness.plans[-1].scheduled]


def test_a_long_prompt_is_computed_in_chunks() -> None:
    harness = Harness(settings(max_num_batched_tokens=8))
    request = submission("long", range(10, 30), max_tokens=3)
    harness.add(request)
    harness.run()
    assert [[e.num_tokens for e in plan.scheduled] for plan in harness.plans] == [
        [8],
        [8],
        [4],
        [1],
        [1],
    ]
    assert [bool(plan.scheduled[0].sample_for) for plan in harness.plans[:3]] == [
        False,
        False,
        True,
    ]
    assert harness.engine.stats().num_prefill_chunks == 3
    assert harness.tokens("long") == alone(request)


def test_decodes_come_first_and_a_chunk_gets_what_they_leave() -> None:
    harness = Harness(settings(max_num_batched_tokens=8))
    harness.add(submission("a", range(3)), submission("b", range(3)))
    harness.step()
    harness.add(submission("long", range(20)))
    harness.step()
    assert scheduled(harness) == [1, 1, 6]
    stats = harness.engine.stats()
    assert (stats.step_decode_tokens, stats.step_prefill_tokens) == (2, 6)


def test_decodes_come_first_even_when_the_chunk_has_priority() -> None:
    harness = Harness(settings(max_num_batched_tokens=8))
    harness.add(submission("a", range(3), priority=1), submission("b", range(3), priority=1))
    harness.step()
    harness.add(submission("long", range(20), priority=0))
    harness.step()
    harness.step()
    assert scheduled(harness) == [1, 1, 6]
    harness.run()


def test_a_budget_below_the_number_of_decodes_still_serves_all() -> None:
    harness = Harness(settings(max_num_batched_tokens=2))
    requests = [submission(str(i), range(i, i + 5), max_tokens=4) for i in range(4)]
    harness.add(*requests)
    harness.run()
    assert all(sum(e.num_tokens for e in plan.scheduled) <= 2 for plan in harness.plans)
    assert [harness.tokens(r.request_id) for r in requests] == [alone(r) for r in requests]


def test_several_prompts_share_a_step() -> None:
    harness = Harness(settings(max_num_batched_tokens=12))
    harness.add(submission("a", range(5)), submission("b", range(5)), submission("c", range(5)))
    harness.step()
    assert scheduled(harness) == [5, 5, 2]


def test_max_num_seqs_counts_sequences_not_requests() -> None:
    harness = Harness(settings(max_num_seqs=4))
    harness.add(submission("a", range(5), n=3, max_tokens=3), submission("b", range(5), n=2))
    harness.step()
    assert harness.engine.stats().num_running == 1
    harness.step()
    harness.step()
    harness.step()
    assert set(harness.requests["a"].reasons) == {0, 1, 2}
    assert harness.engine.stats().num_running == 1
    harness.run()
    assert len(harness.tokens("b")) == 2


def test_ended_sequences_make_room_for_others() -> None:
    harness = Harness(settings(max_num_seqs=4))
    harness.add(submission("a", range(5), n=3), submission("b", range(5), n=2))
    harness.step()
    harness.engine.abort("a", 1)
    harness.step()
    assert harness.engine.stats().num_running == 2


def test_lower_priority_numbers_start_first() -> None:
    harness = Harness(settings(max_num_seqs=1))
    harness.add(
        submission("late", range(5), priority=2, max_tokens=1),
        submission("early", range(5), priority=1, max_tokens=1),
        submission("early too", range(5), priority=1, max_tokens=1),
    )
    order = [harness.step().sequences[0].request_id for _ in range(3)]
    assert order == ["early", "early too", "late"]


def test_admission_leaves_the_watermark_free() -> None:
    harness = Harness(settings(num_blocks=10, watermark=0.2))
    harness.add(submission("a", range(10)), submission("b", range(21)))
    harness.step()
    assert harness.engine.stats().num_running == 1  # 3 held, 6 wanted, 2 kept free
    harness.run()


def test_new_sequences_carry_the_prompt_by_reference() -> None:
    harness = Harness()
    request = submission("a", range(5))
    harness.add(request)
    harness.step()
    assert harness.plans[0].new_sequences[0].prompt_token_ids is request.prompt_token_ids


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (submission("x", range(128)), "prompt_token_ids"),  # max_model_len
        (submission("x", range(32), max_tokens=2), "prompt_token_ids"),  # the pool
        (submission("x", range(5), n=17), "n"),
        (submission("x", []), "prompt_token_ids"),
    ],
)
def test_what_can_never_run_fails_at_once(request_: Submission, field: str) -> None:
    harness = Harness(settings(num_blocks=8))
    harness.add(submission("neighbour", range(5)))
    harness.add(request_)
    assert "x" not in harness.engine
    harness.step()
    error = harness.requests["x"].error
    assert isinstance(error, InvalidArgumentError)
    assert error.field == field
    harness.run()
    assert harness.requests["neighbour"].reasons == {0: FinishReason.LENGTH}
    assert harness.engine.stats().num_requests_failed == 1


def test_a_prompt_one_short_of_the_context_gets_one_token() -> None:
    harness = Harness()
    harness.add(submission("x", range(127), max_tokens=None))
    harness.run()
    assert [len(tokens) for tokens in harness.tokens("x")] == [1]
    assert harness.requests["x"].reasons == {0: FinishReason.LENGTH}


def test_a_second_live_request_of_an_id_is_refused_and_harms_nobody() -> None:
    harness = Harness()
    request = submission("x", range(5))
    harness.add(request)
    with pytest.raises(AlreadyExistsError):
        harness.engine.add(submission("x", range(9)))
    harness.run()
    assert harness.tokens("x") == alone(request)
    harness.add(request)
    harness.run()
    assert harness.tokens("x") == alone(request)
