"""`pagewire serve` with the small real model and adapters for it, as `make serve` starts it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pagewire_engine.tokenizer_files import load_tokenizer_files
from tests.e2e.serve_process import MODEL, Served, ServeProcess
from tests.fakes.ports import free_port

PIRATE = Path(__file__).resolve().parents[2] / "adapters" / "pirate"
# The pirate's own template, in `own-text`.
OWN_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>system
Captain's own template<|im_end|>
<|im_start|>assistant
"""
NUM_SEQUENCES = 4
_NUM_LAYERS, _HIDDEN = 30, 576


def write_noise(folder: Path, *, seed: int, rank: int = 4) -> None:
    """A random adapter for the model's queries, large enough to be heard in any answer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 32, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    numbers = np.random.default_rng(seed)
    weights = {}
    for layer in range(_NUM_LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        for half, shape in (("lora_A", (rank, _HIDDEN)), ("lora_B", (_HIDDEN, rank))):
            values = numbers.normal(0, 0.2, shape).astype(np.float32)
            weights[f"{name}.{half}.weight"] = values
    save_file(weights, folder / "adapter_model.safetensors")


def write_adapters(folder: Path, model: Path) -> None:
    """Adapters to load, and some that can't be."""
    shutil.copytree(PIRATE, folder / "pirate")
    shutil.copytree(PIRATE, folder / "own-text")
    (folder / "own-text" / "chat_template.jinja").write_text(OWN_TEMPLATE)
    tokenizer = json.loads(load_tokenizer_files(model.parent, model, mode="auto")["tokenizer.json"])
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (folder / "own-text" / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_noise(folder / "noise", seed=7)
    write_noise(folder / "too-wide", seed=7, rank=128)
    shutil.copytree(PIRATE, folder / "pickled")
    (folder / "pickled" / "adapter_model.safetensors").rename(
        folder / "pickled" / "adapter_model.bin"
    )


@contextmanager
def served_stack(folder: Path, model: Path, lora_dir: Path) -> Iterator[Served]:
    """Engine, frontend and page as processes under their supervisor."""
    flags = [
        str(model),
        f"--served-model-name={MODEL}",
        "--http-port=0",
        "--grpc-port=0",
        f"--ui-port={free_port()}",
        "--max-model-len=1024",
        "--kv-cache-memory=100000000",
        f"--max-num-seqs={NUM_SEQUENCES}",
        "--enable-lora",
        "--max-loras=2",
        f"--lora-dir={lora_dir}",
        "--allow-runtime-lora-updating",
        "--allow-request-chat-template",
        "--allow-watch-stats",
    ]
    with ServeProcess(flags, cwd=folder) as process:
        process.wait_for("pagewire is ready", timeout_s=400)
        yield Served(process)
