"""Both backends of token choice against the naive one, and what must hold at the edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire_kernels.sampling import RowParameters, TokenChooser
from pagewire_kernels.token_order import largest
from tests.unit.sampling import naive

_QUIET = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@st.composite
def rows_of_parameters(draw: st.DrawFn, num_rows: int, vocab_size: int) -> RowParameters:
    def column(strategy: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(strategy, min_size=num_rows, max_size=num_rows))

    return RowParameters(
        temperatures=column(st.sampled_from([0.0, 1e-5, 0.3, 1.0, 1.7, 100.0])),
        min_ps=column(st.sampled_from([0.0, 0.0, 0.003, 0.2, 1.0])),
        top_ks=column(st.sampled_from([vocab_size, 1, 2, 17, 64, 65, vocab_size - 1])),
        top_ps=column(st.sampled_from([1.0, 1e-6, 0.3, 0.9, 0.999])),
        seeds=column(st.integers(-(2**63), 2**63 - 1)),
        sequence_indexes=column(st.integers(0, 127)),
        positions=column(st.integers(0, 1_000_000)),
    )


def parameters(num_rows: int, vocab_size: int, **values: object) -> RowParameters:
    columns: dict[str, object] = {
        "temperatures": 1.0,
        "min_ps": 0.0,
        "top_ks": vocab_size,
        "top_ps": 1.0,
        "seeds": 0,
        "sequence_indexes": 0,
        "positions": 0,
    }
    columns.update(values)
    return RowParameters(
        **{  # type: ignore[arg-type]  # a table of columns, filled with constants
            name: value if isinstance(value, list) else [value] * num_rows
            for name, value in columns.items()
        }
    )


def make_logits(
    seed: int, num_rows: int, vocab_size: int, *, ties: bool, removed: bool
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 4
    if ties:
        logits = logits.round()
    if removed:
        logits[torch.rand(logits.shape, generator=generator) < 0.5] = -torch.inf
        logits[:, 5] = 1.5
    return logits


def take(parameters: RowParameters, row: int) -> RowParameters:
    return RowParameters(
        **{name: [getattr(parameters, name)[row]] for name in RowParameters.__dataclass_fields__}
    )


@_QUIET
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), ties=st.booleans(), removed=st.booleans())
def test_equals_the_naive_reference_and_ignores_neighbours(
    chooser: TokenChooser, data: st.DataObject, seed: int, ties: bool, removed: bool
) -> None:
    num_rows, vocab_size = 5, 331
    logits = make_logits(seed, num_rows, vocab_size, ties=ties, removed=removed)
    batch = data.draw(rows_of_parameters(num_rows, vocab_size))
    chosen = chooser.choose(logits, batch).tolist()
    for row in range(num_rows):
        alone = take(batch, row)
        assert chooser.choose(logits[row : row + 1], alone).tolist() == [chosen[row]]
        expected = naive.choose(
            logits[row].tolist(),
            *(getattr(alone, name)[0] for name in RowParameters.__dataclass_fields__),
        )
        assert chosen[row] == expected, alone


def test_backends_agree_on_a_real_vocabulary(chooser: TokenChooser) -> None:
    """Candidates beyond the first widths, and noise for all, on 49,152 tokens."""
    vocab_size = 49_152
    logits = make_logits(3, 6, vocab_size, ties=True, removed=False)
    batch = parameters(
        6,
        vocab_size,
        top_ks=[vocab_size, 50, 3000, vocab_size, vocab_size, vocab_size],
        top_ps=[1.0, 0.9, 1.0, 0.9, 0.99, 1.0],
        min_ps=[0.0, 0.0, 0.0, 0.0, 0.0, 0.05],
        seeds=[11, 12, 13, 14, 15, 16],
    )
    chosen = chooser.choose(logits, batch).tolist()
    for row in (0, 1, 2, 3, 5):
        expected = naive.choose(
            logits[row].tolist(),
            *(getattr(take(batch, row), name)[0] for name in RowParameters.__dataclass_fields__),
        )
        assert chosen[row] == expected
    reordered = torch.tensor([4, 0, 5, 3, 1, 2])
    shuffled = RowParameters(
        **{
            name: [getattr(batch, name)[row] for row in reordered.tolist()]
            for name in RowParameters.__dataclass_fields__
        }
    )
    assert chooser.choose(logits[reordered], shuffled).tolist() == [
        chosen[row] for row in reordered.tolist()
    ]


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_ks": 5}, {"top_ps": 0.8}, {"min_ps": 0.1}, {"temperatures": 0.5, "top_ps": 0.95}],
)
@pytest.mark.parametrize("varied", ["seeds", "positions", "sequence_indexes"])
def test_frequencies_follow_the_probabilities(
    chooser: TokenChooser, filters: dict[str, object], varied: str
) -> None:
    """Chi-square at the 0.1% level, over seeds, over positions and over sequences."""
    num_rows = 20_000
    logits = torch.tensor([[1.0, 0.5, 0.0, -0.3, -1.0, -1.5, 2.0, 0.9, -2.2, 0.1]])
    vocab_size = logits.shape[1]
    batch = parameters(num_rows, vocab_size, **{**filters, varied: list(range(num_rows))})
    chosen = chooser.choose(logits.expand(num_rows, -1).contiguous(), batch)
    counts = torch.bincount(chosen, minlength=vocab_size).tolist()
    left = naive.candidates(
        logits[0].tolist(),
        batch.temperatures[0],
        batch.min_ps[0],
        batch.top_ks[0],
        batch.top_ps[0],
    )
    weights = torch.tensor([score for _, score in left]).double().softmax(0).tolist()
    expected = {token_id: p * num_rows for (token_id, _), p in zip(left, weights, strict=True)}
    assert sum(counts[token_id] for token_id in expected) == num_rows
    chi_square = sum((counts[i] - mean) ** 2 / mean for i, mean in expected.items())
    # 99.9% points for 1 to 9 degrees of freedom.
    limits = [10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12, 27.88]
    assert chi_square < limits[len(expected) - 2]


def test_greedy_takes_the_lowest_id_among_equals(chooser: TokenChooser) -> None:
    logits = torch.zeros(3, 1000)
    logits[1, 700] = logits[1, 300] = 2.0
    logits[2, 999] = 1.0
    assert chooser.choose(logits, parameters(3, 1000, temperatures=0.0)).tolist() == [0, 300, 999]


def test_top_k_of_one_is_greedy_even_in_a_tie(chooser: TokenChooser) -> None:
    logits = torch.zeros(4, 1000)
    logits[:, 400:] = 3.0
    chosen = chooser.choose(logits, parameters(4, 1000, top_ks=1, seeds=[1, 2, 3, 4]))
    assert chosen.tolist() == [400] * 4


@pytest.mark.parametrize("filters", [{"top_ks": 7}, {"top_ps": 0.007}])
def test_a_cut_inside_a_tie_keeps_the_lowest_ids(
    chooser: TokenChooser, filters: dict[str, object]
) -> None:
    logits = torch.zeros(1, 1000).expand(3000, -1).contiguous()
    batch = parameters(3000, 1000, seeds=list(range(3000)), **filters)
    assert set(chooser.choose(logits, batch).tolist()) == set(range(7))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("temperature", [1e-5, 1e-38, 5e-324])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(
    chooser: TokenChooser, temperature: float, top_p: float
) -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1)) * 3e4
    batch = parameters(4, 5000, temperatures=temperature or 1e-5, top_ps=top_p, seeds=[1, 2, 3, 4])
    assert chooser.choose(logits, batch).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("count", [1, 3, 64, 330, 331, 500])
def test_largest_orders_by_value_then_id(count: int) -> None:
    values = make_logits(9, 4, 331, ties=True, removed=True)
    top, ids = largest(values, count)
    for row in range(4):
        order = sorted(range(331), key=lambda i: (-values[row, i].item(), i))[:count]
        assert ids[row].tolist() == order
        assert top[row].tolist() == [values[row, i].item() for i in order]
