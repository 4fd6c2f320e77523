"""Embeddings and classes equal what transformers computes, alone and in a batch, in fp32 on CPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from pagewire.pooling import PoolingParams, Task
from pagewire_engine.models.base import Encoder
from tests.fakes.pooling_driver import PoolingDriver
from tests.fakes.tiny_models import (
    BERT_LABELS,
    VOCAB_SIZE,
    write_sentence_transformers_files,
    write_tiny_bert,
    write_tiny_model,
)

# What DESIGN asks of embeddings in fp32.
TOLERANCE = 1e-5
# Products of other batch sizes may be rounded in another order.
BATCHING = 1e-6
RAW = PoolingParams(use_activation=False)

TEXTS = [
    "That is a happy person",
    "a",
    "Die Gezeiten folgen dem Mond. 海は広いな 🦊 naïve",
    "pages " * 254,  # with [CLS] and [SEP] as long as the model takes
    "",
    "paged attention, continuous batching, and one request that is longer than the others",
]


def assert_close(
    ours: Sequence[float], expected: torch.Tensor, tolerance: float = TOLERANCE
) -> None:
    assert len(ours) == len(expected)
    assert (torch.tensor(ours) - expected).abs().max() < tolerance


def last_hidden(model: Any, ids: Sequence[int], **inputs: Any) -> torch.Tensor:
    """[T, hidden], of one sequence alone."""
    with torch.inference_mode():
        hidden: torch.Tensor = model(
            torch.tensor([list(ids)]), output_hidden_states=True, **inputs
        ).hidden_states[-1][0]
    return hidden


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def test_minilm_equals_sentence_transformers_recipe(minilm_folder: Path, backend: str) -> None:
    """Its recipe: the mean of the last hidden states, scaled to length 1."""
    from transformers import BertModel

    tokenizer = Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    assert max(map(len, ids)) == 256
    reference = BertModel.from_pretrained(minilm_folder).eval()
    with PoolingDriver(minilm_folder, attention_backend=backend) as driver:
        together = driver.vectors(ids)
        alone = [driver.vectors([one])[0] for one in ids]
        assert driver.built.info.num_blocks == 0
    for one, in_batch, by_itself in zip(ids, together, alone, strict=True):
        expected = F.normalize(last_hidden(reference, one).mean(0), dim=0)
        assert_close(in_batch, expected)
        assert_close(in_batch, torch.tensor(by_itself), BATCHING)


@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens", "lasttoken"])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_files_say_which_hidden_states_are_taken(
    tmp_path: Path, mode: str, normalize: bool
) -> None:
    reference = write_tiny_bert(tmp_path)
    write_sentence_transformers_files(tmp_path, mode, normalize=normalize)
    ids = prompts(1, 9, 32, 17)
    with PoolingDriver(tmp_path) as driver:
        vectors = driver.vectors(ids)
        overridden = driver.vectors(ids, PoolingParams(use_activation=not normalize))
    for one, ours, other in zip(ids, vectors, overridden, strict=True):
        hidden = last_hidden(reference, one)
        raw = {"cls_token": hidden[0], "mean_tokens": hidden.mean(0), "lasttoken": hidden[-1]}[mode]
        unit = F.normalize(raw, dim=0)
        assert_close(ours, unit if normalize else raw)
        assert_close(other, raw if normalize else unit)


def test_a_cut_embedding_has_the_length_one_too(tmp_path: Path) -> None:
    reference = write_tiny_bert(tmp_path, matryoshka_dimensions=[8, 16])
    (prompt,) = prompts(11)
    with PoolingDriver(tmp_path) as driver:
        (cut,) = driver.vectors([prompt], PoolingParams(dimensions=16))
    assert_close(cut, F.normalize(last_hidden(reference, prompt).mean(0)[:16], dim=0))


def test_classes_equal_transformers_for_texts_and_pairs(tmp_path: Path) -> None:
    reference = write_tiny_bert(tmp_path, labels=BERT_LABELS)
    ids = prompts(12, 7, 30)
    starts = (0, 4, 11)
    with PoolingDriver(tmp_path) as driver:
        assert driver.built.tasks == (Task.CLASSIFY,)
        assert driver.built.pooling is not None
        assert driver.built.pooling.labels == BERT_LABELS
        for one, start in zip(ids, starts, strict=True):
            params = PoolingParams(task=Task.CLASSIFY, second_text_start=start)
            segments = torch.zeros(1, len(one), dtype=torch.int64)
            segments[:, start or len(one) :] = 1
            with torch.inference_mode():
                logits = reference(torch.tensor([one]), token_type_ids=segments).logits[0]
            assert_close(driver.vectors([one], params)[0], logits.softmax(0))
            assert_close(
                driver.vectors([one], replace(params, use_activation=False))[0], logits, 1e-4
            )


@pytest.mark.parametrize(
    ("fields", "activated"),
    [
        ({}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"problem_type": "regression"}, False),
    ],
)
def test_a_cross_encoders_score_is_a_probability_unless_its_files_say_otherwise(
    tmp_path: Path, fields: dict[str, Any], activated: bool
) -> None:
    reference = write_tiny_bert(tmp_path, labels=("score",), **fields)
    (prompt,) = prompts(12)
    with torch.inference_mode():
        logit = reference(torch.tensor([prompt])).logits[0]
    with PoolingDriver(tmp_path) as driver:
        assert driver.built.tasks == (Task.CLASSIFY, Task.SCORE)
        params = PoolingParams(task=Task.CLASSIFY)
        assert_close(driver.vectors([prompt], params)[0], logit.sigmoid() if activated else logit)
        always = replace(params, use_activation=True)
        assert_close(driver.vectors([prompt], always)[0], logit.sigmoid())


@pytest.mark.parametrize("labels", [(), BERT_LABELS])
def test_zeroing_any_tensor_changes_the_vectors(tmp_path: Path, labels: tuple[str, ...]) -> None:
    write_tiny_bert(tmp_path, labels=labels)
    task = Task.CLASSIFY if labels else Task.EMBED
    params = PoolingParams(task=task, use_activation=False, second_text_start=9 if labels else 0)
    ids = prompts(23)
    with PoolingDriver(tmp_path, attention_backend="torch") as driver:
        model = driver.built.executor._worker._model  # type: ignore[attr-defined]
        assert isinstance(model, Encoder)
        whole = torch.tensor(driver.vectors(ids, params))
        unnoticed = []
        for name, place in model.checkpoint_tensors().items():
            kept = place.clone()
            place.zero_()
            if not (torch.tensor(driver.vectors(ids, params)) - whole).abs().max() > 1e-4:
                unnoticed.append(name)
            place.copy_(kept)
    # A key's bias adds the same to all scores of a query, which softmax ignores.
    assert all(name.endswith("key.bias") for name in unnoticed), unnoticed


@pytest.mark.parametrize("pooling_type", ["last", "mean"])
def test_a_causal_model_pools_in_chunks_and_from_the_cache(
    tmp_path: Path, pooling_type: str
) -> None:
    reference = write_tiny_model(tmp_path, "llama-biases-untied-odd-heads")
    ids = prompts(50, 3, 41)
    ids[2][:32] = ids[0][:32]
    with PoolingDriver(
        tmp_path,
        runner="pooling",
        pooling_type=pooling_type,
        max_num_batched_tokens=16,
        block_size=4,
        num_gpu_blocks_override=32,
    ) as driver:
        first = driver.vectors(ids, RAW)
        again = driver.vectors(ids, RAW)
        stats = driver.built.engine.stats()
    assert stats.num_prefill_chunks > 2 * len(ids)
    # A mean needs the hidden state of every token: the cache has none.
    assert (stats.prefix_cache_hits > 0) == (pooling_type == "last")
    for one, *ours in zip(ids, first, again, strict=True):
        hidden = last_hidden(reference, one)
        for vector in ours:
            assert_close(vector, hidden[-1] if pooling_type == "last" else hidden.mean(0), 1e-4)
