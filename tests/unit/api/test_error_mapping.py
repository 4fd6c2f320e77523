"""Each kind of error has one gRPC code and one HTTP status."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
from typing import Any
from urllib.parse import quote

import grpc
import orjson
import pytest
from google.rpc import error_details_pb2

from pagewire.errors import (
    ErrorCode,
    InvalidArgumentError,
    PagewireError,
    ResourceExhaustedError,
    UnavailableError,
    error_from_code,
    shortened,
)
from pagewire.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from pagewire_frontend.errors import TokenIdsOnlyError
from pagewire_frontend.faults import as_pagewire_error
from pagewire_frontend.grpc_api.errors import abort, field_path, to_status
from pagewire_frontend.openai_api.errors import (
    RequestTooLargeError,
    describe,
    error_response,
    http_status,
)
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import grpc_stub, running_frontend


def error_with(code: ErrorCode) -> PagewireError:
    error = PagewireError("text")
    error.code = code
    return error


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_a_status_in_both_apis(code: ErrorCode) -> None:
    error = error_with(code)
    assert to_status(error).code == grpc.StatusCode[code.name].value[0]
    assert 400 <= http_status(error) < 600
    assert orjson.loads(describe(error))["error"]["code"] == code.name.lower()


@pytest.mark.parametrize("code", list(ErrorCode))
def test_a_code_that_came_over_a_wire_is_that_code_again(code: ErrorCode) -> None:
    error = error_from_code(code, "text", "n")
    assert (error.code, error.message, error.field) == (code, "text", "n")


@pytest.mark.parametrize(
    ("code", "kin"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, ErrorCode.UNAUTHENTICATED),
        (grpc.StatusCode.ABORTED, ErrorCode.UNAVAILABLE),
        (grpc.StatusCode.OUT_OF_RANGE, ErrorCode.INVALID_ARGUMENT),
        (grpc.StatusCode.UNKNOWN, ErrorCode.INTERNAL),
        (grpc.StatusCode.DATA_LOSS, ErrorCode.INTERNAL),
    ],
)
def test_codes_that_pagewire_never_sends_become_their_kin(
    code: grpc.StatusCode, kin: ErrorCode
) -> None:
    assert error_from_code(code.value[0], "text").code == kin


def test_each_api_says_in_its_own_words_how_it_takes_token_ids() -> None:
    error = TokenIdsOnlyError()
    assert "prompt_token_ids" in str(error)
    over_http = orjson.loads(describe(error))["error"]["message"]
    assert "as prompt" in over_http
    over_grpc = to_status(error).message
    assert "call Generate with token_ids" in over_grpc
    for text in (over_http, over_grpc):
        assert "--skip-tokenizer-init" in text
        assert "prompt_token_ids" not in text


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.INVALID_ARGUMENT, 400),
        (ErrorCode.ALREADY_EXISTS, 400),
        (ErrorCode.UNAUTHENTICATED, 401),
        (ErrorCode.NOT_FOUND, 404),
        (ErrorCode.RESOURCE_EXHAUSTED, 429),
        (ErrorCode.INTERNAL, 500),
        (ErrorCode.UNIMPLEMENTED, 400),
        (ErrorCode.UNAVAILABLE, 503),
        (ErrorCode.DEADLINE_EXCEEDED, 504),
    ],
)
def test_http_statuses(code: ErrorCode, status: int) -> None:
    assert error_response(error_with(code)).status_code == status


def test_a_full_queue_says_when_to_come_back() -> None:
    error = ResourceExhaustedError("the queue is full", retry_after_s=2.5)
    (detail,) = to_status(error).details
    retry = error_details_pb2.RetryInfo()
    assert detail.Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 2500
    assert error_response(error).headers["retry-after"] == "3"


def test_a_lost_engine_says_when_to_come_back_by_default() -> None:
    (detail,) = to_status(UnavailableError("gone")).details
    assert detail.TypeName() == "google.rpc.RetryInfo"
    assert error_response(UnavailableError("gone")).headers["retry-after"] == "5"


def test_what_would_be_refused_again_asks_nobody_to_come_back() -> None:
    error = ResourceExhaustedError("it does not fit in the KV cache even alone")
    assert not to_status(error).details
    response = error_response(error)
    assert response.status_code == 429
    assert "retry-after" not in response.headers
    # OpenAI's clients retry a 429 unless they are told not to.
    assert response.headers["x-should-retry"] == "false"
    full = error_response(ResourceExhaustedError("the queue is full", retry_after_s=1.0))
    assert "x-should-retry" not in full.headers


def test_a_body_that_is_too_large_is_413_and_not_429() -> None:
    response = error_response(RequestTooLargeError(1024))
    assert response.status_code == 413
    assert b"1024" in response.body


def test_fields_are_paths_in_the_request_message() -> None:
    assert field_path("top_p") == "sampling_params.top_p"
    assert field_path("stop") == "text_params.stop"
    assert field_path("chat_template") == "template_params.chat_template"
    assert field_path("messages[0].role") == "messages[0].role"
    assert field_path("best_of") == "sampling_params.best_of"
    assert to_status(InvalidArgumentError("top_p", "is wrong")).message == (
        "sampling_params.top_p: is wrong"
    )


def test_each_field_of_sampling_and_of_a_beam_search_has_its_path() -> None:
    for name in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name:
        assert field_path(name) == f"sampling_params.{name}"
    for name in sampling_pb2.BeamSearchParams.DESCRIPTOR.fields_by_name:
        assert field_path(name, beam_search=True) == f"beam_search.{name}"
    for name in ("stop", "messages", "request_id"):
        assert field_path(name, beam_search=True) == field_path(name)


async def test_an_error_of_a_beam_search_names_its_own_field() -> None:
    async with running_frontend(FakeEngineClient()) as server, grpc_stub(server) as stub:
        beams_of = sampling_pb2.BeamSearchParams
        for beams, path in (
            (beams_of(beam_width=2, n=3), "beam_search.n"),
            (beams_of(beam_width=500), "beam_search.beam_width"),
            (beams_of(beam_width=2, max_tokens=1 << 20), "beam_search.max_tokens"),
        ):
            call = inference_pb2.GenerateRequest(text="x", beam_search=beams)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GenerateUnary(call)
            assert (caught.value.details() or "").startswith(f"{path}: ")


def test_an_unexpected_exception_is_logged_without_its_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompt = "my" + " secret"  # in two, since frames quote the source
    try:
        raise ValueError(prompt)
    except ValueError as exception:
        with caplog.at_level(logging.DEBUG):
            error = as_pagewire_error(exception)
    assert error.code == ErrorCode.INTERNAL
    assert prompt not in str(error)
    assert prompt not in caplog.text
    assert "ValueError" in caplog.text
    assert "test_error_mapping.py" in caplog.text


@pytest.mark.parametrize("letter", ["x", "é", "漢", "🙂", "\ud800"])
def test_what_a_status_quotes_fits_in_the_metadata_that_clients_take(letter: str) -> None:
    status = to_status(InvalidArgumentError("model", f"{letter * 9000} is not served here"))
    sent = len(quote(status.message)) + len(base64.b64encode(status.SerializeToString()))
    assert sent < 8000
    assert status.message.startswith("model: ")
    assert status.message.endswith(" ...")


@pytest.mark.parametrize("text", ["", "short", "x" * 1024])
def test_what_is_short_is_told_whole(text: str) -> None:
    assert shortened(text) == text


async def test_an_error_for_a_client_that_has_left_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As when it leaves between the last message that was sent and the status."""
    entered = asyncio.Event()
    raised: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    class Slow(inference_pb2_grpc.InferenceServicer):
        async def Tokenize(self, request: Any, context: Any) -> Any:
            entered.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            try:
                await abort(context, InvalidArgumentError("text", "too late"), request)
            except BaseException as error:
                raised.set_result(error)
                raise

    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Slow(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Tokenize(inference_pb2.TokenizeRequest())
            await asyncio.wait_for(entered.wait(), 60)
            call.cancel()
            error = await asyncio.wait_for(raised, 60)
    finally:
        await server.stop(None)
    assert type(error) is asyncio.CancelledError
    assert "Traceback" not in caplog.text
