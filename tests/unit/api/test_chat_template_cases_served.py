"""Templates of real models through both APIs: RenderChat's text and a chat's prompt are the
reference's, or tell its error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.v1 import inference_pb2
from pagewire_frontend.grpc_api.inference import InferenceServicer
from pagewire_frontend.serving import Serving
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import http_client, make_serving
from tests.fakes.template_clock import freeze_template_clock
from tests.unit.api.refusals import Context

CASES = Path(__file__).parents[4] / "shared" / "cases" / "chat_templates"
if not CASES.is_dir():
    pytest.skip("the reference renders are not here", allow_module_level=True)
EXPECTED = json.loads((CASES / "expected.json").read_text())
FORMATS = {
    entry["file"]: entry["content_format"]
    for entry in json.loads((CASES / "manifest.json").read_text())
}
FILES = sorted(EXPECTED["renders"])
# The reference was given what clients send as it came; here it is put as the template wants it, so
# that the reference's rendering of another case may be the one that is meant.
_CALLS = ("tool_roundtrip_dictargs", "tool_roundtrip_strargs")
_MEANT = dict.fromkeys(_CALLS, _CALLS)


class EndingLikeTheReference(FakeEngineClient):
    """Its files name the end token that the reference was told."""

    async def fetch_tokenizer(self) -> dict[str, bytes]:
        files = dict(await super().fetch_tokenizer())
        config = json.loads(files["tokenizer_config.json"]) | {"eos_token": "</s>"}
        return files | {"tokenizer_config.json": json.dumps(config).encode()}


@pytest.fixture(autouse=True)
def frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze_template_clock(monkeypatch)


def as_message(message: dict[str, Any]) -> inference_pb2.ChatMessage:
    """An OpenAI-shaped message for gRPC, whose arguments are text."""
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    converted = inference_pb2.ChatMessage(
        role=message["role"],
        content=[inference_pb2.ContentPart(text=text) for text in texts],
        name=message.get("name"),
        tool_call_id=message.get("tool_call_id"),
    )
    for call in message.get("tool_calls", []):
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        name = call["function"]["name"]
        converted.tool_calls.add(id=call["id"], name=name, arguments=arguments)
    return converted


async def rendered_by_grpc(serving: Serving, body: dict[str, Any]) -> tuple[str, str]:
    """The prompt and "", or "" and the error."""
    request = inference_pb2.RenderChatRequest(
        messages=[as_message(message) for message in body["messages"]],
        template_params={
            name: body[name]
            for name in ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
            if name in body
        },
        tools=[
            inference_pb2.Tool(
                name=tool["function"]["name"],
                description=tool["function"]["description"],
                parameters_json=json.dumps(tool["function"]["parameters"]),
            )
            for tool in body.get("tools", [])
        ],
    )
    context = Context()
    try:
        response = await InferenceServicer(serving).RenderChat(request, context)
    except grpc.aio.AbortError:
        assert context.code is grpc.StatusCode.INVALID_ARGUMENT
        return "", context.status.message
    return response.prompt, ""


async def prompted_by_http(serving: Serving, body: dict[str, Any]) -> tuple[str, str]:
    body = body | {"return_token_ids": True, "max_tokens": 1}
    if "tools" in body:
        body["tool_choice"] = "none"
    async with http_client(serving) as http:
        response = await http.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        assert response.status_code == 400, response.text
        return "", response.json()["error"]["message"]
    ids = response.json()["prompt_token_ids"]
    return serving.generation.tokenizer.decode(ids, skip_special_tokens=False), ""


def request_of(fixture: dict[str, Any]) -> dict[str, Any]:
    """A chat's body for a case of the reference."""
    known = ("messages", "tools", "add_generation_prompt", "continue_final_message")
    body = {name: fixture[name] for name in known if name in fixture}
    if not body.get("continue_final_message"):
        body.setdefault("add_generation_prompt", False)
    extra = {name: value for name, value in fixture.items() if name not in known}
    return body | ({"chat_template_kwargs": extra} if extra else {})


def expected_of(file: str, case: str) -> dict[str, str]:
    """What the reference made, of the first shape of the case that the template takes."""
    renders = EXPECTED["renders"][file]
    meant = [renders[name] for name in _MEANT.get(case, (case,))]
    return next((each for each in meant if "ok" in each), meant[0])


@pytest.mark.parametrize("file", FILES)
async def test_every_case_is_the_references_in_both_apis(file: str) -> None:
    client = EndingLikeTheReference(chat_template=(CASES / file).read_text(), max_model_len=100_000)
    serving = await make_serving(client)
    user = EXPECTED["renders"][file]["user_gen"]
    for case in EXPECTED["renders"][file]:
        fixture = EXPECTED["fixtures"][case]
        body = request_of(fixture)
        expected = expected_of(file, case)
        if case == "parts_gen" and FORMATS[file] != "openai" and "ok" in user:
            # Parts become a text for a template that knows none; the reference printed the list.
            text = fixture["messages"][0]["content"][0]["text"]
            question = EXPECTED["fixtures"]["user_gen"]["messages"][0]["content"]
            expected = {"ok": user["ok"].replace(question, text)}
        for ask in (rendered_by_grpc, prompted_by_http):
            prompt, error = await ask(serving, body)
            if "ok" in expected:
                assert (prompt, error) == (expected["ok"], ""), (case, ask.__name__)
            else:
                _, message = expected["error"].split(": ", 1)
                assert message in error, (case, ask.__name__)
