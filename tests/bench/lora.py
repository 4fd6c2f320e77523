"""Throughput with adapters beside the base model's: `python -m tests.bench.lora --model M`.

So many requests are in flight; one run asks the base model alone, the other so many adapters in
turns, and both take turns in one process. The target is a ratio of 0.8 on CPU, and on an H100 of
0.85: `python -m tests.bench.lora --model 8b --load-format dummy --device cuda`, which needs no
network. `--plain` measures first an engine that was started without adapters.

Prints a line of JSON: tokens a second of each turn, the ratio of each pair of turns, and the
median of these; what people read goes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pagewire.config import EngineConfig
from pagewire.sampling_params import SamplingParams
from pagewire.v1 import engine_pb2
from pagewire_engine.models.layers import Linear
from pagewire_engine.worker.adapter_loading import adapted_layers
from pagewire_frontend.engine_client.base import EngineRequest
from pagewire_frontend.engine_client.in_process import InProcessEngineClient
from tests.bench.gpu.workloads import MODELS

PROMPT_TOKENS = 64


def write_adapter(folder: Path, model: Any, rank: int, seed: int) -> None:
    """Random pairs for every linear layer of a model of ours."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for path, layer in adapted_layers(model):
        if not isinstance(layer, Linear):
            continue
        for name, outputs in layer.adapted_parts(path).items():
            down = torch.randn(rank, layer.in_features, generator=generator) * 0.01
            up = torch.randn(outputs, rank, generator=generator) * 0.01
            tensors[f"base_model.model.{name}.lora_A.weight"] = down.bfloat16()
            tensors[f"base_model.model.{name}.lora_B.weight"] = up.bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = f'{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}}}'
    (folder / "adapter_config.json").write_text(config)


async def measure(
    client: InProcessEngineClient, adapters: list[str], in_flight: int, num_tokens: int
) -> float:
    """Tokens a second of so many requests at once, their adapters in turns."""
    draw = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    vocab_size = client.model_info.vocab_size

    async def run(number: int) -> None:
        prompt = [draw.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
        name = adapters[number % len(adapters)]
        request = EngineRequest(f"{name}-{number}-{time.monotonic()}", prompt, params, adapter=name)
        async for _ in await client.submit(request):
            pass

    started = time.monotonic()
    await asyncio.gather(*(run(number) for number in range(in_flight)))
    return in_flight * num_tokens / (time.monotonic() - started)


@asynccontextmanager
async def started(
    arguments: argparse.Namespace, *, enable_lora: bool
) -> AsyncIterator[InProcessEngineClient]:
    """An engine, warmed up."""
    known = MODELS.get(arguments.model)
    settings: dict[str, Any] = {"enable_lora": True} if enable_lora else {}
    if enable_lora:
        settings |= {"max_loras": arguments.adapters, "max_lora_rank": arguments.rank}
    config = EngineConfig(
        model=str(known.folder) if known else arguments.model,
        load_format=arguments.load_format,
        quantization=arguments.quantization,
        device=arguments.device,
        dtype=arguments.dtype,
        skip_tokenizer_init=True,
        max_model_len=1024,
        enable_prefix_caching=False,
        **settings,
    )
    client = InProcessEngineClient(config, lambda line: print(line, file=sys.stderr))
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def load_adapters(client: InProcessEngineClient, count: int, rank: int) -> list[str]:
    """Loads so many random adapters; their names."""
    names = [f"adapter-{number}" for number in range(count)]
    assert client._built is not None
    with tempfile.TemporaryDirectory() as folder:
        model = client._built.executor._live_worker._model  # type: ignore[attr-defined]
        for seed, name in enumerate(names):
            write_adapter(Path(folder) / name, model, rank, seed)
            request = engine_pb2.LoadAdapterRequest(name=name, path=str(Path(folder) / name))
            await client.load_adapter(request)
    return names


async def measure_turns(
    client: InProcessEngineClient, turns: int, kinds: dict[str, list[str]], *work: int
) -> dict[str, list[float]]:
    """Tokens a second of each kind of request, in turns, after one that is not counted."""
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(turns + 1):
        for kind, adapters in kinds.items():
            rate = await measure(client, adapters, *work)
            if turn:
                found[kind].append(round(rate, 1))
        shown = ", ".join(f"{kind} {rates[-1]} tok/s" for kind, rates in found.items() if rates)
        print(f"turn {turn}: {shown or 'warm'}", file=sys.stderr, flush=True)
    return found


async def main(arguments: argparse.Namespace) -> None:
    """Prints tokens a second of both, and their ratio."""
    work = arguments.in_flight, arguments.tokens
    line: dict[str, Any] = {"test": "lora"} | vars(arguments)
    if arguments.plain:
        async with started(arguments, enable_lora=False) as client:
            line |= await measure_turns(client, arguments.turns, {"plain_tok_s": [""]}, *work)
    async with started(arguments, enable_lora=True) as client:
        line["device"], line["dtype"] = arguments.device, client.model_info.dtype
        names = await load_adapters(client, arguments.adapters, arguments.rank)
        kinds = {"base_tok_s": [""], "adapters_tok_s": names}
        line |= await measure_turns(client, arguments.turns, kinds, *work)
    pairs = zip(line["base_tok_s"], line["adapters_tok_s"], strict=True)
    line["ratios"] = [round(adapted / base, 3) for base, adapted in pairs]
    line["ratio"] = statistics.median(line["ratios"])
    if arguments.plain:
        plain, adapted = (
            statistics.median(line[kind]) for kind in ("plain_tok_s", "adapters_tok_s")
        )
        line["ratio_to_plain"] = round(adapted / plain, 3)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help=f"a model, or a shape: {', '.join(MODELS)}")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="measure without --enable-lora too")
    asyncio.run(main(parser.parse_args()))
