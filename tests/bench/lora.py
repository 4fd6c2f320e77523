"""Throughput with adapters beside the base model's: `python -m tests.bench.lora --model M`.

So many requests are in flight; one run asks the base model alone, the other so many adapters in
turns. The target is a ratio of 0.8 on CPU, and on an H100 (8B shape, rank 16) of 0.85.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
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


async def main(arguments: argparse.Namespace) -> None:
    """Prints tokens a second of both, and their ratio."""
    config = EngineConfig(
        model=arguments.model,
        load_format=arguments.load_format,
        quantization=arguments.quantization,
        skip_tokenizer_init=True,
        enable_lora=True,
        max_loras=arguments.adapters,
        max_lora_rank=arguments.rank,
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    client = InProcessEngineClient(config)
    await client.start()
    names = [f"adapter-{number}" for number in range(arguments.adapters)]
    with tempfile.TemporaryDirectory() as folder:
        model = client._built.executor._live_worker._model  # type: ignore[union-attr]
        for seed, name in enumerate(names):
            write_adapter(Path(folder) / name, model, arguments.rank, seed)
            request = engine_pb2.LoadAdapterRequest(name=name, path=str(Path(folder) / name))
            await client.load_adapter(request)
    for turn in range(arguments.turns):
        base = await measure(client, [""], arguments.in_flight, arguments.tokens)
        adapted = await measure(client, names, arguments.in_flight, arguments.tokens)
        print(
            f"turn {turn + 1}: base {base:.1f} tok/s, {len(names)} adapters {adapted:.1f} tok/s, "
            f"ratio {adapted / base:.3f}",
            flush=True,
        )
    await client.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    asyncio.run(main(parser.parse_args()))
