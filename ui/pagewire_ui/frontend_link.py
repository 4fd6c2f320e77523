"""The page's connection to one frontend, and its errors in words. Nothing of Gradio here."""

from __future__ import annotations

import re

import grpc
import grpc.aio

from pagewire.v1 import inference_pb2_grpc, operations_pb2_grpc
from pagewire_ui.frontend_access import FrontendAccess

# A field of the API, and what is wrong with it.
_FIELD = re.compile(r"([a-z_][\w.\[\]]*): (.*)", re.DOTALL)
_PREDICATE = re.compile(r"(has|have|must|is|are|can't|may|needs?|takes?|names?|does|do)\b")
_UNKNOWN_METHOD = re.compile(
    r"$|method not (found|implemented)|unknown (method|service)", re.IGNORECASE
)
_SUBJECTS = {"messages": "The conversation", "path": "The folder"}
_MEMBERS = {"messages": "message"}


class FrontendLink:
    """The stubs of one frontend's public API. Make it, and use it, in one event loop.

    Attributes:
        target: HOST:PORT of its gRPC API. It need not be up yet.
        metadata: to send with each call.
    """

    def __init__(self, target: str, access: FrontendAccess | None = None) -> None:
        """
        Args:
            target: see the attribute.
            access: key and certificates; None: neither.
        """
        access = access or FrontendAccess()
        self.target = target
        self.metadata = access.metadata
        self._channel = access.channel(target)
        self.inference = inference_pb2_grpc.InferenceStub(self._channel)
        self.adapters = operations_pb2_grpc.AdaptersStub(self._channel)
        self.observability = operations_pb2_grpc.ObservabilityStub(self._channel)

    def explain(self, error: grpc.aio.AioRpcError) -> str:
        """The error as a person at the page would want to read it."""
        return explain(error.code(), error.details() or "", self.target)

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close(None)


def explain(code: grpc.StatusCode, details: str, target: str) -> str:
    """An error as a person at the page would want to read it.

    Args:
        code, details: of the call that failed.
        target: HOST:PORT of the frontend.
    """
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return (
                f"The model server at {target} can't be reached at the moment. "
                "It may be starting or restarting: try again in a few seconds."
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return "The server is busy with other requests. Try again in a moment."
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return "The server took too long to answer. Try again, or ask for a shorter answer."
        case (
            grpc.StatusCode.INVALID_ARGUMENT
            | grpc.StatusCode.FAILED_PRECONDITION
            | grpc.StatusCode.NOT_FOUND
            | grpc.StatusCode.ALREADY_EXISTS
        ):
            return in_words(details)
        # Of what a server does not do it says so itself; of what it does not know, its library.
        case grpc.StatusCode.UNIMPLEMENTED if not _UNKNOWN_METHOD.match(details):
            return in_words(details)
        case grpc.StatusCode.UNIMPLEMENTED:
            return "This server is of an older version, which can't do that."
        case grpc.StatusCode.UNAUTHENTICATED:
            return f"The server does not let this page in: {details}"
        case _:
            return f"Something went wrong on the server ({code.name}): {details}"


def in_words(details: str) -> str:
    """What a server says is wrong, as a sentence that names no field of an API."""
    text = details.strip()
    if named := _FIELD.fullmatch(text):
        field, text = named.groups()
        if _PREDICATE.match(text):
            text = f"{_subject(field)} {text}"
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _subject(field: str) -> str:
    """What a person calls `messages`, `sampling_params.top_p` or `messages[3].role`."""
    path = field.split(".")
    name = _noun(path[-1])
    if len(path) > 1 and "[" in path[-2]:
        return f"The {name.removeprefix('The ')} of {_noun(path[-2])}"
    return name


def _noun(part: str) -> str:
    name, _, index = part.rstrip("]").partition("[")
    if index.isdecimal():
        return f"{_MEMBERS.get(name, f'{name} number')} {int(index) + 1}".replace("_", " ")
    return _SUBJECTS.get(name, name.replace("_", " "))
