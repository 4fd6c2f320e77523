"""Adapters that can't be served: the flag, both public APIs and the offline API tell the same of
each, by the name that each has for its folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire import LLM, LoRARequest, SamplingParams
from pagewire.config import EngineConfig
from pagewire.errors import PagewireError
from pagewire.v1 import engine_pb2, operations_pb2_grpc
from pagewire_engine.build import build_engine
from pagewire_engine.errors import StartupError
from pagewire_engine.service import EngineServer
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from tests.fakes.frontend import running_frontend
from tests.fakes.tiny_adapters import write_tiny_adapter
from tests.fakes.tiny_models import write_tiny_model

MAX_RANK = 16
Tensors = dict[str, torch.Tensor]


def _configured(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def _weighted(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        changed = {name: each.contiguous() for name, each in change(load_file(path)).items()}
        save_file(changed, path)

    return rewrite


def _pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")


# What is done to a sound adapter of rank 4, and what is said of it.
SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "dora": (_configured(use_dora=True), "DoRA"),
    "elsewhere": (
        _weighted(lambda t: {k.replace("model.layers", "transformer.h"): v for k, v in t.items()}),
        "matches no module",
    ),
    "other-rank": (_configured(r=5), "has rank 4, and adapter_config.json says 5"),
    "other-base": (
        _weighted(lambda t: {k: (v[:, :-8] if "lora_A" in k else v) for k, v in t.items()}),
        "of another model",
    ),
    "pickled": (_pickled, "safe_serialization=True"),
    "no-weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no"),
    "no-config": (lambda folder: (folder / "adapter_config.json").unlink(), "save_pretrained"),
    "high": (lambda folder: None, "--max-lora-rank 32"),
}
BAD = sorted(SPOILT)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and adapters beside it."""
    folder = tmp_path_factory.mktemp("bad")
    reference = write_tiny_model(folder / "model", "llama-llama3-rope-tied")
    write_tiny_adapter(folder / "sound", reference)
    for name, (spoil, _) in SPOILT.items():
        adapter = folder / "adapters" / name
        if name == "high":
            write_tiny_adapter(adapter, reference, r=32)
        else:
            shutil.copytree(folder / "sound", adapter)
        spoil(adapter)
    return folder


def _config(folders: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folders / "model"),
        port=0,
        enable_lora=True,
        lora_dir=str(folders / "adapters"),
        max_lora_rank=MAX_RANK,
        max_model_len=64,
        num_gpu_blocks_override=64,
        **fields,
    )


@pytest.fixture(scope="module")
def engine(folders: Path) -> Iterator[str]:
    config = _config(folders)
    server = EngineServer(build_engine(config, lambda line: None), config)
    yield f"127.0.0.1:{server.start()}"
    server.stop(grace_s=0.1)


async def test_both_apis_say_why_and_name_the_folder(engine: str) -> None:
    client: Any = RemoteEngineClient(engine)
    async with running_frontend(client, allow_runtime_lora_updating=True) as server:
        url = f"http://127.0.0.1:{server.http_port}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
        ):
            stub: Any = operations_pb2_grpc.AdaptersStub(channel)
            for name in BAD:
                says = SPOILT[name][1]
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Load(engine_pb2.LoadAdapterRequest(name="x", path=name))
                assert says in (caught.value.details() or ""), name
                assert (caught.value.details() or "").startswith("path: ")
                assert caught.value.code() in (
                    grpc.StatusCode.FAILED_PRECONDITION,
                    grpc.StatusCode.UNIMPLEMENTED,
                ), name
                body = {"lora_name": "x", "lora_path": name}
                answer = await http.post("/v1/load_lora_adapter", json=body)
                assert answer.status_code in (400, 501), name
                assert answer.json()["error"]["param"] == "lora_path"
                assert says in answer.json()["error"]["message"], name
            listed = await stub.List(engine_pb2.ListAdaptersRequest())
            assert not listed.adapters, "none is left half loaded"


def test_offline_says_why_and_serves_on(folders: Path) -> None:
    prompt, params = {"prompt_token_ids": [5, 6]}, SamplingParams(temperature=0, max_tokens=2)
    with LLM(
        str(folders / "model"),
        enable_lora=True,
        max_lora_rank=MAX_RANK,
        num_gpu_blocks_override=64,
        max_model_len=64,
    ) as llm:
        for name in BAD:
            adapter = LoRARequest(name, 1, str(folders / "adapters" / name))
            with pytest.raises(PagewireError) as caught:
                llm.generate(prompt, params, lora_request=adapter, use_tqdm=False)
            assert caught.value.field == "lora_path"
            assert SPOILT[name][1] in caught.value.message, name
        sound = LoRARequest("sound", 1, str(folders / "sound"))
        (output,) = llm.generate(prompt, params, lora_request=sound, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize("name", BAD)
def test_the_flag_says_why_and_the_engine_does_not_start(folders: Path, name: str) -> None:
    config = _config(folders, lora_modules=(f"mine={folders / 'adapters' / name}",))
    with pytest.raises(StartupError) as caught:
        build_engine(config, lambda line: None)
    assert caught.value.field == "lora_modules"
    assert caught.value.message.startswith("mine: ")
    assert SPOILT[name][1] in caught.value.message
