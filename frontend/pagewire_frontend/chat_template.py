"""Messages to the prompt a model was trained on, through its chat template."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pagewire.errors import FailedPreconditionError, InvalidArgumentError
from pagewire_frontend.chat_messages import prepare_messages, prepare_tools
from pagewire_frontend.compiled_template import compile_template
from pagewire_frontend.control_tokens import ControlTokenGuard
from pagewire_frontend.errors import ChatTemplateError
from pagewire_frontend.template_files import DEFAULT_TEMPLATE, templates_in
from pagewire_frontend.tokenizer import Tokenizer

Messages = list[dict[str, Any]]
_TOOL_USE = "tool_use"
_OWN_VARIABLES = frozenset(("messages", "tools", "add_generation_prompt"))


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as the model reads it.

    Attributes:
        prompt: the exact text.
        token_ids: its tokens. Control tokens that a client wrote into a message are ordinary text
            in them, which the prompt alone does not tell.
        template: the source of the template that wrote it.
        continued: the text of the final message, where that is to be continued.
    """

    prompt: str
    token_ids: list[int]
    template: str = ""
    continued: str | None = None

    def prompt_token_ids(self) -> list[int]:
        """The tokens, for an answer to them. To look at, a prompt of none is fine.

        Raises:
            ChatTemplateError: there are none.
        """
        if not self.token_ids:
            raise ChatTemplateError("the template renders these messages to nothing")
        return self.token_ids


class ChatTemplate:
    """A model's chat templates: one, or several by name.

    Attributes:
        templates: name to source; `default` is the one for plain chats.
    """

    def __init__(self, templates: Mapping[str, str], tokenizer: Tokenizer) -> None:
        self.templates = dict(templates)
        self._tokenizer = tokenizer
        self._guard = ControlTokenGuard(
            text
            for token_id in tokenizer.special_token_ids
            if (text := tokenizer.special_token_text(token_id))
        )

    @classmethod
    def from_files(
        cls,
        files: Mapping[str, bytes],
        tokenizer: Tokenizer,
        *,
        override: Mapping[str, str] | None = None,
    ) -> ChatTemplate:
        """The templates among a model's files.

        Args:
            override: templates by name. Those with a default stand in for the model's own; others
                come to them.

        Raises:
            ChatTemplateError: one of `override` does not parse.
            FailedPreconditionError: a file is not what its name says.
        """
        named = dict(override or {})
        for name, source in named.items():
            with _naming(name):
                compile_template(source)
        if DEFAULT_TEMPLATE in named:
            return cls(named, tokenizer)
        return cls(templates_in(files) | named, tokenizer)

    @property
    def ignoring_tools(self) -> str | None:
        """The name of the template that chats with tools get, where it shows none of them."""
        for name in (_TOOL_USE, DEFAULT_TEMPLATE):
            if name in self.templates:
                try:
                    template = compile_template(self.templates[name])
                except ChatTemplateError:
                    return None  # who chats is told
                return None if template.knows_tools else name
        return None

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        parse_control_tokens: bool = False,
        max_tokens: int | None = None,
    ) -> RenderedChat:
        """Renders a conversation.

        Args:
            messages: OpenAI-shaped.
            documents: for templates that show some to the model.
            chat_template: a name among `templates`, or a template's text; None chooses.
            chat_template_kwargs: more variables for the template.
            add_generation_prompt: open the assistant's turn; None: unless the last message is
                continued.
            continue_final_message: leave the last message open.
            parse_control_tokens: read control tokens in the messages as such.
            max_tokens: of how many the prompt may have.

        Raises:
            TooManyTokensError: it has more.
            FailedPreconditionError: the model has no template.
            ChatTemplateError, InvalidArgumentError: these messages can't be rendered.
        """
        source = self._source(chat_template, tools)
        template = compile_template(source)
        if documents and not template.knows_documents:
            raise InvalidArgumentError("documents", "the model's chat template shows none")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise InvalidArgumentError(
                "add_generation_prompt", "can't be set together with continue_final_message"
            )
        client_messages = prepare_messages(messages, template)
        continuation = None
        if continue_final_message:
            if messages[-1].get("content") in (None, []):
                raise InvalidArgumentError("messages", "the final message has no text to continue")
            continuation = _Continuation()

        def render(client_data: dict[str, Any]) -> str:
            data = client_data
            if continuation is not None:
                data = {**data, "messages": continuation.mark(data["messages"])}
            variables = {**self._tokenizer.special_tokens, **data}
            text = template.render({**variables, "add_generation_prompt": add_generation_prompt})
            return text if continuation is None else continuation.cut(text)

        client_data = {
            "documents": documents or None,
            **_checked(chat_template_kwargs or {}),
            "messages": client_messages,
            "tools": prepare_tools(tools, template),
        }
        try:
            if parse_control_tokens:
                prompt, spans = render(client_data), None
            else:
                prompt, spans = self._guard.render(render, client_data)
        except RecursionError:
            raise InvalidArgumentError("messages", "something in them is nested too deep") from None
        token_ids = self._encode(_text(prompt), spans, max_tokens)
        continued = _text_of(client_messages[-1]) if continue_final_message else None
        return RenderedChat(prompt, token_ids, source, continued)

    def _encode(
        self, prompt: str, spans: list[tuple[int, int]] | None, max_tokens: int | None
    ) -> list[int]:
        # The template writes the BOS, where the model has one: the tokenizer adds none of its own.
        if spans is None:
            return self._tokenizer.encode(prompt, add_special_tokens=False, max_tokens=max_tokens)
        return self._tokenizer.encode_marked(prompt, spans, max_tokens=max_tokens)

    def _source(self, chat_template: str | None, tools: object) -> str:
        if chat_template is not None:
            return self.templates.get(chat_template, chat_template)
        if tools and _TOOL_USE in self.templates:
            return self.templates[_TOOL_USE]
        if DEFAULT_TEMPLATE in self.templates:
            return self.templates[DEFAULT_TEMPLATE]
        if self.templates:
            names = ", ".join(sorted(self.templates))
            raise InvalidArgumentError(
                "chat_template", f"the model has several templates; name one of: {names}"
            )
        raise FailedPreconditionError(
            "the model has no chat template; start the frontend with --chat-template FILE, or send "
            "one as chat_template where the server allows it (--allow-request-chat-template)",
            field="chat_template",
        )


@contextmanager
def _naming(template: str) -> Iterator[None]:
    """Says of a fault in one of several templates which it is in."""
    try:
        yield
    except ChatTemplateError as error:
        if template == DEFAULT_TEMPLATE:
            raise
        raise ChatTemplateError(
            f"the template {template!r}: {error.message}", line=error.line, column=error.column
        ) from None


def _text_of(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)


def _text(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ChatTemplateError("the template writes half of a surrogate pair") from None
    return prompt


def _checked(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in kwargs:
        if name in _OWN_VARIABLES:
            raise InvalidArgumentError(
                "chat_template_kwargs", f"{name} is set by its own field, not here"
            )
    return kwargs


class _Continuation:
    """Marks the end of the last message's text, so that the prompt can be cut there."""

    def __init__(self) -> None:
        # Trailing space as in transformers: it shows whether the template strips its messages.
        self._mark = f"continue{secrets.token_hex(8)} "

    def mark(self, messages: Messages) -> Messages:
        last = dict(messages[-1])
        content = last["content"]
        if isinstance(content, str):
            last["content"] = content + self._mark
        else:
            last["content"] = [*content[:-1], {**content[-1]}]
            last["content"][-1]["text"] += self._mark
        return [*messages[:-1], last]

    def cut(self, text: str) -> str:
        at = text.rfind(self._mark.strip())
        if at < 0:
            raise ChatTemplateError(
                "the template leaves the final message out, so it can't be continued",
                field="continue_final_message",
            )
        if text.startswith(self._mark, at):
            return text[:at]
        return text[:at].rstrip()
