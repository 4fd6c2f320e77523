"""Whether outputs keep to real-world JSON schemas: `python -m tests.bench.schemas FOLDER`.

FOLDER holds sets of schemas, a folder each: the `data` folder of JSONSchemaBench
(github.com/guidance-ai/jsonschemabench) for one. Of each set those are taken whose file names have
the lowest SHA-256, whatever they are like, except for what jsonschema calls no schema, and for
parts of schemas: what refers to other documents.

With `--walks N` no model answers, but N outputs a schema are put together at random from bytes.
Without, the small real model answers each, greedily and sampled at temperature 1 with a seed.
`--cut` lets `max_tokens` cut, which else outputs are brought to their end before.
One JSON line is printed for each set, and one for all: how many were refused, cut by length, and
finished, and how many of those jsonschema finds valid.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema

from pagewire import LLM, SamplingParams
from pagewire.errors import InvalidArgumentError, PagewireError
from pagewire.structured_output import StructuredOutput
from pagewire_engine.json_schemas.document import Document, subschemas
from pagewire_frontend.model_download import smollm2_path
from tests.fakes.constrained_walks import EOS, Grammars, StuckError, walk

ASKED = "Write a short example as JSON that meets this JSON schema, and nothing else:\n"
AT_A_TIME = 64


@dataclass
class Case:
    """A schema and what became of it, by the way of choosing tokens."""

    set_name: str
    name: str
    text: str
    told: dict[str, str] = field(default_factory=dict)
    num_tokens: int = 0
    note: str = ""


def cases(folder: Path, per_set: int) -> Iterator[Case]:
    """The schemas that are taken."""
    for each in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(
            each.glob("*.json"), key=lambda f: hashlib.sha256(f.name.encode()).hexdigest()
        )
        texts = ((file, file.read_text()) for file in files)
        whole = (Case(each.name, file.name, text) for file, text in texts if is_whole(text))
        yield from itertools.islice(whole, per_set)


def is_whole(text: str) -> bool:
    """Whether it is a schema, all of it."""
    try:
        document = Document(text)
        validator(text).check_schema(document.root)
    except (PagewireError, jsonschema.SchemaError):
        return False
    references = (part["$ref"] for part in subschemas(document.root) if "$ref" in part)
    return all(isinstance(r, str) and document.target(r) is not None for r in references)


def validator(text: str) -> Any:
    """jsonschema's for the schema, exact in decimals: 2.22 is a multiple of 0.01."""
    schema = json.loads(text, parse_float=Decimal)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return kind(schema)


def params(way: str, case: Case, seed: int, asked: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if way == "greedy" else 1.0,
        top_p=asked.top_p,
        seed=seed,
        max_tokens=asked.max_tokens,
        repetition_penalty=asked.penalty,
        structured_output=StructuredOutput(json_schema=case.text, fit_max_tokens=not asked.cut),
    )


def answer(llm: LLM, some: list[Case], way: str, asked: argparse.Namespace) -> None:
    """Lets the model answer several, and looks at the answers."""
    ready: list[tuple[Case, SamplingParams]] = []
    for number, case in enumerate(some):
        try:
            ready.append((case, params(way, case, number, asked)))
        except PagewireError as error:
            case.told[way], case.note = "refused", error.message
    served: list[tuple[Case, Any]] = []
    for case, one in ready:
        messages = [{"role": "user", "content": ASKED + case.text[: asked.shown]}]
        served.append((case, (messages, one)))
    outputs = run(llm, served, way)
    for (case, _), output in zip(served, outputs, strict=True):
        if output is None:
            continue
        (answered,) = output.outputs
        case.num_tokens += len(answered.token_ids)
        if answered.finish_reason == "length":
            case.told[way] = "cut"
            case.note = f"cut: {answered.text[:200]} ... {answered.text[-200:]}"
            continue
        try:
            error = next(validator(case.text).iter_errors(value_of(answered.text)), None)
        except (ValueError, RecursionError) as wrong:
            error = wrong
        case.told[way] = "valid" if error is None else "invalid"
        if error is not None:
            case.note = f"{str(error)[:200]}: {answered.text[:300]}"


def value_of(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


def run(llm: LLM, served: list[tuple[Case, Any]], way: str) -> list[Any]:
    """The outputs; None where the schema is refused. One refusal would fail the whole call, so
    each is tried out by a call of one token."""
    kept: list[tuple[int, Any]] = []
    outputs: list[Any] = [None] * len(served)
    for index, (case, (messages, one)) in enumerate(served):
        try:
            llm.chat([messages], first_token_of(one), use_tqdm=False)
        except InvalidArgumentError as error:
            case.told[way], case.note = "refused", error.message
        else:
            kept.append((index, (messages, one)))
    if kept:
        found = llm.chat([m for _, (m, _) in kept], [p for _, (_, p) in kept], use_tqdm=False)
        for (index, _), output in zip(kept, found, strict=True):
            outputs[index] = output
    return outputs


def first_token_of(one: SamplingParams) -> SamplingParams:
    from dataclasses import replace

    return replace(one, max_tokens=1)


def walks(taken: list[Case], count: int, most: int) -> None:
    """Outputs without a model: one JSON line."""
    grammars, told = Grammars(), Counter[str]()
    notes: list[dict[str, str]] = []
    for case in taken:
        try:
            grammar = grammars.compiled(json.loads(case.text))
        except PagewireError as error:
            told["refused"] += 1
            notes.append({"schema": f"{case.set_name}/{case.name}", "refused": error.message})
            continue
        for seed in range(count):
            try:
                output = walk(grammar.matcher(), grammars.tokens.of, EOS, seed, most)
            except StuckError:
                told["stuck"] += 1
                continue
            if output is None:
                told["cut"] += 1
                continue
            error_ = next(validator(case.text).iter_errors(value_of(output.decode())), None)
            told["valid" if error_ is None else "invalid"] += 1
            if error_ is not None:
                notes.append(
                    {"schema": f"{case.set_name}/{case.name}", "invalid": str(error_)[:300]}
                )
    print(json.dumps({"way": "walks", "schemas": len(taken), "walks_each": count, **told}))
    for note in notes:
        print(json.dumps(note))


def line(name: str, some: list[Case], way: str) -> dict[str, Any]:
    counts = Counter(case.told.get(way, "failed") for case in some)
    finished = counts["valid"] + counts["invalid"]
    return {
        "set": name,
        "way": way,
        "schemas": len(some),
        "refused": counts["refused"],
        "cut": counts["cut"],
        "failed": counts["failed"],
        "finished": finished,
        "valid": counts["valid"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-set", type=int, default=25)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--penalty", type=float, default=1.0, help="repetition penalty")
    parser.add_argument("--walks", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0, help="of the sampled way")
    parser.add_argument(
        "--shown", type=int, default=600, help="characters of a schema in the prompt"
    )
    parser.add_argument("--notes", action="store_true", help="tell each that is not valid")
    parser.add_argument("--sets", nargs="+", help="only these")
    parser.add_argument("--ways", nargs="+", default=["greedy", "sampled"])
    parser.add_argument("--cut", action="store_true", help="let max_tokens cut")
    parser.add_argument("--quantization", default="none")
    asked = parser.parse_args()
    taken = list(cases(asked.folder, asked.per_set))
    if asked.sets:
        taken = [case for case in taken if case.set_name in asked.sets]
    if asked.walks:
        walks(taken, asked.walks, most=3000)
        return
    llm = LLM(str(smollm2_path()), max_num_seqs=AT_A_TIME, quantization=asked.quantization)
    started = time.monotonic()
    for way in asked.ways:
        for start in range(0, len(taken), AT_A_TIME):
            answer(llm, taken[start : start + AT_A_TIME], way, asked)
            print(json.dumps(line("so far", taken[: start + AT_A_TIME], way)), file=sys.stderr)
        for name in dict.fromkeys(case.set_name for case in taken):
            some = [case for case in taken if case.set_name == name]
            print(json.dumps(line(name, some, way)), flush=True)
        print(json.dumps(line("all", taken, way)), flush=True)
    tokens = sum(case.num_tokens for case in taken)
    seconds = time.monotonic() - started
    print(
        json.dumps(
            {"output_tokens": tokens, "seconds": round(seconds), "max_tokens": asked.max_tokens}
        )
    )
    if asked.notes:
        for case in taken:
            if case.note:
                print(
                    json.dumps(
                        {
                            "schema": f"{case.set_name}/{case.name}",
                            "told": case.told,
                            "note": case.note,
                        }
                    )
                )
    llm.shutdown()


if __name__ == "__main__":
    main()
