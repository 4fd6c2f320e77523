"""The items of a kept conversation, page by page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.errors import InvalidArgumentError

# OpenAI's.
MOST_ITEMS = 100
DEFAULT_ITEMS = 20
ORDERS = ("desc", "asc")


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """One page, as OpenAI's clients turn them.

    Args:
        items: all of them, the oldest first.
        query: `limit`, `order` and `after`, the id of the item before the page's first.

    Raises:
        InvalidArgumentError: one of these can't be served.
    """
    limit = _limit(query.get("limit", str(DEFAULT_ITEMS)))
    order = query.get("order", ORDERS[0])
    if order not in ORDERS:
        raise InvalidArgumentError("order", f"must be asc or desc, not {order!r:.80}")
    named = _with_ids(items)
    if order == "desc":
        named.reverse()
    begin = _index_after(query["after"], named) if "after" in query else 0
    page = named[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "has_more": begin + limit < len(named),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _limit(given: str) -> int:
    # Only digits: Python's int takes more.
    limit = int(given) if given.isascii() and given.isdecimal() and len(given) < 10 else 0
    if not 1 <= limit <= MOST_ITEMS:
        raise InvalidArgumentError("limit", f"must be 1 to {MOST_ITEMS}, not {given!r:.80}")
    return limit


def _index_after(item_id: str, items: Sequence[Mapping[str, Any]]) -> int:
    for index, item in enumerate(items):
        if item["id"] == item_id:
            return index + 1
    raise InvalidArgumentError("after", f"there is no item {item_id!r:.80} in this response")


def _with_ids(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items, each with an id of its own. Clients may leave ids out or say one twice, and who
    asked for what comes after such a one would never come to the end."""
    named: list[dict[str, Any]] = []
    taken: set[str] = set()
    for number, item in enumerate(items):
        item_id = item.get("id")
        if not isinstance(item_id, str) or not item_id or item_id in taken:
            item_id = f"msg_{number}"
            while item_id in taken:
                item_id += "_"
        taken.add(item_id)
        named.append({**item, "id": item_id})
    return named
