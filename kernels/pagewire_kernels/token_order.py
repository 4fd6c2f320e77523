"""The order of a row's tokens: by falling value, then by rising id.

It is total, so that cut-offs inside ties are the same everywhere.
"""

from __future__ import annotations

from torch import Tensor

NEGATIVE_INFINITY = float("-inf")


def largest(values: Tensor, count: int, *, unordered: float | None = None) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row in falling order, the lower id first among equals.

    Args:
        values: [R, V], no NaN.
        count: at least 1; cut to V.
        unordered: a value whose ties the caller does not care about, which saves sorting.

    Returns:
        Values [R, count] and int64 ids [R, count].
    """
    vocab_size = values.shape[-1]
    if count >= vocab_size:
        sorted_values, order = values.sort(dim=-1, descending=True, stable=True)
        return sorted_values, order
    # One more than asked for shows whether a tie crosses the cut; torch.topk then chose among
    # equals as it pleased, and only a stable sort of that row is exact.
    top, ids = values.topk(count + 1, dim=-1)
    ids, by_id = ids.sort(dim=-1)
    top, by_value = top.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, by_value)
    tied = top[:, count] == top[:, count - 1]
    if unordered is not None:
        tied &= top[:, count] != unordered
    crossing = tied.nonzero().flatten()
    if crossing.numel():
        exact, order = values[crossing].sort(dim=-1, descending=True, stable=True)
        top[crossing] = exact[:, : count + 1]
        ids[crossing] = order[:, : count + 1]
    return top[:, :count], ids[:, :count]
