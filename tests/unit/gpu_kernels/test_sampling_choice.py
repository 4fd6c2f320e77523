"""Sampling by the GPU's kernels: the reference's tokens, whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire_kernels.gpu.sampling import (
    PADDING,
    Epilogue,
    SamplingColumns,
    SamplingConfig,
    SamplingWorkspace,
    TritonChooser,
    sample,
)
from pagewire_kernels.gpu.sampling_noise import exponential, words_of_quads, words_of_tokens
from pagewire_kernels.philox import token_words
from pagewire_kernels.sampling import NOT_A_NUMBER, NOTHING_ALLOWED, RowParameters, TorchChooser

# Small, so that small vocabularies have several chunks and tiles.
SMALL = SamplingConfig(chunk=256, chunk_warps=1, tile=128, tile_warps=1)
UNTOUCHED = 12345
# Noise in float32 may decide a near tie otherwise than the reference's: always the same examples.
# A row takes 0.1 s of the interpreter, so that shrinking would take minutes.
_EXAMPLES = settings(
    max_examples=12, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)


def make_columns(vocab_size: int, num_slots: int, **values: Any) -> SamplingColumns:
    """Columns of constants, or of lists with an entry a slot."""
    kinds = {
        "temperature": (torch.float32, 1.0),
        "min_p": (torch.float32, 0.0),
        "top_k": (torch.int32, vocab_size),
        "top_p": (torch.float64, 1.0),
        "seed": (torch.int64, 0),
        "sequence_index": (torch.int32, 0),
        "position": (torch.int32, 0),
    }
    columns = {}
    for name, (dtype, default) in kinds.items():
        value = values.get(name, default)
        entries = value if isinstance(value, list) else [value] * num_slots
        columns[name] = torch.tensor(entries, dtype=dtype)
    return SamplingColumns(**columns)


def choose(
    logits: Tensor,
    columns: SamplingColumns,
    slots: list[int] | None = None,
    config: SamplingConfig = SMALL,
    **options: Any,
) -> list[int]:
    """The rows' tokens; by default row r samples as slot r."""
    slots = list(range(logits.shape[0])) if slots is None else slots
    out = torch.full((len(slots),), UNTOUCHED, dtype=torch.int32)
    workspace = SamplingWorkspace(len(slots), logits.shape[1], "cpu", config)
    slot_column = torch.tensor(slots, dtype=torch.int32)
    sample(logits, slot_column, columns, out, workspace, **options)
    return out.tolist()


def expected(logits: Tensor, columns: SamplingColumns) -> list[int]:
    """The reference's tokens, row r as slot r."""
    parameters = RowParameters(
        temperatures=columns.temperature.tolist(),
        min_ps=columns.min_p.tolist(),
        top_ks=columns.top_k.tolist(),
        top_ps=columns.top_p.tolist(),
        seeds=columns.seed.tolist(),
        sequence_indexes=columns.sequence_index.tolist(),
        positions=columns.position.tolist(),
    )
    return TorchChooser().choose(logits, parameters).tolist()


def make_logits(seed: int, rows: int, vocab_size: int, *, ties: bool, removed: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator) * 4
    if ties:
        logits = logits.round()
    if removed:
        logits[torch.rand(logits.shape, generator=generator) < 0.5] = -torch.inf
        logits[:, vocab_size // 2] = 1.5
    return logits


@st.composite
def drawn_columns(draw: st.DrawFn, num_slots: int, vocab_size: int) -> SamplingColumns:
    def column(*values: float) -> list[Any]:
        return draw(st.lists(st.sampled_from(values), min_size=num_slots, max_size=num_slots))

    top_ks = (vocab_size, vocab_size, 1, 2, 17, 65, max(1, vocab_size - 1))
    return make_columns(
        vocab_size,
        num_slots,
        temperature=column(0.0, 1e-5, 0.3, 1.0, 1.7, 100.0),
        min_p=column(0.0, 0.0, 0.0, 0.003, 0.2, 1.0),
        top_k=column(*top_ks),
        top_p=column(1.0, 1.0, 1e-6, 0.3, 0.9, 0.999),
        seed=[draw(st.integers(-(2**63), 2**63 - 1)) for _ in range(num_slots)],
        sequence_index=[draw(st.integers(0, 127)) for _ in range(num_slots)],
        position=[draw(st.integers(0, 1_000_000)) for _ in range(num_slots)],
    )


@_EXAMPLES
@given(
    data=st.data(),
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([1, 5, 63, 64, 65, 255, 256, 257, 331, 512]),
    ties=st.booleans(),
    removed=st.booleans(),
)
def test_equals_the_reference_and_ignores_neighbours(
    data: st.DataObject, seed: int, vocab_size: int, ties: bool, removed: bool
) -> None:
    logits = make_logits(seed, 3, vocab_size, ties=ties, removed=removed)
    columns = data.draw(drawn_columns(3, vocab_size))
    together = choose(logits, columns)
    assert together == expected(logits, columns)
    row = data.draw(st.integers(0, 2))
    assert choose(logits[row : row + 1], columns, [row]) == [together[row]]


@pytest.mark.parametrize("vocab_size", [4095, 4097])
def test_equals_the_reference_as_the_work_is_cut_on_the_device(vocab_size: int) -> None:
    logits = make_logits(vocab_size, 7, vocab_size, ties=False, removed=False) / 4
    columns = make_columns(
        vocab_size,
        7,
        temperature=[0.0, 1.0, 0.8, 1.0, 1.0, 2.0, 1.0],
        top_k=[vocab_size, vocab_size, vocab_size, 50, 50, 1000, vocab_size],
        top_p=[1.0, 1.0, 0.95, 1.0, 0.9, 0.5, 1e-3],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.01],
        seed=list(range(7)),
    )
    assert choose(logits, columns, config=SamplingConfig()) == expected(logits, columns)


@pytest.mark.parametrize("filters", [{"top_k": 7}, {"top_p": 0.007}, {"top_k": 9, "top_p": 0.7}])
def test_a_cut_inside_a_tie_keeps_the_lowest_ids(filters: dict[str, Any]) -> None:
    columns = make_columns(1000, 3, seed=list(range(3)), **filters)
    chosen = choose(torch.zeros(3, 1000), columns, config=SamplingConfig())
    assert chosen == expected(torch.zeros(3, 1000), columns)
    assert max(chosen) < 7


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = make_logits(1, 4, 600, ties=False, removed=False) * 1e4
    columns = make_columns(
        600,
        4,
        temperature=[1e-5, 1e-30, 1e-38, 1e-45],
        top_p=[0.9, 1.0, 1.0, 0.5],
        top_k=[600, 20, 600, 600],
        min_p=[0.0, 0.0, 0.1, 0.0],
    )
    assert choose(logits, columns) == logits.argmax(-1).tolist()


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(3, 1000)
    logits[1, 700] = logits[1, 300] = 2.0
    logits[2, 999] = 1.0
    assert choose(logits, make_columns(1000, 3, temperature=0.0)) == [0, 300, 999]


@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {"top_p": 0.9}])
def test_faulty_rows_are_named_and_padding_is_left_alone(filters: dict[str, Any]) -> None:
    logits = make_logits(2, 6, 300, ties=False, removed=False)
    logits[1, 299] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    logits[5] = torch.nan
    columns = make_columns(300, 6, **filters)
    good = expected(logits[[0, 4]], make_columns(300, 2, **filters))
    tokens = choose(logits, columns, [0, 1, 2, 3, 4, PADDING])
    bad = [NOT_A_NUMBER, NOT_A_NUMBER, NOTHING_ALLOWED]
    assert tokens == [good[0], *bad, good[1], UNTOUCHED]


def test_sequences_may_share_a_row_of_logits() -> None:
    logits = make_logits(3, 2, 300, ties=False, removed=False)
    columns = make_columns(300, 4, sequence_index=[0, 1, 2, 0], temperature=3.0)
    rows = torch.tensor([0, 0, 0, 1], dtype=torch.int32)
    tokens = choose(logits, columns, [0, 1, 2, 3], logit_rows=rows)
    assert tokens == expected(logits[rows.long()], columns)
    assert len(set(tokens[:3])) > 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_two_bytes_are_widened_and_rows_may_lie_apart(dtype: torch.dtype) -> None:
    logits = make_logits(4, 4, 331, ties=False, removed=False).to(dtype)
    apart = torch.zeros(4, 400, dtype=dtype)
    apart[:, :331] = logits
    columns = make_columns(331, 4, top_p=[1.0, 0.9, 0.5, 1.0], top_k=[331, 331, 331, 8], seed=9)
    assert choose(apart[:, :331], columns) == expected(logits.float(), columns)


def test_the_epilogue_moves_on_the_sequences_that_are_not_held() -> None:
    logits = make_logits(5, 4, 300, ties=False, removed=False)
    logits[2] = torch.nan
    columns = make_columns(300, 6, temperature=0.0, position=[7, 8, 9, 10, 11, 12])
    last_token = torch.full((6,), 77, dtype=torch.int32)
    last_position = torch.arange(100, 106, dtype=torch.int32)
    holds = torch.tensor([0, 1, 0, 0], dtype=torch.int32)
    tokens = choose(
        logits,
        columns,
        [4, 1, 3, PADDING],
        epilogue=Epilogue(last_token, last_position, holds),
    )
    assert tokens[1] == logits[1].argmax().item(), "held rows have their token told"
    assert last_token.tolist() == [77, 77, 77, 0, tokens[0], 77]
    assert last_position.tolist() == [100, 101, 102, 104, 105, 105]
    assert columns.position.tolist() == [7, 8, 9, 11, 12, 12]


def test_the_chooser_takes_parameters_from_the_host() -> None:
    logits = make_logits(6, 3, 500, ties=True, removed=True)
    parameters = RowParameters(
        temperatures=[5e-324, 1.0, 0.0],
        min_ps=[0.0, 0.05, 0.0],
        top_ks=[500, 40, 500],
        top_ps=[1.0, 0.9, 1.0],
        seeds=[1, -(2**63), 2**63 - 1],
        sequence_indexes=[0, 1, 2],
        positions=[5, 6, 7],
    )
    chooser = TritonChooser("cpu")
    chosen = chooser.choose(logits, parameters)
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == TorchChooser().choose(logits, parameters).tolist()
    again = chooser.choose(logits[:, :77], parameters)
    assert again.tolist() == TorchChooser().choose(logits[:, :77], parameters).tolist()


def test_what_the_kernels_do_not_read_is_refused() -> None:
    columns = make_columns(300, 2)
    with pytest.raises(ValueError, match="contiguous"):
        choose(torch.zeros(300, 2).T, columns)
    with pytest.raises(ValueError, match="3 rows, but logits of 2"):
        choose(torch.zeros(2, 300), columns, [0, 1, 0])
    with pytest.raises(ValueError, match="top_k must be"):
        make_columns(300, 2, top_k=1).__class__(
            **{**vars(columns), "top_k": torch.zeros(2, dtype=torch.int64)}
        )
    out, slots = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="2 rows, but the workspace is for 1"):
        sample(torch.zeros(2, 300), slots, columns, out, SamplingWorkspace(1, 300, "cpu"))
    with pytest.raises(ValueError, match="for 200 tokens, not 300"):
        sample(torch.zeros(2, 300), slots, columns, out, SamplingWorkspace(2, 200, "cpu"))
    with pytest.raises(ValueError, match="powers of two"):
        SamplingWorkspace(1, 300, "cpu", SamplingConfig(chunk=96))


@triton.jit
def _exponentials(words: tl.tensor, out: tl.tensor, SIZE: tl.constexpr) -> None:
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + place, exponential(tl.load(words + place)))


def test_exponential_times_are_exact_in_every_regime() -> None:
    """Against float64: near 0, near 1, at powers of two and where the series changes sides."""
    steps = torch.arange(4096)
    places = [0, 2**24 - 4096, int(2**24 * 0.5**0.5) - 2048]
    places += [2**power - 2048 for power in range(12, 24)]
    chosen = torch.cat([place + steps for place in places])
    words = (chosen << 8) + 255 * (chosen & 1)
    out = torch.empty(len(words))
    _exponentials[(len(places),)](words.to(torch.uint32), out, SIZE=4096)
    exact = -torch.log((chosen.double() + 0.5) * 2.0**-24)
    assert ((out.double() - exact).abs() / exact).max() < 3e-7


@triton.jit
def _words(
    out: tl.tensor,
    single: tl.tensor,
    seed: tl.tensor,
    index: tl.tensor,
    position: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    quads = tl.arange(0, SIZE // 4)
    place = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(
        out + place,
        words_of_quads(quads, tl.load(seed), tl.load(index), tl.load(position), SIZE // 4),
    )
    tokens = tl.arange(0, SIZE)
    words = words_of_tokens(tokens, tl.load(seed), tl.load(index), tl.load(position))
    tl.store(single + tokens, words)


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 2**63 - 1, 0x12345678_9ABCDEF0])
def test_random_words_have_the_bits_of_the_reference(seed: int) -> None:
    out, single = (torch.empty(1024, dtype=torch.uint32) for _ in range(2))
    key = torch.tensor([seed])
    index, position = (torch.tensor([n], dtype=torch.int32) for n in (127, 1_000_000))
    _words[(1,)](out, single, key, index, position, SIZE=1024)
    expected = token_words(key, index.long(), position.long(), torch.arange(1024))
    assert torch.equal(out.long(), expected)
    assert torch.equal(single.long(), expected)
