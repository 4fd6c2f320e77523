"""Pages of a kept answer's input items: `limit`, `order` and `after`."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import http_client, make_serving
from tests.unit.api.refusals import error_of
from tests.unit.api.test_responses import openai_client

ROOM = 1 << 20


def messages(count: int, **fields: Any) -> list[Any]:
    return [{"role": "user", "content": str(number), **fields} for number in range(count)]


async def kept_id(client: openai.AsyncOpenAI, items: list[Any]) -> str:
    return (await client.responses.create(model="fake-model", input=items)).id


def contents(items: list[Any]) -> list[str]:
    return [item.content for item in items]


async def test_a_page_has_the_newest_twenty_unless_asked_otherwise() -> None:
    async with openai_client(FakeEngineClient(), response_store=ROOM) as client:
        page = await client.responses.input_items.list(await kept_id(client, messages(21)))
        assert contents(page.data) == [str(number) for number in range(20, 0, -1)]
        told: Any = page
        assert told.has_more is True
        assert (told.first_id, told.last_id) == (page.data[0].id, page.data[-1].id)


@pytest.mark.parametrize(
    ("order", "limit", "expected"),
    [("asc", 2, ["0", "1"]), ("desc", 2, ["2", "1"]), ("asc", 3, ["0", "1", "2"])],
)
async def test_order_and_limit_are_kept(order: Any, limit: int, expected: list[str]) -> None:
    async with openai_client(FakeEngineClient(), response_store=ROOM) as client:
        response_id = await kept_id(client, messages(3))
        page: Any = await client.responses.input_items.list(response_id, order=order, limit=limit)
        assert contents(page.data) == expected
        assert page.has_more is (limit < 3)


@pytest.mark.parametrize("fields", [{}, {"id": "same"}, {"id": ""}, {"id": "msg_1"}])
@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_openais_client_turns_pages_to_the_end(order: Any, fields: dict[str, Any]) -> None:
    async with openai_client(FakeEngineClient(), response_store=ROOM) as client:
        response_id = await kept_id(client, messages(5, **fields))
        pages = client.responses.input_items.list(response_id, order=order, limit=2)
        read: list[Any] = []
        async for item in pages:
            read.append(item)
            assert len(read) <= 5
    expected = [str(number) for number in range(5)]
    assert contents(read) == (expected if order == "asc" else expected[::-1])


async def test_after_the_last_item_there_is_an_empty_page() -> None:
    async with http_client(await make_serving(FakeEngineClient(), response_store=ROOM)) as http:
        made = (await http.post("/v1/responses", json={"input": messages(1, id="only")})).json()
        answer = await http.get(f"/v1/responses/{made['id']}/input_items?after=only")
    assert answer.json() == {
        "object": "list",
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=101",
        "limit=-1",
        "limit=",
        "limit=x",
        "limit=1_0",
        "limit=1.5",
        "limit=" + "9" * 5000,
        "order=up",
        "order=",
        "after=unknown",
        "after=",
    ],
)
async def test_a_page_that_there_is_not_is_refused_by_parameter(query: str) -> None:
    async with http_client(await make_serving(FakeEngineClient(), response_store=ROOM)) as http:
        made = (await http.post("/v1/responses", json={"input": messages(1)})).json()
        answer = await http.get(f"/v1/responses/{made['id']}/input_items?{query}")
    assert error_of(answer)["param"] == query.partition("=")[0]
