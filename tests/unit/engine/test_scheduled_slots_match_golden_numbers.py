"""The seeds' golden numbers: four prompts in a pool of 6177 blocks of 16 tokens."""

from __future__ import annotations

from itertools import accumulate

from pagewire_engine.step import StepPlan
from tests.unit.engine.harness import Harness, settings, submission

BLOCK_SIZE = 16
PROMPT_LENGTHS = [6, 8, 6, 6]


def slots(plan: StepPlan, tables: dict[int, list[int]]) -> list[list[int]]:
    """The slot of each token a plan computes, from the plan alone."""
    result = []
    for entry in plan.scheduled:
        table = tables.setdefault(entry.sequence_id, [])
        table[entry.table_start :] = entry.block_ids
        positions = range(entry.start, entry.start + entry.num_tokens)
        result.append([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions])
    return result


def test_first_prefill_and_first_decode() -> None:
    harness = Harness(settings(num_blocks=6177, block_size=BLOCK_SIZE))
    for number, length in enumerate(PROMPT_LENGTHS):
        harness.add(submission(str(number), range(10, 10 + length)))
    harness.step()
    harness.step()
    prefill, decode = harness.plans
    tables: dict[int, list[int]] = {}

    prefill_slots = slots(prefill, tables)
    lengths = [entry.num_tokens for entry in prefill.scheduled]
    assert list(accumulate(lengths, initial=0)) == [0, 6, 14, 20, 26]
    assert [entry.block_ids for entry in prefill.scheduled] == [[6176], [6175], [6174], [6173]]
    assert prefill_slots == [
        list(range(98816, 98822)),
        list(range(98800, 98808)),
        list(range(98784, 98790)),
        list(range(98768, 98774)),
    ]

    assert slots(decode, tables) == [[98822], [98808], [98790], [98774]]
    assert [entry.start + entry.num_tokens for entry in decode.scheduled] == [7, 9, 7, 7]
    assert [entry.block_ids for entry in decode.scheduled] == [[], [], [], []]
