"""What constraints on outputs cost: `python tests/bench/structured_output.py [--rows N --steps N]`.

Decodes the small real model with and without constraints, and prints one JSON object: the seconds
until the vocabulary was ready, and for each kind of constraint the time to compile it, and by row
the time to fill its mask, to apply it, and their share of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from pagewire.config import EngineConfig
from pagewire.sampling_params import SamplingParams
from pagewire.structured_output import StructuredOutput
from pagewire_engine.cpus import model_threads
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.model_files import load_description, resolve_model
from pagewire_engine.step import NewSequence, ScheduledSequence, StepPlan
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.tokenizer_files import load_model_tokenizer
from pagewire_engine.worker.grammar_masks import GrammarMasks
from pagewire_engine.worker.sampler import Sampler
from pagewire_frontend.model_download import smollm2_path

PROMPT = [504, 3575, 282, 4649, 314]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "roles": {"type": "array", "items": {"enum": ["admin", "user", "guest"]}},
        "address": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    "required": ["name", "age", "email", "roles", "address"],
}
KINDS = {
    "json_schema": StructuredOutput(json_schema=json.dumps(PERSON)),
    "json_object": StructuredOutput(json_object=True),
    "regex": StructuredOutput(regex="([A-Z][a-z]{2,12} ){4,400}"),
    "choice": StructuredOutput(choice=tuple(f"choice number {n} of many" for n in range(500))),
}


class Timed:
    """Adds up the seconds of a method's calls."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds: list[float] = []
        method = getattr(owner, name)

        def timed(*args: Any, **more: Any) -> Any:
            started = time.perf_counter()
            result = method(*args, **more)
            self.seconds.append(time.perf_counter() - started)
            return result

        setattr(owner, name, timed)


def decode(
    executor: SingleProcessExecutor,
    first_id: int,
    constraint: StructuredOutput | None,
    rows: int,
    num_steps: int,
) -> list[float]:
    """Seconds of each decode step of `rows` sequences."""
    params = SamplingParams(structured_output=constraint, ignore_eos=True, temperature=0.8)
    ids = range(first_id, first_id + rows)
    new = [NewSequence(i, 0, i, PROMPT, [], params) for i in ids]
    blocks = 1 + (len(PROMPT) + num_steps) // 16
    parts = [
        ScheduledSequence(i, 0, len(PROMPT), 0, [n * blocks + b for b in range(blocks)], (i,))
        for n, i in enumerate(ids)
    ]
    executor.execute(StepPlan(0, new, parts))
    seconds = []
    for step in range(num_steps):
        start = len(PROMPT) + step
        parts = [ScheduledSequence(i, start, 1, blocks, [], (i,)) for i in ids]
        started = time.perf_counter()
        executor.execute(StepPlan(step + 1, [], parts))
        seconds.append(time.perf_counter() - started)
    executor.execute(
        StepPlan(
            num_steps + 1,
            [NewSequence(first_id + rows, 0, 0, PROMPT, [], SamplingParams())],
            [ScheduledSequence(first_id + rows, 0, len(PROMPT), 0, [0, 1, 2, 3], ())],
            forgotten=[*ids],
        )
    )
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=48)
    rows, num_steps = (arguments := parser.parse_args()).rows, arguments.steps
    config = EngineConfig(model=str(smollm2_path()), num_gpu_blocks_override=8 * rows)
    files = resolve_model(config)
    description = load_description(files, config)
    grammars = GrammarCompiler(
        lambda: load_model_tokenizer(config, files.path, files.gguf),
        vocab_size=description.vocab_size,
        eos_token_ids=description.eos_token_ids,
        num_threads=model_threads(None),
    )
    executor = SingleProcessExecutor(config, files, grammars)
    started = time.perf_counter()
    grammars.start(StructuredOutput(choice=("a",))).result()
    told: dict[str, Any] = {"rows": rows, "first_constraint_s": time.perf_counter() - started}
    masks = Timed(GrammarMasks, "masks")
    applied = Timed(Sampler, "_apply_masks")
    decode(executor, 0, None, rows, num_steps)
    free = statistics.median(decode(executor, 1000, None, rows, num_steps))
    told["free_step_ms"] = 1e3 * free
    for number, (name, constraint) in enumerate(KINDS.items(), start=2):
        started = time.perf_counter()
        grammars.start(constraint).result()
        compile_s = time.perf_counter() - started
        masks.seconds.clear()
        applied.seconds.clear()
        steps = decode(executor, 1000 * number, constraint, rows, num_steps)
        by_step = [a + b for a, b in zip(masks.seconds[1:], applied.seconds[1:], strict=False)]
        told[name] = {
            "compile_ms": 1e3 * compile_s,
            "step_ms": 1e3 * statistics.median(steps),
            "mask_us_a_row": 1e6 * float(np.mean(masks.seconds[1:])) / rows,
            "apply_us_a_row": 1e6 * float(np.mean(applied.seconds[1:])) / rows,
            "share_of_a_step": float(np.mean(by_step)) / free,
        }
    print(json.dumps(told, indent=1))
    executor.shutdown()
    grammars.close()


if __name__ == "__main__":
    main()
