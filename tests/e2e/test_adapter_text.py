"""What an adapter ships of a tokenizer (tokens of its own, another end, another template) is what
its requests are read and answered with, and theirs alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from pagewire.config import EngineConfig
from pagewire.v1 import engine_pb2, inference_pb2, operations_pb2_grpc, sampling_pb2
from pagewire_engine.build import build_engine
from pagewire_engine.service import EngineServer
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from pagewire_frontend.server import FrontendServer
from tests.fakes.frontend import grpc_stub, running_frontend
from tests.fakes.tiny_adapters import write_tiny_adapter
from tests.fakes.tiny_models import write_tiny_model

# Of the model's 320 rows its tokenizer names 258.
PIRATE, PIRATE_ID, MODEL_EOS = "<|pirate|>", 258, 257
TEMPLATE = "{% for m in messages %}<|pirate|>{{ m.content }}{% endfor %}{{ eos_token }}"


def change_json(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def swap_ids(tokenizer: Any) -> None:
    vocab = tokenizer["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]


def add_token(tokenizer: Any, token: str, token_id: int) -> None:
    token_of = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"].append(token_of | {"content": token, "id": token_id})


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine's address; its adapters' folders tell what is odd about them."""
    folder = tmp_path_factory.mktemp("tiny")
    reference = write_tiny_model(folder / "model", "llama-llama3-rope-tied")
    adapters = folder / "adapters"
    write_tiny_adapter(adapters / "own-tokens", reference)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "model" / name, adapters / "own-tokens")
    for name in ("swapped", "beyond", "gap", "unreadable"):
        shutil.copytree(adapters / "own-tokens", adapters / name)
    own = adapters / "own-tokens"
    change_json(own / "tokenizer.json", lambda it: add_token(it, PIRATE, PIRATE_ID))
    change_json(
        own / "tokenizer_config.json",
        lambda it: it.update(eos_token=PIRATE, chat_template=TEMPLATE),
    )
    change_json(adapters / "swapped" / "tokenizer.json", swap_ids)
    change_json(adapters / "beyond" / "tokenizer.json", lambda it: add_token(it, PIRATE, 320))
    change_json(adapters / "gap" / "tokenizer.json", lambda it: add_token(it, PIRATE, 300))
    change_json(
        adapters / "unreadable" / "tokenizer.json",
        lambda it: it.update(decoder={"type": "Of another time"}),
    )
    shutil.copytree(adapters / "unreadable", adapters / "bad-template")
    shutil.copy(folder / "model" / "tokenizer.json", adapters / "bad-template")
    (adapters / "bad-template" / "chat_template.jinja").write_text("{% for x in %}")
    config = EngineConfig(
        model=str(folder / "model"),
        served_model_name="base",
        port=0,
        enable_lora=True,
        lora_dir=str(adapters),
        max_model_len=128,
        num_gpu_blocks_override=64,
    )
    server = EngineServer(build_engine(config, lambda line: None), config)
    yield f"127.0.0.1:{server.start()}"
    server.stop(grace_s=0.1)


@pytest.fixture
async def server(engine: str) -> AsyncIterator[FrontendServer]:
    client: Any = RemoteEngineClient(engine)
    async with running_frontend(client, allow_runtime_lora_updating=True) as server:
        yield server


@pytest.fixture
async def http(server: FrontendServer) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{server.http_port}"
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
async def pirate(http: httpx.AsyncClient) -> AsyncIterator[str]:
    """A loaded adapter with a token, an end and a template of its own."""
    loaded = {"lora_name": "pirate", "lora_path": "own-tokens"}
    response = await http.post("/v1/load_lora_adapter", json=loaded)
    assert response.status_code == 200, response.text
    yield "pirate"
    await http.post("/v1/unload_lora_adapter", json={"lora_name": "pirate"})


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_its_own_tokens_are_tokens_of_its_requests_alone(
    http: httpx.AsyncClient, server: FrontendServer, pirate: str
) -> None:
    text = f"A{PIRATE}"
    tokens = {
        model: (await post(http, "/tokenize", model=model, prompt=text))["tokens"]
        for model in ("base", pirate)
    }
    assert tokens[pirate] == [tokens["base"][0], PIRATE_ID]
    assert len(tokens["base"]) == 1 + len(PIRATE)
    shown = await post(http, "/detokenize", model=pirate, tokens=tokens[pirate])
    assert shown["prompt"] == text
    async with grpc_stub(server) as stub:
        request = inference_pb2.TokenizeRequest(model=pirate, text=text, with_bytes=True)
        response = await stub.Tokenize(request)
        assert list(response.token_ids) == tokens[pirate]
        assert list(response.token_bytes) == [b"A", PIRATE.encode()]
        assert list(response.control_positions) == [1]


async def test_its_template_writes_its_prompts_and_its_tokens_in_them_are_control_tokens(
    http: httpx.AsyncClient, server: FrontendServer, pirate: str
) -> None:
    messages = [
        inference_pb2.ChatMessage(
            role="user", content=[inference_pb2.ContentPart(text=f"A{PIRATE}")]
        )
    ]
    async with grpc_stub(server) as stub:
        request = inference_pb2.RenderChatRequest(model=pirate, messages=messages)
        rendered = await stub.RenderChat(request)
        assert rendered.prompt == f"{PIRATE}A{PIRATE}{PIRATE}"
        ids = list(rendered.token_ids)
        # What the client wrote is text; what the template wrote is not.
        assert [ids[0], ids[-1]] == [PIRATE_ID, PIRATE_ID]
        assert len(ids) == 1 + 1 + len(PIRATE) + 1
        listed = await stub.ListChatTemplates(inference_pb2.ListChatTemplatesRequest(model=pirate))
        assert [each.source for each in listed.templates] == [TEMPLATE]
        of_base = await stub.ListChatTemplates(inference_pb2.ListChatTemplatesRequest())
        assert PIRATE not in of_base.templates[0].source
    for model, num_tokens in ((pirate, len(ids)), ("base", None)):
        answer = await post(
            http,
            "/v1/chat/completions",
            model=model,
            messages=[{"role": "user", "content": f"A{PIRATE}"}],
            max_tokens=1,
        )
        assert answer["model"] == model
        assert (answer["usage"]["prompt_tokens"] == num_tokens) == (model == pirate)


async def test_its_own_end_ends_its_answers_alone(
    http: httpx.AsyncClient, server: FrontendServer, pirate: str
) -> None:
    asked = {"prompt": "A", "max_tokens": 3, "temperature": 0, "logit_bias": {PIRATE_ID: 100}}
    ends = {}
    for model in (pirate, "base"):
        answer = await post(http, "/v1/completions", model=model, **asked)
        choice = answer["choices"][0]
        ends[model] = choice["finish_reason"], answer["usage"]["completion_tokens"]
        assert PIRATE not in choice["text"]
    assert ends == {pirate: ("stop", 1), "base": ("length", 3)}
    on = await post(http, "/v1/completions", model=pirate, ignore_eos=True, **asked)
    assert on["choices"][0]["finish_reason"] == "length"
    # The model's own end still is one.
    bias = {"logit_bias": {MODEL_EOS: 100}}
    models = await post(http, "/v1/completions", model=pirate, **(asked | bias))
    assert models["choices"][0]["finish_reason"] == "stop"
    async with grpc_stub(server) as stub:
        request = inference_pb2.GenerateRequest(
            model=pirate,
            text="A",
            sampling_params=sampling_pb2.SamplingParams(
                temperature=0,
                max_tokens=3,
                logit_bias=[sampling_pb2.LogitBias(token_id=PIRATE_ID, bias=100)],
            ),
        )
        output = (await stub.GenerateUnary(request)).outputs[0]
    assert (list(output.token_ids), output.text) == ([PIRATE_ID], "")


@pytest.mark.parametrize(
    ("folder", "status", "code", "says"),
    [
        ("swapped", 400, "UNIMPLEMENTED", "gives 'A' the id"),
        ("beyond", 400, "UNIMPLEMENTED", "adapters that add tokens are not served"),
        ("gap", 400, "FAILED_PRECONDITION", "the id 300, and it is read as 258"),
        ("unreadable", 400, "FAILED_PRECONDITION", r"tokenizer\.json that it ships can't be read"),
        ("bad-template", 400, "FAILED_PRECONDITION", "chat_template|chat template"),
    ],
)
async def test_one_that_can_t_be_used_is_refused_with_the_reason_and_leaves_nothing(
    http: httpx.AsyncClient,
    server: FrontendServer,
    folder: str,
    status: int,
    code: str,
    says: str,
) -> None:
    body = {"lora_name": "odd", "lora_path": folder}
    refused = await http.post("/v1/load_lora_adapter", json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (status, "lora_path"), error
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = operations_pb2_grpc.AdaptersStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match=says) as caught:
            await stub.Load(engine_pb2.LoadAdapterRequest(name="odd", path=folder))
        assert caught.value.code() is grpc.StatusCode[code]
        assert not (await stub.List(engine_pb2.ListAdaptersRequest())).adapters
