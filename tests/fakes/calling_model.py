"""A model that calls tools, in Hermes' format, and is shown their names."""

from __future__ import annotations

from typing import Any

from tests.fakes.fake_engine_client import FakeEngineClient

_TEMPLATE = (
    "{# <tool_call> #}{% for t in tools or [] %}{{ t.function.name }},{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def replying(reply: str, **settings: Any) -> FakeEngineClient:
    """An engine with such a model, that answers whatever is asked with the same text.

    Args:
        reply: the text.
        settings: others of the engine's client.
    """
    return FakeEngineClient(reply=lambda request, index: reply, chat_template=_TEMPLATE, **settings)
