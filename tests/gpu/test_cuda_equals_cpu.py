"""The same code on CUDA: every architecture, the sampler, and the real model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagewire.config import EngineConfig
from pagewire.sampling_params import SamplingParams
from pagewire_engine.build import assemble_engine
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.model_files import load_description, resolve_model
from pagewire_engine.stats import EngineStats
from pagewire_engine.submission import Submission
from tests.fakes.engine_run import Answers, answers_to
from tests.fakes.tiny_models import TINY_MODELS, VOCAB_SIZE, write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NEW_TOKENS = 24
PROMPTS = [[(i * i + 3 * i * n + n) % VOCAB_SIZE for i in range(n)] for n in (5, 21, 34)]
ALL_PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2),
    SamplingParams(
        n=2,
        temperature=0.8,
        top_p=0.9,
        top_k=40,
        repetition_penalty=1.1,
        seed=11,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
    ),
)


def answers(
    model: Path, device: str, dtype: str, *, num_blocks: int = 48
) -> tuple[Answers, EngineStats]:
    """What an engine of its own says to all prompts with all parameters at once."""
    config = EngineConfig(
        model=str(model),
        device=device,
        dtype=dtype,
        block_size=4 if num_blocks < 1000 else 16,
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=32,
        max_model_len=96,
    )
    files = resolve_model(config)
    executor = SingleProcessExecutor(config, files)
    engine = assemble_engine(executor, config, load_description(files, config).eos_token_ids)
    requests = [
        Submission(f"{number}-{len(prompt)}", prompt, params)
        for number, params in enumerate(ALL_PARAMS)
        for prompt in PROMPTS
    ]
    tokens = answers_to(engine, requests)
    stats = engine.stats()
    executor.shutdown()
    return tokens, stats


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_every_architecture_says_on_cuda_what_it_says_on_cpu(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    write_tiny_model(folder, name)
    on_cpu, _ = answers(folder, "cpu", "float32", num_blocks=400)
    on_cuda, stats = answers(folder, "cuda", "float32")
    assert on_cuda == on_cpu
    assert stats.num_preemptions > 0
    assert stats.num_prefill_chunks > len(PROMPTS) * len(ALL_PARAMS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_real_model_knows_paris(dtype: str, smollm2_path: Path) -> None:
    config = EngineConfig(
        model=str(smollm2_path), device="cuda", dtype=dtype, gpu_memory_utilization=0.2
    )
    files = resolve_model(config)
    executor = SingleProcessExecutor(config, files)
    # Profiling filled a fifth of the card's memory, less the weights, with blocks.
    block_bytes = 2 * 30 * 16 * 3 * 64 * (4 if dtype == "float32" else 2)
    _, total = torch.cuda.mem_get_info()
    assert executor.info().num_blocks * block_bytes < 0.2 * total
    engine = assemble_engine(executor, config, load_description(files, config).eos_token_ids)
    # "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    request = Submission("paris", prompt, SamplingParams(temperature=0.0, max_tokens=16))
    (output,) = answers_to(engine, [request])["paris"]
    assert 7042 in output  # " Paris"
    executor.shutdown()
