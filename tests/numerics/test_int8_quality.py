"""What rounding the embedded model's weights to int8 costs: next to nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from pagewire_engine.tokenizer_files import load_tokenizer_files
from tests.fakes.step_driver import StepDriver, load
from tests.numerics.test_smollm2_equals_transformers import PROMPTS

TEXT = (
    "The moon pulls at the water of the sea, and the water rises. Twice a day it comes up the "
    "beach, and twice a day it goes back again. Sailors have known this for thousands of years, "
    "long before anybody could say why. It was Isaac Newton who explained that the same force "
    "which makes an apple fall from a tree also holds the moon in its path around the earth."
)
# In nats a token of the text, of which the exact model needs 2.96; measured: 0.004.
MOST_NATS = 0.02
# Root mean square, as a share of the logits' standard deviation; measured: 0.062.
MOST_LOGIT_ERROR = 0.1


@pytest.mark.slow
def test_int8_predicts_as_well_and_answers_alike(smollm2_path: Path, backend: str) -> None:
    files = load_tokenizer_files(smollm2_path.parent, smollm2_path, mode="auto")
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    text, question = tokenizer.encode(TEXT).ids, tokenizer.encode(PROMPTS[0]).ids
    logits, answers = [], []
    for quantize in (False, True):
        model, description = load(smollm2_path, quantize=quantize)
        driver = StepDriver(
            model, description.vocab_size, block_size=16, chunk=64, num_blocks=32, backend=backend
        )
        outputs, rows = driver.greedy([text, question], 12)
        logits.append(rows[0][: len(text)])
        answers.append(tokenizer.decode(outputs[1]))
    assert all("Paris" in answer for answer in answers)
    targets = torch.tensor(text[1:])
    exact, rounded = (torch.nn.functional.cross_entropy(rows[:-1], targets) for rows in logits)
    assert abs(rounded - exact) < MOST_NATS
    error = (logits[1] - logits[0]).square().mean().sqrt() / logits[0].std()
    assert error < MOST_LOGIT_ERROR
