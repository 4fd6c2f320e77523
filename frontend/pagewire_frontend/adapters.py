"""The engine's LoRA adapters as this frontend knows them, with the text side of each."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pagewire.errors import (
    FailedPreconditionError,
    NotFoundError,
    PagewireError,
    UnavailableError,
)
from pagewire.v1 import engine_pb2
from pagewire_frontend.chat_template import ChatTemplate
from pagewire_frontend.compiled_template import compile_template
from pagewire_frontend.engine_client.base import EngineClient
from pagewire_frontend.errors import ChatTemplateError
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
        text_version: of its own; "": it ships none.
        trouble: why its own can't be used; "" where it can.
    """

    info: engine_pb2.AdapterInfo
    text: TextSide
    text_version: str = ""
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
        self._revision = ""
        self._refreshing = asyncio.Lock()
        # Numbers of the last refresh that has begun, and of the last that has ended well.
        self._last_begun = 0
        self._last_done = 0

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

    async def look_up(self, name: str) -> None:
        """Asks the engine for an adapter that is not known: another frontend may have loaded it."""
        if name in self._known:
            return
        try:
            await self.refresh()
        except UnavailableError as error:
            logger.debug("the engine did not tell its adapters: %s", error)

    async def load(self, request: engine_pb2.LoadAdapterRequest) -> engine_pb2.AdapterInfo:
        """Loads an adapter; returns when requests may name it.

        Raises:
            PagewireError: it can't be loaded; the error says why.
        """
        info = await self._client.load_adapter(request)
        await self.refresh()
        try:
            self.find(info.name)
        except FailedPreconditionError as error:
            if not request.in_place:
                # Nobody could name it, and its name would be taken.
                await self.unload(engine_pb2.UnloadAdapterRequest(name=info.name))
            error.field = "path"
            raise
        return info

    async def unload(
        self, request: engine_pb2.UnloadAdapterRequest
    ) -> engine_pb2.UnloadAdapterResponse:
        """Unloads an adapter, as its requests have ended or are ended.

        Raises:
            PagewireError: the adapter stays; the error says why.
        """
        response = await self._client.unload_adapter(request)
        await self.refresh()
        return response

    async def list(self) -> engine_pb2.ListAdaptersResponse:
        """What the engine has of adapters, and where.

        Raises:
            PagewireError: it has none, or is away.
        """
        return await self._client.list_adapters()

    async def refresh(self) -> None:
        """Asks the engine. Does nothing where it has no adapters. Who calls while others wait
        shares their question: the engine gets one at a time.

        Raises:
            UnavailableError: it is away.
        """
        if not self.enabled:
            return
        begun_before = self._last_begun
        async with self._refreshing:
            if self._last_done > begun_before:
                return
            self._last_begun += 1
            await self._ask()
            self._last_done = self._last_begun

    async def _ask(self) -> None:
        listed = await self._client.list_adapters(self._revision)
        if self._revision and listed.revision == self._revision:
            return
        revision, known = listed.revision, dict[str, KnownAdapter]()
        for info in listed.adapters:
            if info.state in _AWAY or info.name in known:
                continue
            before = self._known.get(info.name)
            if before is not None and before.info.version == info.version:
                known[info.name] = replace(before, info=info)
                continue
            try:
                known[info.name] = await self._met(info)
            except (NotFoundError, FailedPreconditionError):
                revision = ""  # it has gone since, or was replaced: ask again
        self._known, self._revision = known, revision

    async def _met(self, info: engine_pb2.AdapterInfo) -> KnownAdapter:
        if not (info.has_tokenizer or info.has_chat_template):
            return KnownAdapter(info, self._text)
        files = await self._client.adapter_files(info.name, info.version)
        version = _text_version(files)
        for other in self._known.values():
            if other.text_version == version:
                return replace(other, info=info)
        return await asyncio.to_thread(self._read, info, files, version)

    def _read(
        self, info: engine_pb2.AdapterInfo, files: Mapping[str, bytes], version: str
    ) -> KnownAdapter:
        """With its own text side, or with what is wrong with it: others are served all the same."""
        try:
            return KnownAdapter(info, self._text_of(files), version)
        except PagewireError as error:
            trouble = error.message
            logger.error("adapter %r can't be used: %s", info.name, trouble)
        except BaseException as error:  # a panic in `tokenizers` is no Exception
            trouble = f"its tokenizer or chat template can't be read ({type(error).__name__})"
            logger.exception("adapter %r can't be used", info.name)
        return KnownAdapter(info, self._text, version, trouble)

    def _text_of(self, files: Mapping[str, bytes]) -> TextSide:
        """The model's tokenizer and template, in place of which come those that the files hold."""
        tokenizer = self._text.tokenizer
        if tokenizer is None:
            return self._text
        if _TOKENIZER in files:
            try:
                own = Tokenizer.from_files({**self._files, **files})
            except FailedPreconditionError as error:
                why = error.__cause__ or error.message
                raise FailedPreconditionError(
                    f"the {_TOKENIZER} that it ships can't be read ({why}); save it again by "
                    "transformers' AutoTokenizer, or remove it where it is the model's"
                ) from error
            _check_ids(files[_TOKENIZER], own)
            same = files[_TOKENIZER] == self._files.get(_TOKENIZER)
            if not same or own.special_tokens != tokenizer.special_tokens:
                tokenizer = own
        if _has_template(files):
            shipped = ChatTemplate.from_files(files, tokenizer)
            for name, source in shipped.templates.items():
                try:
                    compile_template(source)
                except ChatTemplateError as error:
                    raise FailedPreconditionError(
                        f"the chat template {name!r} that it ships: {error.message}"
                    ) from error
            return TextSide(tokenizer, shipped)
        template = self._text.chat_template
        if template is not None and tokenizer is not self._text.tokenizer:
            template = ChatTemplate(template.templates, tokenizer)
        return TextSide(tokenizer, template)


def _check_ids(content: bytes, tokenizer: Tokenizer) -> None:
    """Whether its tokens are read by the ids that the file gives them, which the engine has held
    against the model's: of tokens beyond the vocabulary `tokenizers` counts on instead."""
    for each in json_object(_TOKENIZER, content).get("added_tokens", ()):
        token, token_id = each["content"], tokenizer.token_id(each["content"])
        if token_id != each["id"]:
            raise FailedPreconditionError(
                f"the {_TOKENIZER} that it ships gives {token!r} the id {each['id']}, and it is "
                f"read as {token_id}: there are gaps before it; fill them with reserved tokens"
            )


def _text_version(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()


def _has_template(files: Mapping[str, bytes]) -> bool:
    if any(name.endswith(".jinja") or name == "chat_template.json" for name in files):
        return True
    config = files.get(_TOKENIZER_CONFIG)
    return config is not None and bool(json_object(_TOKENIZER_CONFIG, config).get("chat_template"))
