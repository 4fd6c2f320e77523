"""What constraints on outputs cost: `python -m tests.bench.structured_output`.

Decodes the small real model for two groups of as many sequences in turns, a step of one and a step
of the other, so that slow spells of the machine meet both: one group is held to a constraint, the
other is free. An output that ends makes place for a new one, and a free one with it: both groups
have batches of the same shapes.

A JSON line is printed for each number of rows and kind of constraint:

- `free_ms` and `held_ms`: mean time of a step; `ratio`: the sums of all steps over one another;
  `median_ratio`: of the medians.
- `masks_ms`: time in which a step's masks are made; `waited_ms`: time the step makes or awaits
  them; `sampled_ms`: time to sample, with masks or without (`free_sampled_ms`: of free rows).
- `cost_share`: what the step does for masks and a free one does not, over a free step's time.
  Unlike the ratios it leaves out what the machine does to one of two steps and not to the other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pagewire_engine.build import limit_threads

limit_threads(None)  # before torch is there, as an engine does

from pagewire.config import EngineConfig  # noqa: E402
from pagewire.sampling_params import SamplingParams  # noqa: E402
from pagewire.structured_output import StructuredOutput  # noqa: E402
from pagewire_engine.executor.single_process import SingleProcessExecutor  # noqa: E402
from pagewire_engine.model_files import load_description, resolve_model  # noqa: E402
from pagewire_engine.step import NewSequence, ScheduledSequence, StepPlan  # noqa: E402
from pagewire_engine.structured_output import GrammarCompiler  # noqa: E402
from pagewire_engine.tokenizer_files import load_model_tokenizer  # noqa: E402
from pagewire_engine.worker.grammar_masks import GrammarMasks, MasksToCome  # noqa: E402
from pagewire_engine.worker.sampler import Sampler  # noqa: E402
from pagewire_frontend.model_download import smollm2_path  # noqa: E402

PROMPT = [504, 3575, 282, 4649, 314]
BLOCK_SIZE = 16
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
INVOICE = {
    "type": "object",
    "properties": {
        "number": {"type": "string", "pattern": "^INV-[0-9]{4,8}$"},
        "issued": {"type": "string", "format": "date"},
        "currency": {"enum": ["EUR", "USD", "GBP", "JPY"]},
        "lines": {
            "type": "array",
            "minItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "maxLength": 80},
                    "quantity": {"type": "integer", "minimum": 1},
                    "price": {"type": "number", "minimum": 0},
                },
                "required": ["text", "quantity", "price"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["number", "issued", "currency", "lines"],
    "additionalProperties": False,
}
SEARCH = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "description": "what to look for"},
        "filters": {
            "type": "object",
            "properties": {
                "language": {"enum": ["en", "de", "fr", "es", "it", "pt", "nl"]},
                "before": {"type": "string", "format": "date-time"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["language", "tags"],
        },
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        "order": {"anyOf": [{"const": "newest"}, {"const": "relevance"}]},
    },
    "required": ["query", "filters", "limit", "order"],
    "additionalProperties": False,
}
STORY = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
                "required": ["explanation", "output"],
            },
        },
        "answer": {"type": ["string", "null"]},
    },
    "required": ["title", "steps", "answer"],
}
NAMES = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 100}


def _of(schema: dict[str, Any]) -> StructuredOutput:
    return StructuredOutput(json_schema=json.dumps(schema))


# Several: the rows have them in turn.
KINDS = {
    "schemas": [_of(each) for each in (PERSON, INVOICE, SEARCH, STORY)],
    "unique_items": [_of(NAMES)],
    "json_object": [StructuredOutput(json_object=True)],
    "regex": [StructuredOutput(regex="([A-Z][a-z]{2,12} ){4,400}")],
    "choice": [StructuredOutput(choice=tuple(f"choice number {n} of many" for n in range(500)))],
}


class Timed:
    """Adds up the seconds that a method takes."""

    def __init__(self, owner: type, name: str, clock: Any = time.perf_counter) -> None:
        self.total = 0.0
        method = getattr(owner, name)

        def timed(*args: Any, **more: Any) -> Any:
            started = clock()
            try:
                return method(*args, **more)
            finally:
                self.total += clock() - started

        setattr(owner, name, timed)


class Group:
    """Sequences that are decoded together, each in the same blocks of the cache.

    Args:
        executor: of the model.
        blocks: the first block that is theirs.
        constraints: of the rows, in turn; none: the rows are free.
        asked: the settings.
        ids: sequence ids that nobody has had.
    """

    def __init__(
        self,
        executor: SingleProcessExecutor,
        blocks: int,
        constraints: Sequence[StructuredOutput | None],
        rows: int,
        asked: argparse.Namespace,
        ids: Iterator[int],
    ) -> None:
        self._executor = executor
        self._max_tokens = asked.max_tokens
        self._blocks_each = blocks_each(asked)
        self._first_block = blocks
        self._params = [
            SamplingParams(
                structured_output=constraints[n % len(constraints)],
                temperature=0.8,
                max_tokens=asked.max_tokens,
                ignore_eos=constraints == [None],
            )
            for n in range(rows)
        ]
        self._ids = ids
        self._numbers = [-1] * rows
        # How many tokens each has; whoever is due starts with the next step.
        self._lengths = [0] * rows
        self._due = set(range(rows))
        self._forgotten: list[int] = []
        self.seconds: list[float] = []

    def step(self, due: set[int] | None = None) -> set[int]:
        """One step.

        Args:
            due: the rows that begin anew; None: those whose output has ended.

        Returns:
            Which rows began anew.
        """
        if due is None:
            due = self._due
        forgotten = [self._numbers[row] for row in due if self._numbers[row] >= 0]
        new, decodes, prefills = [], [], []
        for row, params in enumerate(self._params):
            if row in due:
                number = self._numbers[row] = next(self._ids)
                self._lengths[row] = 0
                new.append(NewSequence(number, 0, number, PROMPT, [], params))
                start = self._first_block + row * self._blocks_each
                table = list(range(start, start + self._blocks_each))
                prefills.append(ScheduledSequence(number, 0, len(PROMPT), 0, table, (number,)))
            else:
                number = self._numbers[row]
                at = len(PROMPT) + self._lengths[row] - 1
                decodes.append(ScheduledSequence(number, at, 1, self._blocks_each, [], (number,)))
        plan = StepPlan(1, new, decodes + prefills, forgotten=forgotten)
        started = time.perf_counter()
        result = self._executor.execute(plan)
        self.seconds.append(time.perf_counter() - started)
        assert not result.refused, result.refused
        assert not result.failed, result.failed
        tokens = {each.sequence_id: each.token_id for each in result.sampled}
        self._due = set()
        for row, number in enumerate(self._numbers):
            self._lengths[row] += 1
            if tokens[number] in EOS or self._lengths[row] >= self._max_tokens:
                self._due.add(row)
        return due

    def end(self) -> None:
        """Forgets its sequences."""
        self._executor.execute(StepPlan(1, forgotten=self._numbers))


EOS = (0, 2)  # SmolLM2's


def blocks_each(asked: argparse.Namespace) -> int:
    return -(-(len(PROMPT) + asked.max_tokens) // BLOCK_SIZE)


class Spent:
    """What of the steps of groups is spent on masks, in seconds."""

    def __init__(self) -> None:
        self._all = (
            [Timed(GrammarMasks, "masks")],
            [Timed(MasksToCome, "make"), Timed(MasksToCome, "result")],
            [Timed(Sampler, "sample")],
        )

    def of(self, group: Group, due: set[int] | None = None) -> list[float]:
        """Of one more step of a group: in making them, until they were there, in sampling."""
        before = [sum(each.total for each in some) for some in self._all]
        group.step(due)
        return [
            sum(each.total for each in some) - start
            for some, start in zip(self._all, before, strict=True)
        ]


def measured(
    executor: SingleProcessExecutor,
    constraints: Sequence[StructuredOutput],
    rows: int,
    asked: argparse.Namespace,
    ids: Iterator[int],
    spent: Spent,
) -> dict[str, Any]:
    """The figures of one kind of constraint."""
    each = rows * blocks_each(asked)
    held = Group(executor, 0, constraints, rows, asked, ids)
    free = Group(executor, each, [None], rows, asked, ids)
    told, told_free = [], []
    for _ in range(asked.steps):
        due = set(held._due)
        told.append(spent.of(held))
        told_free.append(spent.of(free, due))
    held.end()
    free.end()
    skipped = asked.warm_up
    masks, waited, sampled = (
        1e3 * statistics.fmean(column[skipped:]) for column in zip(*told, strict=True)
    )
    free_sampled = 1e3 * statistics.fmean(each[2] for each in told_free[skipped:])
    held_s, free_s = held.seconds[skipped:], free.seconds[skipped:]
    free_ms = 1e3 * statistics.fmean(free_s)
    return {
        "free_ms": free_ms,
        "held_ms": 1e3 * statistics.fmean(held_s),
        "ratio": sum(held_s) / sum(free_s),
        "median_ratio": statistics.median(held_s) / statistics.median(free_s),
        "masks_ms": masks,
        "waited_ms": waited,
        "sampled_ms": sampled,
        "free_sampled_ms": free_sampled,
        "cost_share": (waited + sampled - free_sampled) / free_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--warm-up", type=int, default=4, help="steps that are not counted")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--weights", default="bfloat16", choices=["float32", "bfloat16", "int8"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    asked = parser.parse_args()
    blocks = 2 * max(asked.rows) * blocks_each(asked)
    weights: dict[str, Any] = {"dtype": asked.weights}
    if asked.weights == "int8":
        weights = {"quantization": "int8"}
    config = EngineConfig(model=str(smollm2_path()), num_gpu_blocks_override=blocks, **weights)
    files = resolve_model(config)
    description = load_description(files, config)
    grammars = GrammarCompiler(
        lambda: load_model_tokenizer(config, files.path, files.gguf),
        vocab_size=description.vocab_size,
        eos_token_ids=description.eos_token_ids,
    )
    executor = SingleProcessExecutor(config, files, grammars)
    spent, ids = Spent(), itertools.count()
    for rows, name in itertools.product(asked.rows, asked.kinds):
        for constraint in KINDS[name]:
            grammars.start(constraint).result()
        found = measured(executor, KINDS[name], rows, asked, ids, spent)
        told = {"weights": asked.weights, "rows": rows, "kind": name} | found
        told = {k: round(v, 4) if isinstance(v, float) else v for k, v in told.items()}
        print(json.dumps(told), flush=True)
    executor.shutdown()
    grammars.close()


if __name__ == "__main__":
    main()
