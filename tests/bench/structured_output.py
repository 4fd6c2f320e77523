"""What constraints on outputs cost: `python -m tests.bench.structured_output`.

Decodes the small real model in turns with and without a constraint, as often as `--turns` says, and
prints a JSON line for each number of rows and kind of constraint: the time to compile it, the mean
time of a step with it over that without, and of what of a step is spent on masks: by row the time
to fill its mask and to apply it, and their share of a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

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
NAMES = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 100}
KINDS = {
    "json_schema": StructuredOutput(json_schema=json.dumps(PERSON)),
    "unique_items": StructuredOutput(json_schema=json.dumps(NAMES)),
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


def measured(
    executor: SingleProcessExecutor,
    constraint: StructuredOutput,
    asked: argparse.Namespace,
    rows: int,
    spent: tuple[Timed, Timed],
    first_ids: Iterator[int],
) -> dict[str, float]:
    """The figures of one constraint."""
    free: list[float] = []
    held: list[float] = []
    masks, applied = spent
    for each in spent:
        each.seconds.clear()
    for _ in range(asked.turns):
        free += decode(executor, next(first_ids), None, rows, asked.steps)[1:]
        held += decode(executor, next(first_ids), constraint, rows, asked.steps)[1:]
    mask_s = sum(masks.seconds) / len(held)
    apply_s = sum(applied.seconds) / len(held)
    mean = statistics.fmean(free)
    return {
        "free_step_ms": 1e3 * mean,
        "step_ratio": statistics.fmean(held) / mean,
        "median_step_ratio": statistics.median(held) / statistics.median(free),
        "mask_us_a_row": 1e6 * mask_s / rows,
        "apply_us_a_row": 1e6 * apply_s / rows,
        "share_of_a_step": (mask_s + apply_s) / mean,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--turns", type=int, default=4)
    asked = parser.parse_args()
    most = max(asked.rows)
    config = EngineConfig(model=str(smollm2_path()), num_gpu_blocks_override=8 * most)
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
    print(json.dumps({"first_constraint_s": round(time.perf_counter() - started, 3)}))
    spent = (Timed(GrammarMasks, "masks"), Timed(Sampler, "_apply_masks"))
    first_ids = itertools.count(0, 1000)
    decode(executor, next(first_ids), None, most, asked.steps)
    for rows in asked.rows:
        for name, constraint in KINDS.items():
            started = time.perf_counter()
            grammars.start(constraint).result()
            compile_ms = 1e3 * (time.perf_counter() - started)
            decode(executor, next(first_ids), constraint, rows, 8)
            found = measured(executor, constraint, asked, rows, spent, first_ids)
            told: dict[str, Any] = {"rows": rows, "kind": name, "compile_ms": compile_ms} | found
            print(
                json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in told.items()})
            )
    executor.shutdown()
    grammars.close()


if __name__ == "__main__":
    main()
