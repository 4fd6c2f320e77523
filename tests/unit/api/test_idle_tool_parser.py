"""A tool parser beside a chat template that shows no tools is warned of at start, once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.server import FrontendServer
from pagewire_frontend.workers import Worker
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import chat_request, grpc_stub, running_frontend

SHOWS_TOOLS = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}"
# It speaks of tools, and looks at none.
IGNORES_TOOLS = "{# tools #}{{ 'the tools' }} tools {{ messages[0].content }}"
BROKEN = "{{ messages[0].content"


async def warnings(
    caplog: pytest.LogCaptureFixture, template: str | None = IGNORES_TOOLS, **config: Any
) -> list[str]:
    """What the log says of a parser from the start to after a chat."""
    client = FakeEngineClient(chat_template=template)
    with caplog.at_level(logging.WARNING):
        async with running_frontend(client, **config) as server, grpc_stub(server) as stub:
            try:
                await stub.ChatUnary(chat_request("x"))
            except grpc.aio.AioRpcError:
                assert template in (BROKEN, None)
    return [text for record in caplog.records if "tool-call-parser" in (text := record.message)]


async def test_it_names_the_flag_and_the_template(caplog: pytest.LogCaptureFixture) -> None:
    (told,) = await warnings(caplog, tool_call_parser="hermes")
    assert told.startswith("--tool-call-parser hermes: ")
    assert "the chat template 'default' of the model ignores tools" in told


async def test_a_template_of_the_operators_is_told_from_the_models(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "tool_use.jinja").write_text(IGNORES_TOOLS)
    (told,) = await warnings(
        caplog, SHOWS_TOOLS, tool_call_parser="hermes", chat_template=str(tmp_path)
    )
    assert "the chat template 'tool_use' of --chat-template ignores tools" in told


@pytest.mark.parametrize("parser", ["auto", "none"])
async def test_without_a_named_parser_nothing_is_said(
    caplog: pytest.LogCaptureFixture, parser: str
) -> None:
    assert await warnings(caplog, tool_call_parser=parser) == []


@pytest.mark.parametrize("template", [SHOWS_TOOLS, BROKEN, None])
async def test_where_nothing_is_idle_or_nothing_is_known_nothing_is_said(
    caplog: pytest.LogCaptureFixture, template: str | None
) -> None:
    assert await warnings(caplog, template, tool_call_parser="hermes") == []


async def test_an_engine_of_token_ids_only_has_no_template_to_speak_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = FakeEngineClient(has_tokenizer=False)
    with caplog.at_level(logging.WARNING):
        async with running_frontend(client, tool_call_parser="hermes"):
            pass
    assert caplog.records == []


async def test_the_template_for_tools_is_the_one_that_counts(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "default.jinja").write_text(IGNORES_TOOLS)
    (tmp_path / "tool_use.jinja").write_text(SHOWS_TOOLS)
    assert await warnings(caplog, tool_call_parser="hermes", chat_template=str(tmp_path)) == []


@pytest.mark.parametrize(("index", "count"), [(0, 1), (1, 0)])
async def test_one_of_several_workers_says_it(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, index: int, count: int
) -> None:
    client = FakeEngineClient(chat_template=IGNORES_TOOLS)
    config = FrontendConfig(
        http_port=0, grpc_port=0, grace_period_s=0.0, tool_call_parser="hermes", workers=2
    )
    server = FrontendServer(config, client, Worker(index, 2, str(tmp_path)))
    with caplog.at_level(logging.WARNING):
        await server.start()
        await server.stop()
    told = [record for record in caplog.records if "tool-call-parser" in record.message]
    assert len(told) == count
