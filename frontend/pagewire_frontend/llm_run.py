"""The prompts of a call of `LLM`: all checked, then run, so many at a time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from tqdm.auto import tqdm

from pagewire.errors import PagewireError
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.answer_format import AnswerFormat
from pagewire_frontend.generation import Generation
from pagewire_frontend.generation_types import GenerationRequest
from pagewire_frontend.llm_outputs import RequestOutput, request_output


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of a call, checked and tokenised."""

    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    priority: int
    model: str
    answer: AnswerFormat | None = None


async def run_all(
    generation: Generation,
    requests: list[GenerationRequest],
    params: list[SamplingParams],
    most_in_flight: int,
    use_tqdm: bool,
) -> list[RequestOutput]:
    """Checks everything, then runs it, so many at a time."""
    jobs: list[Job] = []
    for n, (request, one) in enumerate(zip(requests, params, strict=True)):
        with naming(f"prompt {n}"):
            path = generation.for_model(request.model)
            token_ids = await path.tokenize_prompt(request)
            answer = request.answer
            num_tokens = len(token_ids) + (0 if answer is None else len(answer.prompt_end))
            limited = path.resolve(one, num_tokens, request.default_max_tokens)
            jobs.append(
                Job(request.prompt, token_ids, limited, request.priority, path.model_name, answer)
            )
    outputs: list[RequestOutput | None] = [None] * len(jobs)
    call = secrets.token_hex(4)
    # Those that the bound keeps out of the engine wait in its order.
    rest = iter(sorted(enumerate(jobs), key=lambda item: item[1].priority))
    with _Progress(len(jobs), enabled=use_tqdm) as progress:

        async def work() -> None:
            for n, job in rest:
                outputs[n] = output = await _run_one(generation, job, f"{call}-{n}")
                progress.count(output)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(most_in_flight, len(jobs))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return [output for output in outputs if output is not None]


async def _run_one(generation: Generation, job: Job, request_id: str) -> RequestOutput:
    request = GenerationRequest(
        request_id=request_id,
        model=job.model,
        prompt_token_ids=job.token_ids,
        sampling_params=job.params,
        priority=job.priority,
        answer=job.answer,
        # To wake a task for each token of each prompt would cost more than a small model's step.
        whole=True,
    )
    running = await generation.start(request)
    try:
        finished = await running.collect()
    finally:
        await running.aclose()
    return request_output(
        job.prompt,
        finished,
        generation.for_model(job.model).tokenizer_or_none,
        with_logprobs=job.params.logprobs is not None,
        with_prompt_logprobs=job.params.prompt_logprobs is not None,
        with_cumulative_logprob=(
            job.params.beam_search is not None or job.params.num_candidates > job.params.n
        ),
    )


class _Progress:
    """A progress bar that tells input and output tokens per second."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar = tqdm(total=total, desc="Prompts", unit="prompt", disable=not enabled)
        self._input_tokens = 0
        self._output_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def count(self, output: RequestOutput) -> None:
        self._input_tokens += len(output.prompt_token_ids)
        self._output_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        elapsed = max(self._bar.format_dict["elapsed"] or 0.0, 1e-9)
        self._bar.set_postfix_str(
            f"input {self._input_tokens / elapsed:.1f} tok/s, "
            f"output {self._output_tokens / elapsed:.1f} tok/s",
            refresh=False,
        )
        self._bar.update(1)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Errors from within say which prompt of the call they are about."""
    try:
        yield
    except PagewireError as error:
        error.message = f"{what}: {error.message}"
        raise
