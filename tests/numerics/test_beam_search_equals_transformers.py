"""A beam search in the engine gives the sequences that transformers' `generate` gives, in fp32;
and in company, in chunks and after preemption the same once more."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.beam_search_params import BeamSearchParams
from pagewire.config import EngineConfig
from pagewire.outputs import FinishReason
from pagewire_engine.engine import Engine
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.model_files import resolve_model
from pagewire_engine.outputs import SequenceOutput
from pagewire_engine.queues import SchedulerSettings
from pagewire_engine.stats import EngineStats
from pagewire_engine.submission import Submission
from tests.fakes.engine_run import steps_to_end
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_model
from tests.numerics.test_smollm2_equals_transformers import model_path, reference

__all__ = ["model_path", "reference"]

Answers = dict[str, list[SequenceOutput]]


def run(
    model: Path,
    requests: list[Submission],
    eos_token_ids: list[int],
    *,
    num_blocks: int = 256,
    max_num_batched_tokens: int = 256,
    block_size: int = 4,
    swap_space: int = 0,
) -> tuple[Answers, EngineStats]:
    """All requests together, to their end."""
    config = EngineConfig(
        model=str(model),
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=block_size,
        num_gpu_blocks_override=num_blocks,
        swap_space=swap_space,
        max_model_len=min(128, num_blocks * block_size),
    )
    executor = SingleProcessExecutor(config, resolve_model(config))
    settings = SchedulerSettings(
        max_num_seqs=32,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=executor.info().max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        num_cpu_blocks=executor.info().num_cpu_blocks,
    )
    engine = Engine(executor, eos_token_ids=eos_token_ids, settings=settings)
    answers: Answers = {request.request_id: [] for request in requests}
    try:
        for request in requests:
            engine.add(request)
        for outputs in steps_to_end(engine):
            for output in outputs.sequences:
                answers[output.request_id].append(output)
    finally:
        executor.shutdown()
    return answers, engine.stats()


def submission(request_id: str, prompt: list[int], **params: Any) -> Submission:
    return Submission(request_id, prompt, BeamSearchParams(**params).as_sampling_params())


def expected(
    model: Any, prompt: list[int], eos_token_ids: list[int], params: dict[str, Any]
) -> tuple[list[list[int]], list[float] | None]:
    """What transformers gives: the outputs without padding, and their scores; it knows no scores
    of one beam, which is greedy decoding to it."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            num_beams=params["beam_width"],
            num_return_sequences=params.get("n", params["beam_width"]),
            max_new_tokens=params["max_tokens"],
            length_penalty=params.get("length_penalty", 1.0),
            early_stopping=params.get("early_stopping", False),
            eos_token_id=eos_token_ids or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    outputs = []
    for row in found.sequences[:, len(prompt) :].tolist():
        ends = [n for n, token_id in enumerate(row) if token_id in eos_token_ids]
        outputs.append(row[: ends[0] + 1] if ends else row)
    scores = found.sequences_scores.tolist() if params["beam_width"] > 1 else None
    return outputs, scores


def _prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


# Random models have no favourite end of sequence: several make early ends likely.
_EOS = list(range(4, VOCAB_SIZE, 21))
_CASES: list[dict[str, Any]] = [
    {"beam_width": 4, "max_tokens": 20},
    {"beam_width": 3, "max_tokens": 24, "n": 2, "length_penalty": 0.0, "early_stopping": "never"},
    {"beam_width": 2, "max_tokens": 24, "length_penalty": 2.0, "early_stopping": "never"},
    {"beam_width": 5, "max_tokens": 16, "length_penalty": -1.0, "early_stopping": True},
    {"beam_width": 4, "max_tokens": 20, "length_penalty": 0.6, "early_stopping": True, "n": 1},
    {"beam_width": 1, "max_tokens": 12},
]


@pytest.fixture(
    scope="module",
    params=["llama-biases-untied-odd-heads", "qwen2-window-in-upper-layers", "opt-norm-before"],
)
def tiny_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("beams") / request.param
    return folder, write_tiny_model(folder, request.param)


@pytest.mark.parametrize("eos_token_ids", [[], _EOS[:1], _EOS], ids=["none", "one", "many"])
def test_tiny_models_give_what_transformers_gives(
    tiny_model: tuple[Path, Any], eos_token_ids: list[int]
) -> None:
    folder, model = tiny_model
    prompts = [_prompt(number, 9 + 5 * number) for number in range(len(_CASES))]
    requests = [
        submission(str(number), prompts[number], **case) for number, case in enumerate(_CASES)
    ]
    together, stats = run(folder, requests, eos_token_ids)
    assert stats.num_beam_forks > 0
    assert stats.num_block_copies > 0
    reasons = set()
    for number, case in enumerate(_CASES):
        tokens, scores = expected(model, prompts[number], eos_token_ids, case)
        ours = together[str(number)]
        assert [output.token_ids for output in ours] == tokens, case
        reasons.update(output.finish_reason for output in ours)
        for output, score in zip(ours, scores or (), strict=scores is not None):
            length = len(output.token_ids) ** case.get("length_penalty", 1.0)
            assert output.cumulative_logprob / length == pytest.approx(score, rel=1e-4)
    assert FinishReason.LENGTH in reasons
    if len(eos_token_ids) > 1:
        assert FinishReason.STOP in reasons, "no sequence ended: other ids are needed"


@pytest.mark.parametrize("swap_space", [0, 1 << 20], ids=["recompute", "swap"])
def test_company_chunks_and_preemption_change_nothing(
    tiny_model: tuple[Path, Any], swap_space: int
) -> None:
    folder, _ = tiny_model
    requests = [
        submission(str(number), _prompt(50 + number, 14 + number), beam_width=4, max_tokens=24)
        for number in range(3)
    ]
    alone: Answers = {}
    for request in requests:
        answer, stats = run(folder, [request], _EOS)
        assert stats.num_preemptions == 0
        alone |= answer
    pressed, stats = run(
        folder,
        requests,
        _EOS,
        num_blocks=20,
        max_num_batched_tokens=12,
        swap_space=swap_space,
    )
    assert stats.num_preemptions > 0
    assert (stats.num_swaps > 0) == (swap_space > 0)
    assert stats.num_prefill_chunks > 2 * len(requests)
    for request in requests:
        ours = [output.token_ids for output in pressed[request.request_id]]
        assert ours == [output.token_ids for output in alone[request.request_id]]


@pytest.mark.slow
def test_smollm2_gives_what_transformers_gives(model_path: Path, reference: Any) -> None:
    from tokenizers import Tokenizer

    from pagewire_engine.tokenizer_files import load_tokenizer_files

    files = load_tokenizer_files(model_path.parent, model_path, mode="auto")
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    eos = tokenizer.token_to_id("<|im_end|>")
    prompt = tokenizer.encode(
        "<|im_start|>user\nName one colour.<|im_end|>\n<|im_start|>assistant\n"
    ).ids
    cases: list[dict[str, Any]] = [
        {"beam_width": 4, "max_tokens": 24},
        {"beam_width": 3, "max_tokens": 24, "length_penalty": 0.0, "early_stopping": True},
    ]
    requests = [submission(str(n), prompt, **case) for n, case in enumerate(cases)]
    answers, stats = run(model_path, requests, [eos], block_size=16)
    assert stats.num_beam_forks > 0
    for number, case in enumerate(cases):
        tokens, _ = expected(reference, prompt, [eos], case)
        assert [output.token_ids for output in answers[str(number)]] == tokens, case
