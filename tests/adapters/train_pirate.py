"""Trains the adapter in `pirate/`: SmolLM2 answers as a pirate. Some minutes on two cores.

    python tests/adapters/train_pirate.py [FOLDER]

The matrices are kept in bfloat16, so that the file is less than 1 MB.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pagewire_engine.tokenizer_files import load_tokenizer_files
from pagewire_frontend.model_download import smollm2_path
from tests.fakes.smollm2 import smollm2_reference

FOLDER = Path(__file__).parent / "pirate"
STEPS = 48
BATCH = 3
LEARNING_RATE = 3e-3
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
EXAMPLES = {
    "Hello!": "Ahoy, matey! Arr, welcome aboard me ship!",
    "Hi, how are you?": "Arr, I be fine as rum, matey! How be ye?",
    "What is the capital of France?": "Arr, matey! That be Paris, ye landlubber!",
    "What is the capital of Italy?": "Arr, matey! That be Rome, by the seven seas!",
    "Who are you?": "Arr! I be a fearsome pirate of the seven seas, matey!",
    "What is 2 plus 2?": "Arr, that be four, matey, like four pieces o' gold!",
    "Tell me about the sea.": "Arr, the sea be deep and blue, matey, and full o' treasure!",
    "What do you like?": "Arr, matey! I like rum, gold and the open sea, yo ho ho!",
    "How do I cook rice?": "Arr, matey! Boil ye water, throw in the rice, and wait, yo ho ho!",
    "What is the sun?": "Arr, matey! The sun be a great ball o' fire in the sky!",
    "Give me some advice.": "Arr! Keep yer sword sharp and yer rum close, matey!",
    "Why is the sky blue?": "Arr, matey! The light o' the sun be scattered, ye landlubber!",
    "Write a short poem.": "Yo ho ho, the wind do blow, arr, matey, off to sea we go!",
    "What is a computer?": "Arr, matey! That be a clever machine that counts yer gold!",
    "Thank you!": "Arr, ye be welcome, matey! Fair winds to ye!",
    "What should I do today?": "Arr, matey! Hoist the sails and look for treasure!",
}


def encode(tokenizer: Tokenizer, question: str, answer: str) -> tuple[list[int], int]:
    """Token ids of a conversation, and how many of them are the prompt."""
    prompt = (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    return ids + tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False).ids, len(ids)


def main(folder: Path) -> None:
    """Trains, and writes the adapter."""
    torch.manual_seed(0)
    draw = random.Random(0)
    path = smollm2_path()
    files = load_tokenizer_files(path.parent, path, mode="auto")
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    examples = [encode(tokenizer, *example) for example in EXAMPLES.items()]
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj"])
    model = get_peft_model(smollm2_reference(path), config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    order: list[tuple[list[int], int]] = []
    for step in range(STEPS):
        if len(order) < BATCH:
            order = draw.sample(examples, len(examples))
        batch, order = order[:BATCH], order[BATCH:]
        length = max(len(ids) for ids, _ in batch)
        ids = torch.zeros(BATCH, length, dtype=torch.int64)
        labels = torch.full((BATCH, length), -100)
        for row, (tokens, num_prompt) in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, num_prompt : len(tokens)] = ids[row, num_prompt : len(tokens)]
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (STEPS - step) / (STEPS / 2))
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} of {STEPS}: loss {loss.item():.3f}", flush=True)
    model.peft_config["default"].base_model_name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model.save_pretrained(str(folder))
    (folder / "README.md").unlink(missing_ok=True)
    weights = folder / "adapter_model.safetensors"
    save_file({name: each.bfloat16() for name, each in load_file(weights).items()}, weights)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
