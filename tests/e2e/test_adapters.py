"""Adapters through the whole: a tiny model's engine, both public APIs, and their control."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import torch

from pagewire import LLM, LoRARequest, SamplingParams
from pagewire.config import EngineConfig
from pagewire.v1 import engine_pb2, inference_pb2, operations_pb2_grpc, sampling_pb2
from pagewire_engine.build import build_engine
from pagewire_engine.executor.base import PendingStep
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.service import EngineServer
from pagewire_engine.step import StepPlan
from pagewire_engine.worker import adapters as worker_adapters
from pagewire_engine.worker.adapter_loading import LoadedWeights, load_weights
from pagewire_frontend import server as server_module
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from pagewire_frontend.server import FrontendServer
from tests.fakes.frontend import grpc_stub, running_frontend
from tests.fakes.tiny_adapters import write_tiny_adapter
from tests.fakes.tiny_models import write_tiny_model

PROMPT = [5, 6, 7, 8, 9]
NUM_TOKENS = 8
UNLOAD = engine_pb2.UnloadAdapterRequest
STATES = engine_pb2.AdapterInfo.State


@dataclass(frozen=True)
class Tiny:
    """A model, a folder of adapters, and what each gives."""

    model: Path
    adapters: Path
    references: dict[str, Any]

    def expected(self, name: str) -> list[int]:
        """Greedy tokens by transformers and PEFT."""
        ids = list(PROMPT)
        for _ in range(NUM_TOKENS):
            with torch.inference_mode():
                logits = self.references[name](input_ids=torch.tensor([ids])).logits
            ids.append(int(logits[0, -1].argmax()))
        return ids[len(PROMPT) :]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    reference = write_tiny_model(folder / "model", "llama-llama3-rope-tied")
    adapters = folder / "adapters"
    references = {"base": reference}
    for seed, name in enumerate(("start", "one", "two"), 1):
        references[name] = write_tiny_adapter(adapters / name, reference, seed=seed)
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (adapters / "two" / "chat_template.jinja").write_text(template)
    (adapters / "pickled").mkdir()
    shutil.copy(adapters / "one" / "adapter_config.json", adapters / "pickled")
    (adapters / "pickled" / "adapter_model.bin").write_bytes(b"\x80\x04.")
    return Tiny(folder / "model", adapters, references)


@pytest.fixture(scope="module")
def engine(tiny: Tiny) -> Iterator[str]:
    """An engine's address."""
    module = {"name": "start", "path": str(tiny.adapters / "start"), "base_model_name": "org/base"}
    config = EngineConfig(
        model=str(tiny.model),
        served_model_name="base",
        port=0,
        enable_lora=True,
        lora_modules=(json.dumps(module),),
        lora_dir=str(tiny.adapters),
        max_loras=2,
        max_model_len=128,
        num_gpu_blocks_override=256,
    )
    server = EngineServer(build_engine(config, lambda line: None), config)
    port = server.start()
    yield f"127.0.0.1:{port}"
    server.stop(grace_s=0.1)


@asynccontextmanager
async def frontend(engine: str, **config: Any) -> AsyncIterator[FrontendServer]:
    config = {"allow_runtime_lora_updating": True} | config
    client: Any = RemoteEngineClient(engine)
    async with running_frontend(client, **config) as server:
        yield server


@pytest.fixture
async def server(engine: str) -> AsyncIterator[FrontendServer]:
    async with frontend(engine) as server:
        yield server
        for adapter in (await _list(server)).adapters:
            if adapter.name != "start":
                await _unload(server, adapter.name, mode=UNLOAD.MODE_ABORT)


def _http(server: FrontendServer) -> httpx.AsyncClient:
    url = f"http://127.0.0.1:{server.http_port}"
    return httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)


@asynccontextmanager
async def _adapters(server: FrontendServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield operations_pb2_grpc.AdaptersStub(channel)


async def _load(server: FrontendServer, name: str, path: str, **fields: Any) -> Any:
    request = engine_pb2.LoadAdapterRequest(name=name, path=path, **fields)
    async with _adapters(server) as stub:
        return (await stub.Load(request)).adapter


async def _unload(server: FrontendServer, name: str, **fields: Any) -> Any:
    async with _adapters(server) as stub:
        return await stub.Unload(UNLOAD(name=name, **fields))


async def _list(server: FrontendServer) -> Any:
    async with _adapters(server) as stub:
        return await stub.List(engine_pb2.ListAdaptersRequest())


async def _complete(http: httpx.AsyncClient, model: str, **fields: Any) -> httpx.Response:
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return await http.post("/v1/completions", json=body | fields)


async def _tokens(http: httpx.AsyncClient, model: str) -> list[int]:
    response = await _complete(http, model)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    return list(response.json()["choices"][0]["token_ids"])


async def _until_it_runs(server: FrontendServer) -> None:
    """Returns once a request of the first adapter runs."""
    running = 0
    async with asyncio.timeout(60):
        while not running:
            running = (await _list(server)).adapters[0].num_running_requests


async def test_the_model_s_name_selects_the_adapter(tiny: Tiny, server: FrontendServer) -> None:
    for name in ("one", "two"):
        await _load(server, name, name)
    async with _http(server) as http:
        names = ["base", "start", "one", "two"] * 3  # more adapters than one step may have
        answers = await asyncio.gather(*(_tokens(http, name) for name in names))
        for name, answer in zip(names, answers, strict=True):
            assert answer == tiny.expected(name), name
        missing = await _complete(http, "three")
        assert missing.status_code == 404
        assert "'one'" in missing.json()["error"]["message"]
    async with grpc_stub(server) as stub:
        response = await stub.GenerateUnary(
            inference_pb2.GenerateRequest(
                model="one",
                token_ids=inference_pb2.TokenIds(ids=PROMPT),
                sampling_params=sampling_pb2.SamplingParams(
                    temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True
                ),
            )
        )
    assert response.model == "one"
    assert list(response.outputs[0].token_ids) == tiny.expected("one")


async def test_models_show_their_lineage(server: FrontendServer) -> None:
    await _load(server, "one", "one")
    async with _http(server) as http:
        cards = (await http.get("/v1/models")).json()["data"]
        lineage = {card["id"]: (card["root"], card["parent"]) for card in cards}
        assert lineage == {
            "base": ("base", None),
            "start": ("base", "org/base"),
            "one": ("base", "base"),
        }
        assert (await http.get("/v1/models/start")).json()["parent"] == "org/base"
    async with grpc_stub(server) as stub:
        models = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert {model.id: (model.root, model.parent or None) for model in models} == lineage


async def test_the_http_routes_load_and_unload(tiny: Tiny, server: FrontendServer) -> None:
    async with _http(server) as http:
        body = {"lora_name": "mine", "lora_path": "one"}
        assert (await http.post("/v1/load_lora_adapter", json=body)).status_code == 200
        assert await _tokens(http, "mine") == tiny.expected("one")
        again = await http.post("/v1/load_lora_adapter", json=body)
        assert again.status_code in (400, 409)
        assert again.json()["error"]["param"] == "lora_name"
        replaced = body | {"lora_path": "two", "load_inplace": True}
        assert (await http.post("/v1/load_lora_adapter", json=replaced)).status_code == 200
        assert await _tokens(http, "mine") == tiny.expected("two")
        gone = await http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
        assert gone.json()["deleted"] is True
        assert (await _complete(http, "mine")).status_code == 404
        unknown = await http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
        assert unknown.status_code == 404


async def test_adapters_are_managed_only_where_the_operator_allows_it(engine: str) -> None:
    async with frontend(engine, allow_runtime_lora_updating=False) as server, _http(server) as http:
        body = {"lora_name": "one", "lora_path": "one"}
        refused = await http.post("/v1/load_lora_adapter", json=body)
        assert "--allow-runtime-lora-updating" in refused.json()["error"]["message"]
        assert refused.status_code == 400
        assert (await http.post("/v1/unload_lora_adapter", json=body)).status_code == 400
        with pytest.raises(grpc.aio.AioRpcError, match="--allow-runtime-lora-updating"):
            await _list(server)
        assert len((await http.get("/v1/models")).json()["data"]) == 2, "they may be used, though"


@pytest.mark.parametrize(
    ("name", "path", "code"),
    [
        ("x", "../model", "INVALID_ARGUMENT"),
        ("x", "/etc", "INVALID_ARGUMENT"),
        ("x", "none", "NOT_FOUND"),
        ("x", "org/name", "NOT_FOUND"),
        ("x", "pickled", "UNIMPLEMENTED"),
        ("x", ".", "FAILED_PRECONDITION"),
        ("base", "one", "ALREADY_EXISTS"),
        ("start", "one", "ALREADY_EXISTS"),
        ("", "one", "INVALID_ARGUMENT"),
        ("a\nb", "one", "INVALID_ARGUMENT"),
        ("x" * 300, "one", "INVALID_ARGUMENT"),
        ("x", "y" * 5000, "INVALID_ARGUMENT"),
    ],
)
async def test_what_can_t_be_loaded_is_refused_by_field(
    server: FrontendServer, name: str, path: str, code: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _load(server, name, path)
    assert caught.value.code() is grpc.StatusCode[code]
    assert [each.name for each in (await _list(server)).adapters] == ["start"]


async def test_the_list_tells_where_adapters_are(tiny: Tiny, server: FrontendServer) -> None:
    loaded = await _load(server, "one", "one", base_model_name="org/other")
    assert (loaded.rank, loaded.alpha, loaded.parent, loaded.root) == (4, 6, "org/other", "base")
    assert loaded.state == STATES.STATE_HOST
    assert len(loaded.version) == 64
    async with _http(server) as http:
        await _tokens(http, "one")
    listed = await _list(server)
    states = {each.name: each.state for each in listed.adapters}
    assert states["one"] == STATES.STATE_DEVICE
    assert listed.limits.max_loras == 2
    assert list(listed.loadable_paths) == ["one", "pickled", "start", "two"]
    same = await _load(server, "one", "one", version=loaded.version)
    assert same.version == loaded.version
    with pytest.raises(grpc.aio.AioRpcError, match="holds version"):
        await _load(server, "one", "two", in_place=True, version=loaded.version)


async def test_unload_waits_for_requests_or_ends_them(
    server: FrontendServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = SingleProcessExecutor.launch

    def slowly(self: SingleProcessExecutor, plan: StepPlan) -> PendingStep:
        time.sleep(0.03)  # so that requests run for longer than it takes to ask for an unload
        return launch(self, plan)

    monkeypatch.setattr(SingleProcessExecutor, "launch", slowly)
    await _load(server, "one", "one")
    async with _http(server) as http:
        long = asyncio.create_task(_complete(http, "one", max_tokens=100))
        await _until_it_runs(server)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _unload(server, "one", timeout_s=0.0)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await _unload(server, "one")).host_bytes > 0
        assert (await long).status_code == 200
        await _load(server, "one", "one")
        ended = [asyncio.create_task(_complete(http, "one", max_tokens=100, n=4)) for _ in range(4)]
        await _until_it_runs(server)
        response = await _unload(server, "one", mode=UNLOAD.MODE_ABORT)
        assert response.num_ended_requests >= 1
        for each in await asyncio.gather(*ended):
            assert each.status_code in (200, 400, 404)
        assert [each.name for each in (await _list(server)).adapters] == ["start"]


async def test_others_decode_on_while_an_adapter_is_read(
    tiny: Tiny, server: FrontendServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's issue 13698: weights that come slowly hold up nobody, nor do wrong ones."""
    answered, names = threading.Semaphore(0), ["base", "start"]

    def slowly(*arguments: Any) -> LoadedWeights:
        while answered.acquire(blocking=False):
            pass  # what was answered before
        for _ in range(4 * len(names)):
            assert answered.acquire(timeout=60), "nobody is answered while an adapter is read"
        return load_weights(*arguments)

    monkeypatch.setattr(worker_adapters, "load_weights", slowly)
    loaded = False

    async def keep_asking(name: str) -> None:
        while not loaded:
            assert await _tokens(http, name) == tiny.expected(name)
            answered.release()

    async with _http(server) as http:
        asking = asyncio.gather(*(keep_asking(name) for name in names))
        try:
            await _load(server, "one", "one")
            with pytest.raises(grpc.aio.AioRpcError):
                await _load(server, "bad", "pickled")
            assert await _tokens(http, "one") == tiny.expected("one")
        finally:
            loaded = True
        await asking


async def test_an_adapter_s_own_chat_template_is_used(server: FrontendServer) -> None:
    await _load(server, "two", "two")
    message = inference_pb2.ChatMessage(role="user", content=[inference_pb2.ContentPart(text="hi")])
    async with grpc_stub(server) as stub:
        for model, prompt in (("two", "[hi]"), ("base", "<s>user\nhi</s>\n<s>assistant\n")):
            request = inference_pb2.RenderChatRequest(model=model, messages=[message])
            assert (await stub.RenderChat(request)).prompt == prompt


@pytest.fixture
async def sibling(engine: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FrontendServer]:
    """Another frontend of the engine, which asks it for its adapters only when it must."""
    monkeypatch.setattr(server_module, "_ADAPTER_POLL_S", 3600.0)
    async with frontend(engine) as server:
        yield server


async def test_another_frontend_s_adapters_are_found_at_once(
    tiny: Tiny, sibling: FrontendServer, server: FrontendServer
) -> None:
    await _load(server, "one", "one")
    async with _http(sibling) as http:
        assert (await http.get("/v1/models/one")).status_code == 200
        await _load(server, "two", "two")
        assert await _tokens(http, "two") == tiny.expected("two")
    await _load(server, "three", "two")
    message = inference_pb2.ChatMessage(role="user", content=[inference_pb2.ContentPart(text="hi")])
    async with grpc_stub(sibling) as stub:
        request = inference_pb2.RenderChatRequest(model="three", messages=[message])
        assert (await stub.RenderChat(request)).prompt == "[hi]"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.RenderChat(inference_pb2.RenderChatRequest(model="four", messages=[message]))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_an_update_by_another_frontend_never_meets_an_old_template(
    tiny: Tiny, sibling: FrontendServer, server: FrontendServer
) -> None:
    await _load(server, "mine", "start")
    async with _http(sibling) as http:
        assert await _tokens(http, "mine") == tiny.expected("start")
        await _load(server, "mine", "one", in_place=True)
        assert await _tokens(http, "mine") == tiny.expected("one"), "its text is read as before"
        await _load(server, "mine", "two", in_place=True)
        refused = await _complete(http, "mine")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "0")
        assert "chat template" in refused.json()["error"]["message"]
        assert await _tokens(http, "mine") == tiny.expected("two")


async def test_metrics_count_adapters(server: FrontendServer) -> None:
    async with _http(server) as http:
        await _tokens(http, "start")
        text = (await http.get("/metrics")).text
    assert 'pagewire_lora_adapters{model_name="base",place="loaded"} 1.0' in text
    assert "pagewire_lora_host_loads_total" in text


@pytest.mark.slow
def test_two_hundred_loads_and_unloads_keep_memory_and_blocks(tiny: Tiny) -> None:
    """vLLM's issue 54839."""
    large = tiny.adapters.parent / "large"
    write_tiny_adapter(large, tiny.references["base"], r=64)  # half a megabyte
    params = SamplingParams(temperature=0, max_tokens=2)
    process = psutil.Process()
    with LLM(
        str(tiny.model), enable_lora=True, num_gpu_blocks_override=64, max_model_len=64
    ) as llm:
        client = llm._model.generation.client
        sizes = []
        for count in range(230):
            llm.generate(
                {"prompt_token_ids": [count % 300, *PROMPT]},
                params,
                lora_request=LoRARequest(f"a{count}", 1, str(large)),
                use_tqdm=False,
            )
            llm._model.run(client.unload_adapter(UNLOAD(name=f"a{count}")))
            sizes.append(process.memory_info().rss)
        assert not llm._model.run(client.list_adapters()).adapters
        stats = llm._model.run(client.stats(1.0))
        assert stats.num_free_blocks + stats.num_cached_blocks == 64
        assert (stats.adapters.num_on_host, stats.adapters.num_on_device) == (0, 0)
    assert sizes[-1] - sizes[29] < 20e6, "100 MB of weights came and went"


def test_an_adapter_s_content_decides_offline(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(tiny.adapters / "one", folder)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPT}

    with LLM(str(tiny.model), enable_lora=True, num_gpu_blocks_override=64) as llm:

        def tokens(lora: LoRARequest | None) -> list[int]:
            output = llm.generate(prompt, params, lora_request=lora, use_tqdm=False)[0]
            return list(output.outputs[0].token_ids)

        mine = LoRARequest("mine", 1, str(folder))
        assert tokens(mine) == tiny.expected("one")
        shutil.rmtree(folder)
        shutil.copytree(tiny.adapters / "two", folder)
        assert tokens(mine) == tiny.expected("two")
        assert tokens(None) == tiny.expected("base")
        two = llm.chat([{"role": "user", "content": "hi"}], params, lora_request=mine)[0]
        assert two.prompt == "[hi]"
