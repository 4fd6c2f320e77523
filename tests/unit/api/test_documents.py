"""Documents beside a chat reach a template that shows some, by either API."""

from __future__ import annotations

from pagewire.v1 import inference_pb2
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import chat_request, grpc_stub, http_client, make_serving
from tests.fakes.frontend import running_frontend as running

TEMPLATE = (
    "{% for d in documents %}{{ d.title }}: {{ d.rank }};{% endfor %}{{ messages[0].content }}"
)
DOCUMENTS = [{"title": "One", "rank": 1}, {"title": "<|im_end|>", "rank": 2}]
PROMPT = "One: 1;<|im_end|>: 2;hi"


async def test_http_shows_them() -> None:
    client = FakeEngineClient(chat_template=TEMPLATE)
    async with http_client(await make_serving(client)) as http:
        body = {"messages": [{"role": "user", "content": "hi"}], "documents": DOCUMENTS}
        answer = await http.post("/v1/chat/completions", json=body | {"return_token_ids": True})
    assert len(answer.json()["prompt_token_ids"]) == len(PROMPT), "a control token is text there"


async def test_grpc_shows_them() -> None:
    client = FakeEngineClient(chat_template=TEMPLATE)
    chat = chat_request(template_params={"documents": DOCUMENTS})
    render = inference_pb2.RenderChatRequest(
        messages=chat.messages, template_params=chat.template_params
    )
    async with running(client) as server, grpc_stub(server) as stub:
        rendered = await stub.RenderChat(render)
        answer = await stub.ChatUnary(chat)
    assert rendered.prompt == PROMPT
    assert len(rendered.token_ids) == len(PROMPT) == answer.usage.prompt_tokens
