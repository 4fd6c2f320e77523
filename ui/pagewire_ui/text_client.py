"""Templates, prompts and tokens over the public gRPC API, as a page wants to show them. Nothing of
Gradio here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagewire.v1 import inference_pb2
from pagewire_ui.chat_client import chat_messages
from pagewire_ui.frontend_link import FrontendLink

_TIMEOUT_S = 20.0
# The page tells the place itself.
_PLACE = re.compile(r" \(line \d+(, column \d+)?\)$")


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of a text.

    Attributes:
        data: what it adds to the text; maybe a part of a character.
        is_control: it is one of the model's control tokens, not text.
    """

    token_id: int
    data: bytes
    is_control: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """Why there is no answer.

    Attributes:
        text: what to tell the person.
        line, column: in the template, from 1; 0 where it is not the template's fault or the place
            is not known.
    """

    text: str
    line: int = 0
    column: int = 0


@dataclass(frozen=True, slots=True)
class OwnTemplates:
    """The templates that a model came with.

    Attributes:
        sources: by name; "default" serves plain chats.
        others_allowed: whether requests may bring one.
    """

    sources: dict[str, str] = field(default_factory=dict)
    others_allowed: bool = False


class TextClient:
    """Asks one frontend. Use it in the link's event loop."""

    def __init__(self, link: FrontendLink) -> None:
        self._link = link

    async def templates(self, model: str) -> OwnTemplates | Fault:
        """The templates of a model or an adapter."""
        request = inference_pb2.ListChatTemplatesRequest(model=model)
        try:
            answer = await self._link.inference.ListChatTemplates(
                request, timeout=_TIMEOUT_S, metadata=self._link.metadata
            )
        except grpc.aio.AioRpcError as error:
            return self._fault(error)
        sources = {template.name: template.source for template in answer.templates}
        return OwnTemplates(sources, answer.requests_may_bring_one)

    async def prompt(
        self, model: str, turns: Sequence[tuple[str, str]], chat_template: str | None
    ) -> list[Token] | Fault:
        """The exact prompt of a conversation, the answer's opening at its end.

        Args:
            model: "" is the base model.
            turns: (role, text) pairs.
            chat_template: a name of the model's, or a template's source; None: the model's own.
        """
        request = inference_pb2.RenderChatRequest(
            model=model,
            messages=chat_messages(turns),
            template_params=inference_pb2.ChatTemplateParams(chat_template=chat_template),
            with_tokens=True,
        )
        try:
            answer = await self._link.inference.RenderChat(
                request, timeout=_TIMEOUT_S, metadata=self._link.metadata
            )
        except grpc.aio.AioRpcError as error:
            return self._fault(error)
        return _tokens(answer.token_ids, answer.token_bytes, answer.control_positions)

    async def tokenize(
        self, model: str, text: str, *, add_special_tokens: bool, parse_special_tokens: bool
    ) -> list[Token] | Fault:
        """The tokens of a text."""
        request = inference_pb2.TokenizeRequest(
            model=model,
            text=text,
            add_special_tokens=add_special_tokens,
            parse_special_tokens=parse_special_tokens,
            with_bytes=True,
        )
        try:
            answer = await self._link.inference.Tokenize(
                request, timeout=_TIMEOUT_S, metadata=self._link.metadata
            )
        except grpc.aio.AioRpcError as error:
            return self._fault(error)
        return _tokens(answer.token_ids, answer.token_bytes, answer.control_positions)

    def _fault(self, error: grpc.aio.AioRpcError) -> Fault:
        status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]  # it reads alike
        place, field = inference_pb2.ChatTemplateFault(), error_details_pb2.BadRequest()
        is_template = False
        for detail in status.details if status else ():
            detail.Unpack(field)
            is_template |= detail.Unpack(place)
        if not is_template or not field.field_violations:
            return Fault(self._link.explain(error))
        text = _PLACE.sub("", field.field_violations[0].description)
        return Fault(text[:1].upper() + text[1:], place.line, place.column)


def _tokens(
    token_ids: Iterable[int], token_bytes: Iterable[bytes], control_positions: Iterable[int]
) -> list[Token]:
    control = set(control_positions)
    return [
        Token(token_id, data, index in control)
        for index, (token_id, data) in enumerate(zip(token_ids, token_bytes, strict=True))
    ]
