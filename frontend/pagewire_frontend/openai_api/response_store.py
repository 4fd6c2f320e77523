"""Answers of /v1/responses that clients may come back to, in memory and bounded."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import orjson

from pagewire.errors import InvalidArgumentError, NotFoundError


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer, and the whole conversation that it answered, as items."""

    response: dict[str, Any]
    input_items: list[dict[str, Any]]


class ResponseStore:
    """Keeps answers by tenant and id; the oldest are forgotten when there is no room.

    Args:
        max_bytes: of all of them as JSON; 0: none are kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    @property
    def enabled(self) -> bool:
        """Whether anything is kept."""
        return self._max_bytes > 0

    def wanted(self, store: bool | None) -> bool:
        """Whether an answer is kept, by its request's `store`.

        Raises:
            InvalidArgumentError: it asks for what is off.
        """
        if store and not self.enabled:
            raise InvalidArgumentError(
                "store",
                "this server keeps no responses: leave it out, or start the frontend with "
                "--response-store",
            )
        return self.enabled and store is not False

    def add(self, tenant: str, stored: StoredResponse) -> bool:
        """Keeps an answer, unless it alone is larger than all the room: then returns False."""
        data = orjson.dumps([stored.response, stored.input_items])
        if len(data) > self._max_bytes:
            return False
        self._kept[tenant, stored.response["id"]] = data
        self._num_bytes += len(data)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._kept.popitem(last=False)[1])
        return True

    def get(self, tenant: str, response_id: str, field: str = "response_id") -> StoredResponse:
        """An answer. Raises NotFoundError, naming `field`."""
        data = self._kept.get((tenant, response_id))
        if data is None:
            raise self._unknown(response_id, field)
        return StoredResponse(*orjson.loads(data))

    def delete(self, tenant: str, response_id: str) -> None:
        """Forgets an answer. Raises NotFoundError."""
        data = self._kept.pop((tenant, response_id), None)
        if data is None:
            raise self._unknown(response_id, "response_id")
        self._num_bytes -= len(data)

    def _unknown(self, response_id: str, field: str) -> NotFoundError:
        hint = "it may have been forgotten" if self.enabled else "this server keeps no responses"
        return NotFoundError(f"there is no response {response_id!r:.80}: {hint}", field=field)
