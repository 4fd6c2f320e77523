"""What a plan becomes: flat tokens, slots and block tables."""

from __future__ import annotations

import torch

from pagewire.sampling_params import SamplingParams
from pagewire_engine.step import NewSequence, ScheduledSequence, StepPlan
from pagewire_engine.worker.input_batch import InputBatch

CPU = torch.device("cpu")


def _new(sequence_id: int, num_tokens: int, output: list[int] | None = None) -> NewSequence:
    prompt = [100 * sequence_id + position for position in range(num_tokens)]
    return NewSequence(sequence_id, 0, 0, prompt, output or [], SamplingParams())


def _part(
    sequence_id: int, start: int, count: int, blocks: list[int], table_start: int = 0
) -> ScheduledSequence:
    return ScheduledSequence(sequence_id, start, count, table_start, blocks, (sequence_id,))


def test_the_golden_batch_of_four_prompts() -> None:
    """Prompts of 6, 8, 6, 6 tokens in blocks 6176, 6175, 6174, 6173."""
    batch = InputBatch(16, CPU)
    lengths = (6, 8, 6, 6)
    prefill = [_part(i, 0, lengths[i], [6176 - i]) for i in range(4)]
    batch.apply(StepPlan(1, [_new(i, lengths[i]) for i in range(4)], prefill))
    inputs = batch.build(prefill)
    assert inputs.metadata.query_start_locations.tolist() == [0, 6, 14, 20, 26]
    assert inputs.metadata.slot_mapping.tolist() == [
        *range(98816, 98822),
        *range(98800, 98808),
        *range(98784, 98790),
        *range(98768, 98774),
    ]
    assert inputs.positions.tolist() == [*range(6), *range(8), *range(6), *range(6)]
    assert inputs.token_ids.tolist() == [100 * i + p for i in range(4) for p in range(lengths[i])]
    assert inputs.metadata.num_decodes == 0

    for i in range(4):
        batch[i].output_token_ids.append(7 + i)
    decode = [_part(i, lengths[i], 1, [], table_start=1) for i in range(4)]
    batch.apply(StepPlan(2, [], decode))
    inputs = batch.build(decode)
    assert inputs.metadata.slot_mapping.tolist() == [98822, 98808, 98790, 98774]
    assert inputs.metadata.context_lengths.tolist() == [7, 9, 7, 7]
    assert inputs.metadata.block_tables.tolist() == [[6176], [6175], [6174], [6173]]
    assert inputs.metadata.query_start_locations.tolist() == [0, 1, 2, 3, 4]
    assert inputs.metadata.num_decodes == 4
    assert inputs.token_ids.tolist() == [7, 8, 9, 10]
    assert inputs.positions.tolist() == [6, 8, 6, 6]


def test_decodes_and_a_chunk_that_crosses_blocks() -> None:
    batch = InputBatch(4, CPU)
    parts = [_part(1, 5, 1, [9, 8]), _part(2, 3, 6, [3, 5, 7])]
    batch.apply(StepPlan(1, [_new(1, 5, output=[77]), _new(2, 12)], parts))
    inputs = batch.build(parts)
    assert inputs.metadata.num_decodes == 1
    assert inputs.token_ids.tolist() == [77, 203, 204, 205, 206, 207, 208]
    assert inputs.positions.tolist() == [5, 3, 4, 5, 6, 7, 8]
    assert inputs.metadata.slot_mapping.tolist() == [33, 15, 20, 21, 22, 23, 28]
    assert inputs.metadata.block_tables.tolist() == [[9, 8, 0], [3, 5, 7]]
    assert inputs.metadata.context_lengths.tolist() == [6, 9]


def test_recomputed_chunk_spans_prompt_and_output() -> None:
    batch = InputBatch(4, CPU)
    part = _part(1, 1, 4, [2, 6])
    batch.apply(StepPlan(1, [_new(1, 3, output=[50, 51, 52])], [part]))
    assert batch.build([part]).token_ids.tolist() == [101, 102, 50, 51]


def test_table_is_overwritten_from_table_start_and_cut_there() -> None:
    batch = InputBatch(4, CPU)
    first = _part(1, 0, 12, [1, 2, 3])
    batch.apply(StepPlan(1, [_new(1, 12)], [first]))
    # Copy-on-write of block 2, which also gives up the third.
    second = _part(1, 4, 4, [8], table_start=1)
    batch.apply(StepPlan(2, [], [second]))
    assert batch.build([second]).metadata.block_tables.tolist() == [[1, 8]]
    third = _part(1, 8, 1, [9], table_start=2)
    batch.apply(StepPlan(3, [], [third]))
    assert batch.build([third]).metadata.block_tables.tolist() == [[1, 8, 9]]


def test_forgotten_sequence_leaves_nothing_to_the_next_one() -> None:
    batch = InputBatch(4, CPU)
    long = _part(1, 0, 12, [1, 2, 3])
    batch.apply(StepPlan(1, [_new(1, 12)], [long]))
    short, other = _part(2, 0, 2, [5]), _part(3, 0, 9, [6, 7, 8])
    batch.apply(StepPlan(2, [_new(2, 2), _new(3, 9)], [short, other], forgotten=[1]))
    assert batch.build([short, other]).metadata.block_tables.tolist() == [[5, 0, 0], [6, 7, 8]]
    batch.apply(StepPlan(3, forgotten=[1, 2, 3, 99]))
    assert len(batch) == 0


def test_applying_a_plan_again_changes_nothing() -> None:
    batch = InputBatch(4, CPU)
    part = _part(1, 0, 6, [4, 5])
    plan = StepPlan(1, [_new(1, 6)], [part])
    batch.apply(plan)
    first = batch.build([part])
    batch.apply(plan)
    again = batch.build([part])
    assert len(batch) == 1
    assert again.metadata.slot_mapping.tolist() == first.metadata.slot_mapping.tolist()
    assert again.token_ids.tolist() == first.token_ids.tolist()


def test_more_and_longer_sequences_than_the_first_arrays_hold() -> None:
    batch = InputBatch(1, CPU)
    parts = [_part(i, 0, 100 + i, list(range(i, 100 + 2 * i))) for i in range(150)]
    batch.apply(StepPlan(1, [_new(i, 100 + i) for i in range(150)], parts))
    metadata = batch.build(parts).metadata
    for i, part in enumerate(parts):
        assert metadata.block_tables[i, : len(part.block_ids)].tolist() == part.block_ids
        assert not metadata.block_tables[i, len(part.block_ids) :].any()
