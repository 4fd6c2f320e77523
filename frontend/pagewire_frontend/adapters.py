"""The engine's LoRA adapters as this frontend knows them, with the text side of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from pagewire.errors import FailedPreconditionError, NotFoundError, PagewireError
from pagewire.v1 import engine_pb2
from pagewire_frontend.chat_template import ChatTemplate
from pagewire_frontend.engine_client.base import EngineClient
from pagewire_frontend.tokenizer import Tokenizer, json_object

logger = logging.getLogger(__name__)

_States = engine_pb2.AdapterInfo.State
# Requests may not name adapters in these.
_AWAY = (_States.STATE_LOADING, _States.STATE_LEAVING)
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class TextSide:
    """How text becomes tokens.

    Attributes:
        tokenizer, chat_template: None where the engine serves token ids only.
    """

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None


@dataclass(frozen=True, slots=True)
class KnownAdapter:
    """An adapter that requests may name.

    Attributes:
        info: what the engine tells of it.
        text: its own, or the model's.
        trouble: why its own can't be used; "" where it can.
    """

    info: engine_pb2.AdapterInfo
    text: TextSide
    trouble: str = ""


class AdapterDirectory:
    """Which adapters there are. The engine has the truth; this is as of the last `refresh`.

    Args:
        client: the engine.
        text: the model's.
        files: of the model's tokenizer.
    """

    def __init__(self, client: EngineClient, text: TextSide, files: Mapping[str, bytes]) -> None:
        self._client = client
        self._text = text
        self._files = dict(files)
        self._known: dict[str, KnownAdapter] = {}
        self._refreshing = asyncio.Lock()

    @property
    def enabled(self) -> bool:
        """Whether the engine has adapters."""
        return self._client.model_info.max_loras > 0

    def known(self) -> list[engine_pb2.AdapterInfo]:
        """Those that requests may name, by name."""
        return [self._known[name].info for name in sorted(self._known)]

    def find(self, name: str) -> KnownAdapter | None:
        """An adapter by its name.

        Raises:
            FailedPreconditionError: the tokenizer or the template that it ships can't be used.
        """
        known = self._known.get(name)
        if known is not None and known.trouble:
            raise FailedPreconditionError(
                f"the adapter {name!r} can't be used: {known.trouble}", field="model"
            )
        return known

    async def refresh(self) -> None:
        """Asks the engine. Does nothing where it has no adapters.

        Raises:
            UnavailableError: it is away.
        """
        if not self.enabled:
            return
        async with self._refreshing:
            listed = (await self._client.list_adapters()).adapters
            known: dict[str, KnownAdapter] = {}
            for info in listed:
                if info.state in _AWAY or info.name in known:
                    continue
                before = self._known.get(info.name)
                if before is not None and before.info.version == info.version:
                    known[info.name] = KnownAdapter(info, before.text, before.trouble)
                    continue
                try:
                    known[info.name] = await self._met(info)
                except NotFoundError:
                    continue  # it has gone since
            self._known = known

    async def _met(self, info: engine_pb2.AdapterInfo) -> KnownAdapter:
        if not (info.has_tokenizer or info.has_chat_template):
            return KnownAdapter(info, self._text)
        files = await self._client.adapter_files(info.name)
        return await asyncio.to_thread(self._read, info, files)

    def _read(self, info: engine_pb2.AdapterInfo, files: Mapping[str, bytes]) -> KnownAdapter:
        """With its own text side, or with what is wrong with it: others are served all the same."""
        try:
            return KnownAdapter(info, self._text_of(files))
        except PagewireError as error:
            trouble = error.message
            logger.error("adapter %r can't be used: %s", info.name, trouble)
        except BaseException as error:  # a panic in `tokenizers` is no Exception
            trouble = f"its tokenizer or chat template can't be read ({type(error).__name__})"
            logger.exception("adapter %r can't be used", info.name)
        return KnownAdapter(info, self._text, trouble)

    def _text_of(self, files: Mapping[str, bytes]) -> TextSide:
        """The model's tokenizer and template, in place of which come those that the files hold."""
        tokenizer = self._text.tokenizer
        if tokenizer is None:
            return self._text
        if _TOKENIZER in files:
            own = Tokenizer.from_files({**self._files, **files})
            same = files[_TOKENIZER] == self._files.get(_TOKENIZER)
            if not same or own.special_tokens != tokenizer.special_tokens:
                tokenizer = own
        if _has_template(files):
            return TextSide(tokenizer, ChatTemplate.from_files(files, tokenizer))
        template = self._text.chat_template
        if template is not None and tokenizer is not self._text.tokenizer:
            template = ChatTemplate(template.templates, tokenizer)
        return TextSide(tokenizer, template)


def _has_template(files: Mapping[str, bytes]) -> bool:
    if any(name.endswith(".jinja") or name == "chat_template.json" for name in files):
        return True
    config = files.get(_TOKENIZER_CONFIG)
    return config is not None and bool(json_object(_TOKENIZER_CONFIG, config).get("chat_template"))
