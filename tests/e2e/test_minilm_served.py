"""A real embedding model behind both wires: OpenAI's client and gRPC get what transformers computes
of the same texts."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import httpx
import openai
import pytest
import torch
import torch.nn.functional as F

from pagewire.config import EngineConfig
from pagewire.v1 import inference_pb2
from pagewire_engine.build import build_engine
from pagewire_engine.service import EngineServer
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from pagewire_frontend.server import FrontendServer
from tests.fakes.frontend import grpc_stub, running_frontend

MODEL = "all-MiniLM-L6-v2"
TEXTS = [
    "The cat sits outside",
    "A man is playing guitar",
    "Die Katze sitzt draußen 🐈",
    "many words " * 120,
    "x",
]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def engine_target(minilm_folder: Path) -> Iterator[str]:
    config = EngineConfig(
        model=str(minilm_folder),
        served_model_name=MODEL,
        device="cpu",
        num_threads=1,
        port=0,
        # Less than all of a long call's prompts have: they come in several steps.
        max_num_batched_tokens=300,
    )
    built = build_engine(config, lambda line: None)
    server = EngineServer(built, config)
    port = server.start()
    yield f"127.0.0.1:{port}"
    server.stop(grace_s=0.1)


@pytest.fixture
async def server(engine_target: str) -> AsyncIterator[FrontendServer]:
    async with running_frontend(RemoteEngineClient(engine_target)) as running:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            health = f"http://127.0.0.1:{running.http_port}/health"
            while (await http.get(health)).is_error:  # noqa: ASYNC110 (it tells no event)
                await asyncio.sleep(0.05)
        yield running


@pytest.fixture
async def client(server: FrontendServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{server.http_port}/v1", api_key="none", max_retries=0
    ) as made:
        yield made


@pytest.fixture(scope="module")
def expected(minilm_folder: Path) -> torch.Tensor:
    """The recipe of the model's card, with transformers' own tokenizer: [texts, 384]."""
    from transformers import AutoTokenizer, BertModel

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder)
    model = BertModel.from_pretrained(minilm_folder).eval()
    rows = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.inference_mode():
            rows.append(model(**inputs).last_hidden_state[0].mean(0))
    return F.normalize(torch.stack(rows))


async def test_openais_client_gets_the_embeddings(
    client: openai.AsyncOpenAI, expected: torch.Tensor
) -> None:
    """It asks for base64 by itself."""
    answer = await client.embeddings.create(model=MODEL, input=TEXTS)
    assert [item.index for item in answer.data] == list(range(len(TEXTS)))
    ours = torch.tensor([item.embedding for item in answer.data])
    assert (ours - expected).abs().max() < TOLERANCE
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 240
    plain = await client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
    assert (torch.tensor(plain.data[0].embedding) - expected[0]).abs().max() < TOLERANCE
    packed = await client.embeddings.with_raw_response.create(
        model=MODEL, input=TEXTS[0], encoding_format="base64"
    )
    data = base64.b64decode(packed.http_response.json()["data"][0]["embedding"])
    assert (torch.tensor(struct.unpack("<384f", data)) - expected[0]).abs().max() < TOLERANCE


async def test_grpc_gets_the_same(server: FrontendServer, expected: torch.Tensor) -> None:
    async with grpc_stub(server) as stub:
        answer = await stub.Embed(inference_pb2.EmbedRequest(texts=TEXTS))
        ours = torch.tensor([list(each.values) for each in answer.embeddings])
        assert (ours - expected).abs().max() < TOLERANCE
        scores = await stub.Score(inference_pb2.ScoreRequest(query=TEXTS[0], texts=TEXTS))
        cosines = expected @ expected[0]
        assert (torch.tensor(list(scores.scores)) - cosines).abs().max() < TOLERANCE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateUnary(inference_pb2.GenerateRequest(text="x"))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_many_at_once_are_what_each_is_alone(
    client: openai.AsyncOpenAI, expected: torch.Tensor
) -> None:
    async def one(n: int) -> float:
        order = [(n + k) % len(TEXTS) for k in range(len(TEXTS))]
        answer = await client.embeddings.create(model=MODEL, input=[TEXTS[i] for i in order])
        ours = torch.tensor([item.embedding for item in answer.data])
        return float((ours - expected[order]).abs().max())

    assert max(await asyncio.gather(*(one(n) for n in range(8)))) < TOLERANCE


async def test_what_is_asked_for_in_vain_is_told(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="takes 256") as caught:
        await client.embeddings.create(model=MODEL, input=["fine", "word " * 300])
    assert caught.value.param == "input[1]"
    with pytest.raises(openai.BadRequestError, match="generates no text"):
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
    with pytest.raises(openai.BadRequestError) as caught:
        await client.embeddings.create(model=MODEL, input="x", dimensions=64)
    assert caught.value.param == "dimensions"
