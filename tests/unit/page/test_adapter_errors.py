"""Why an adapter was not loaded, as people at the page read it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from pagewire.v1 import engine_pb2
from pagewire_ui.adapters_client import AdapterError, AdaptersClient
from pagewire_ui.frontend_link import FrontendLink, explain


def refusing(details: str) -> AdaptersClient:
    """A client of a frontend that says so of every load."""
    nothing = grpc.aio.Metadata()
    taken = grpc.aio.AioRpcError(grpc.StatusCode.ALREADY_EXISTS, nothing, nothing, details)

    async def load(*_: Any, **__: Any) -> None:
        raise taken

    link = SimpleNamespace(
        adapters=SimpleNamespace(Load=load),
        metadata=None,
        explain=lambda error: explain(error.code(), error.details(), "a:1"),
    )
    return AdaptersClient(cast(FrontendLink, link))


@pytest.mark.parametrize(
    ("details", "told"),
    [
        (
            "name: an adapter 'sql' is loaded; replace it with in_place, or choose another name",
            "sql is loaded already: “Update in place” replaces it, another name loads it beside "
            "the one that is there.",
        ),
        (
            "name: 'sql' is the served model's name; choose another",
            "'sql' is the served model's name; choose another.",
        ),
        ("name: an adapter 'sql' is being loaded", "An adapter 'sql' is being loaded."),
    ],
)
async def test_why_a_name_is_taken(details: str, told: str) -> None:
    with pytest.raises(AdapterError) as caught:
        await refusing(details).load(engine_pb2.LoadAdapterRequest(name="sql", path="sql"))
    assert str(caught.value) == told
