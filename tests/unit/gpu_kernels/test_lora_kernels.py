"""The Triton kernels of adapters say what the reference says, row by row."""

from __future__ import annotations

import pytest
import torch

from pagewire_kernels.gpu.lora import TritonLora
from pagewire_kernels.lora import LoraPair, LoraRows, LoraShape, TorchLora

CPU = torch.device("cpu")
SLOTS = [1, -1, 0, 1, 2, -1, 0, 0, 2, 1, -1, -1, 0, 1, 2, 2, 0, -1, 1]
SHAPE = LoraShape(72, (40, 24, 70))


def _pairs(shape: LoraShape, seed: int, dtype: torch.dtype) -> list[LoraPair | None]:
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * 0.3).to(dtype)

    pairs: list[LoraPair | None] = []
    for part, size in enumerate(shape.parts):
        rank = 1 + (3 * seed + 5 * part) % 17
        pairs.append(LoraPair(random(rank, shape.inputs), random(size, rank), 0.5 + part))
    if seed == 1 and len(pairs) > 1:
        pairs[1] = None
    return pairs


def _tables(shape: LoraShape, dtype: torch.dtype, embedding: bool = False) -> list[object]:
    tables = []
    for backend in (TorchLora(), TritonLora()):
        table = backend.table(shape, 3, 20, dtype, CPU, embedding=embedding)
        for slot in range(3):
            pairs = _pairs(shape, slot, dtype)
            table.put(slot, backend.pack(shape, pairs, dtype, embedding=embedding))
        tables.append(table)
    return tables


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 16, 19])
def test_each_row_gets_what_its_adapter_adds(num_rows: int, dtype: torch.dtype) -> None:
    reference, table = _tables(SHAPE, dtype)
    hidden = torch.randn(num_rows, SHAPE.inputs).to(dtype)
    before = torch.randn(num_rows, SHAPE.outputs).to(dtype)
    rows = LoraRows(torch.tensor(SLOTS[:num_rows], dtype=torch.int32))
    expected, got = before.clone(), before.clone()
    reference.add(hidden, expected, rows)  # type: ignore[attr-defined]
    table.add(hidden, got, rows)  # type: ignore[attr-defined]
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    untouched = torch.tensor(SLOTS[:num_rows]) < 0
    assert torch.equal(got[untouched], before[untouched])


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    _, table = _tables(SHAPE, torch.float32)
    hidden = torch.randn(len(SLOTS), SHAPE.inputs)
    together = torch.zeros(len(SLOTS), SHAPE.outputs)
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    table.add(hidden, together, LoraRows(slots))  # type: ignore[attr-defined]
    for row in (0, 4, 18):
        alone = torch.zeros(1, SHAPE.outputs)
        table.add(hidden[row : row + 1], alone, LoraRows(slots[row : row + 1]))  # type: ignore[attr-defined]
        assert torch.equal(alone[0], together[row])


def test_a_slot_that_is_emptied_adds_nothing_and_one_that_is_filled_anew_the_new() -> None:
    reference, table = _tables(SHAPE, torch.float32)
    hidden = torch.randn(3, SHAPE.inputs)
    rows = LoraRows(torch.tensor([0, 1, 1], dtype=torch.int32))
    table.put(0, None)  # type: ignore[attr-defined]
    for each in (reference, table):
        backend = TorchLora()
        each.put(1, backend.pack(SHAPE, _pairs(SHAPE, 4, torch.float32), torch.float32))  # type: ignore[attr-defined]
    reference.put(0, None)  # type: ignore[attr-defined]
    expected, got = torch.zeros(3, SHAPE.outputs), torch.zeros(3, SHAPE.outputs)
    reference.add(hidden, expected, rows)  # type: ignore[attr-defined]
    table.add(hidden, got, rows)  # type: ignore[attr-defined]
    assert not got[0].any()
    torch.testing.assert_close(got, expected)


def test_embeddings_add_what_their_ids_name() -> None:
    shape = LoraShape(30, (48,))
    reference, table = _tables(shape, torch.float32, embedding=True)
    ids = torch.randint(0, 30, (len(SLOTS),))
    rows = LoraRows(torch.tensor(SLOTS, dtype=torch.int32))
    expected, got = torch.zeros(len(SLOTS), 48), torch.zeros(len(SLOTS), 48)
    reference.add_embedded(ids, expected, rows)  # type: ignore[attr-defined]
    table.add_embedded(ids, got, rows)  # type: ignore[attr-defined]
    torch.testing.assert_close(got, expected)
