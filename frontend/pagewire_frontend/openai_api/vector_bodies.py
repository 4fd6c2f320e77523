"""The bodies of requests whose answers are vectors or scores: OpenAI's for embeddings, vLLM's for
pooling, classes and scores, Jina's and Cohere's for reranking."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from pagewire.errors import InvalidArgumentError
from pagewire.sampling_params import check_count
from pagewire_frontend.generation_types import MAX_PROMPTS
from pagewire_frontend.openai_api.requests import PROMPT_SCHEMA
from pagewire_frontend.openai_api.unsupported import IN_POOLING, IN_RERANKING, Refused
from pagewire_frontend.pooling import PoolingPrompt

# Token ids of one prompt, where they are to be cut.
_MOST_ITEMS = 1_000_000
_TEXT = {"type": "string"}
_DOCUMENT = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}
_DOCUMENTS_SCHEMA = {"type": "array", "items": {"anyOf": [_TEXT, _DOCUMENT]}, "minItems": 1}


class PooledBody(BaseModel):
    """What all of them have."""

    model_config = ConfigDict(strict=True, extra="ignore")
    refused: ClassVar[Refused] = IN_POOLING
    # `input` may be token ids, which are many more than prompts.
    most_items: ClassVar[dict[str, int]] = {"input": _MOST_ITEMS}

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)


class InputBody(PooledBody):
    """A body with prompts that are not compared with one another."""

    # Checked in `prompts`: pydantic's union would collect an error for each of 100,000 token ids.
    input: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    add_special_tokens: bool | None = None

    def prompts(self) -> list[PoolingPrompt]:
        """The prompts one by one.

        Raises:
            InvalidArgumentError: none, too many, or something else than text and token ids.
        """
        return read_prompts("input", self.input)


class EmbeddingBody(InputBody):
    """`POST /v1/embeddings`."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None


class PoolingBody(InputBody):
    """`POST /pooling`."""

    task: Literal["embed", "classify"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    use_activation: bool | None = None


class ClassifyBody(InputBody):
    """`POST /classify`."""

    use_activation: bool | None = None


class ScoreBody(PooledBody):
    """`POST /score` and `/v1/score`."""

    text_1: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    text_2: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    use_activation: bool | None = None


class RerankBody(PooledBody):
    """`POST /rerank`, `/v1/rerank` and `/v2/rerank`."""

    refused: ClassVar[Refused] = IN_RERANKING

    query: str
    documents: Annotated[list[Any], WithJsonSchema(_DOCUMENTS_SCHEMA)]
    top_n: int | None = None
    return_documents: bool | None = None
    use_activation: bool | None = None

    def texts(self) -> list[str]:
        """The documents' texts.

        Raises:
            InvalidArgumentError: none, or one that has no text.
        """
        if not self.documents:
            raise InvalidArgumentError("documents", "must not be an empty list")
        return [_document_text(f"documents[{n}]", one) for n, one in enumerate(self.documents)]


def read_prompts(name: str, given: Any) -> list[PoolingPrompt]:
    """A string, token ids, or a list of either.

    Raises:
        InvalidArgumentError: something else, none, or too many.
    """
    if isinstance(given, str):
        return [PoolingPrompt(name, text=given)]
    if isinstance(given, list):
        if not given:
            raise InvalidArgumentError(name, "must not be an empty list")
        if type(given[0]) is int:
            return [_ids_prompt(name, given)]
        check_count(name, given, MAX_PROMPTS)
        return [_prompt(f"{name}[{n}]", one) for n, one in enumerate(given)]
    raise _no_prompt(name)


def _prompt(name: str, given: Any) -> PoolingPrompt:
    if isinstance(given, str):
        return PoolingPrompt(name, text=given)
    if isinstance(given, list):
        return _ids_prompt(name, given)
    raise _no_prompt(name)


def _ids_prompt(name: str, given: list[Any]) -> PoolingPrompt:
    check_count(name, given, _MOST_ITEMS)
    # By type and not isinstance: True is an int to Python.
    if not all(type(item) is int for item in given):
        raise _no_prompt(name)
    return PoolingPrompt(name, token_ids=given)


def _no_prompt(name: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        name, "must be a string, token ids (whole numbers), or a list of either"
    )


def _document_text(name: str, given: Any) -> str:
    text = given.get("text") if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise InvalidArgumentError(name, 'must be a string, or an object such as {"text": "..."}')
    return text
