"""What transformers says of prompts and answers, and how far an engine may be from it.

Nothing here needs a GPU: the functions work on any device.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagewire.config import EngineConfig
from pagewire.outputs import PositionLogprobs
from pagewire.sampling_params import SamplingParams
from pagewire_engine.build import assemble_engine
from pagewire_engine.engine import Engine
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.model_files import resolve_model
from pagewire_engine.stats import EngineStats
from pagewire_engine.submission import Submission
from tests.fakes.engine_run import steps_to_end

# Logits of a token that is not the likeliest for transformers may fall short of that one's by so
# much in fp32: nearly a tie.
_NEARLY_EQUAL = 1e-3
# Roundings that two implementations place differently: an engine in bf16 may be so many times as
# far from fp32 as transformers in bf16 is.
_TIMES_AS_FAR = 1.5
_TOP = 8


@dataclass(frozen=True)
class Answer:
    """One request's prompt and greedy answer.

    Attributes:
        prompt, output: token ids.
        logprobs: raw, one entry a token of the output, with the likeliest alternatives.
        prompt_logprobs: of all tokens of the prompt but the first.
    """

    prompt: list[int]
    output: list[int]
    logprobs: list[PositionLogprobs]
    prompt_logprobs: list[PositionLogprobs]


@dataclass(frozen=True)
class Answers:
    """Answers of one engine, and what it counted."""

    answers: list[Answer]
    again: list[Answer]
    stats: EngineStats


def ask(config: EngineConfig, prompts: Sequence[list[int]], new_tokens: int) -> Answers:
    """Greedy answers of an engine of its own to all prompts at once.

    Where the prefix cache is on, the prompts are then asked again: without log probabilities of
    the prompt, which are not cached.
    """
    executor = SingleProcessExecutor(config, resolve_model(config))
    try:
        engine = assemble_engine(executor, config, eos_token_ids=())
        caches = config.enable_prefix_caching
        answers = _ask(engine, prompts, new_tokens, of_prompts=not caches)
        again = _ask(engine, prompts, new_tokens, of_prompts=False) if caches else []
        stats = engine.stats()
        engine.close()
    finally:
        executor.shutdown()
    return Answers(answers, again, stats)


def _ask(
    engine: Engine, prompts: Sequence[list[int]], new_tokens: int, *, of_prompts: bool
) -> list[Answer]:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=new_tokens,
        ignore_eos=True,
        logprobs=_TOP,
        prompt_logprobs=0 if of_prompts else None,
    )
    answers = {str(number): Answer(prompt, [], [], []) for number, prompt in enumerate(prompts)}
    for name, answer in answers.items():
        engine.add(Submission(name, answer.prompt, params))
    for outputs in steps_to_end(engine):
        for told in outputs.prompt_logprobs:
            answers[told.request_id].prompt_logprobs.extend(told.positions)
        for sequence in outputs.sequences:
            answers[sequence.request_id].output.extend(sequence.token_ids)
            answers[sequence.request_id].logprobs.extend(sequence.logprobs or ())
    return list(answers.values())


class Reference:
    """A transformers model in fp32 and in bf16."""

    def __init__(self, model: Any) -> None:
        """`model`: in fp32, on the device to compute on."""
        self.model = model

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """fp32 [len(ids), vocab_size]."""
        return self._logits(self.model, ids)

    @torch.inference_mode()
    def logprobs(
        self, sequences: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Log probabilities in fp32 of the model in this dtype, [len, vocab_size] each."""
        rounded = copy.deepcopy(self.model).to(dtype)
        # As transformers loads a model: the frequencies of rotary embeddings are fp32.
        for own, buffer in zip(self.model.buffers(), rounded.buffers(), strict=True):
            buffer.data = own.data.clone()
        return [self._logits(rounded, ids).log_softmax(-1) for ids in sequences]

    def _logits(self, model: Any, ids: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = model(
            torch.tensor([list(ids)], device=model.device), use_cache=False
        ).logits[0]
        return logits.float()


def check_greedy(reference: Reference, answers: Sequence[Answer]) -> None:
    """Each token is transformers' choice after all before it, so by induction the whole answer is;
    a tie may go either way."""
    for answer in answers:
        logits = reference.logits(answer.prompt + answer.output[:-1])[len(answer.prompt) - 1 :]
        output = torch.tensor(answer.output, device=logits.device)
        chosen = logits.gather(1, output[:, None])[:, 0]
        behind = logits.max(-1).values - chosen
        wrong = int((behind > _NEARLY_EQUAL).sum())
        assert wrong == 0, f"{wrong} of {len(output)} tokens are not transformers', by {behind}"


def check_logprobs(
    reference: Reference, answers: Sequence[Answer], dtype: torch.dtype, tolerance: float
) -> None:
    """Log probabilities are as near to transformers' in fp32 as transformers itself is in `dtype`.

    Args:
        reference: the model.
        answers: with the log probabilities of prompts, or without.
        dtype: that the engine ran in.
        tolerance: how far off any one may be, besides.
    """
    sequences = [answer.prompt + answer.output[:-1] for answer in answers]
    exact = reference.logprobs(sequences, torch.float32)
    rounded = reference.logprobs(sequences, dtype)
    ours, theirs = [], []
    for answer, row_exact, row_rounded in zip(answers, exact, rounded, strict=True):
        positions = [*answer.prompt_logprobs, *answer.logprobs]
        first = len(answer.prompt) - 1 - len(answer.prompt_logprobs)
        for row, position in enumerate(positions, first):
            for token in (position.token, *position.top):
                right = row_exact[row, token.token_id].item()
                ours.append(abs(token.logprob - right))
                theirs.append(abs(row_rounded[row, token.token_id].item() - right))
    mean, allowed = sum(ours) / len(ours), _TIMES_AS_FAR * sum(theirs) / len(theirs) + 1e-5
    assert mean <= allowed, f"log probabilities are {mean:.2e} off, {allowed:.2e} allowed"
    assert max(ours) <= tolerance, f"one is {max(ours):.2e} off, {tolerance:.2e} allowed"


def model_config(folder: Path, **settings: Any) -> EngineConfig:
    """Settings of a small engine for the model in `folder`."""
    return EngineConfig.model_validate(
        {
            "model": str(folder),
            "num_gpu_blocks_override": 1024,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 2048,
            "enable_prefix_caching": False,
            "swap_space": 0,
            **settings,
        }
    )
