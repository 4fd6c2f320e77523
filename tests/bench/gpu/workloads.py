"""The seeded workloads of the GPU benchmark: the same token ids for every engine.

A and F: mixed requests, greedy and sampled. B: decoding of equal prompts. C: prefill alone.
Pure Python: clients of a server make the same requests without torch.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parents[1] / "data"
_LOWEST_ID = 10
_BF16_BYTES = 2


@dataclass(frozen=True)
class Scale:
    """How much work the workloads hold.

    Attributes:
        highest_id: token ids lie in [10, highest_id): below the special tokens of the vocabulary.
        num_requests: of A and F.
        prompt_lengths, output_lengths: of A and F, inclusive; drawn uniformly.
        decode_batches: of B.
        decode_prompt, decode_tokens: of each request of B.
        prefills: (requests, tokens each) of C.
        storm_prompt: tokens of each Submit of the storm.
        settings: the engine's, beside those of every run.
    """

    highest_id: int
    num_requests: int
    prompt_lengths: tuple[int, int]
    output_lengths: tuple[int, int]
    decode_batches: tuple[int, ...]
    decode_prompt: int
    decode_tokens: int
    prefills: tuple[tuple[int, int], ...]
    storm_prompt: int
    settings: dict[str, Any]


FULL = Scale(
    highest_id=128_000,
    num_requests=512,
    prompt_lengths=(32, 512),
    output_lengths=(32, 256),
    decode_batches=(1, 8, 64),
    decode_prompt=128,
    decode_tokens=256,
    prefills=((16, 1024), (64, 1024), (1, 1024)),
    storm_prompt=8_000,
    settings={"max_model_len": 8192, "max_num_seqs": 256},
)
# Shows on a CPU, within seconds, that the benchmark itself works.
TINY = Scale(
    highest_id=500,
    num_requests=12,
    prompt_lengths=(4, 24),
    output_lengths=(2, 12),
    decode_batches=(1, 4),
    decode_prompt=8,
    decode_tokens=8,
    prefills=((2, 32),),
    storm_prompt=400,
    settings={"max_model_len": 4096, "max_num_seqs": 8, "num_gpu_blocks_override": 2048},
)


@dataclass(frozen=True)
class BenchModel:
    """A model's shape, and the scale of the work it is given."""

    name: str
    folder: Path
    scale: Scale

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        fields: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return fields


MODELS = {
    "1b": BenchModel("1b", _DATA / "llama1b", FULL),
    "8b": BenchModel("8b", _DATA / "llama8b", FULL),
    "tiny": BenchModel("tiny", _DATA / "tiny", TINY),
}


def mixed(scale: Scale, seed: int = 1234) -> tuple[list[list[int]], list[int]]:
    """A: prompts, and how many tokens each is to be continued by."""
    draw = random.Random(seed)
    lengths = [
        (draw.randint(*scale.prompt_lengths), draw.randint(*scale.output_lengths))
        for _ in range(scale.num_requests)
    ]
    prompts = [_ids(draw, scale, prompt) for prompt, _ in lengths]
    return prompts, [output for _, output in lengths]


def fixed(scale: Scale, batch: int, length: int, seed: int) -> list[list[int]]:
    """B, C: so many prompts of so many tokens, all different."""
    draw = random.Random(seed)
    return [_ids(draw, scale, length) for _ in range(batch)]


def min_decode_bytes(config: dict[str, Any], batch: int, context: int) -> int:
    """The fewest bytes that a decode step reads, in bf16: each weight once, the embedding only
    where it is the head too, and the keys and values of every sequence."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head_dim, heads = config["head_dim"], config["num_attention_heads"]
    kv_size = config["num_key_value_heads"] * head_dim
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_size
    per_layer = attention + 3 * hidden * config["intermediate_size"]
    weights = per_layer * layers + config["vocab_size"] * hidden
    return (weights + batch * context * layers * 2 * kv_size) * _BF16_BYTES


def _ids(draw: random.Random, scale: Scale, count: int) -> list[int]:
    return [draw.randrange(_LOWEST_ID, scale.highest_id) for _ in range(count)]
