"""What constraints on outputs cost on a GPU: `python -m tests.bench.gpu.constraints 8b`.

Decodes as many sequences at once, free and then held to constraints, with random weights and a
made-up vocabulary of the model's size. A JSON line is printed for each number of rows, kind of
constraint and `max_tokens`: time of a step, and output tokens a second. Outputs that end make no
place for others: compare the times of steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pagewire.config import EngineConfig
from pagewire.sampling_params import SamplingParams
from pagewire.structured_output import StructuredOutput
from pagewire_engine.build import BuiltEngine, build_engine
from pagewire_engine.submission import Submission
from tests.bench.gpu.lines import Line
from tests.bench.gpu.settings import engine_settings
from tests.bench.gpu.tokenizer import write_tokenizer
from tests.bench.gpu.workloads import MODELS, BenchModel
from tests.bench.structured_output import KINDS
from tests.fakes.engine_run import steps_to_end

_EOS, _FREE_TOKENS = 0, 300
_KINDS = ("free", "schemas", "json_object")
_PROMPT = [30 + 13 * k % 200 for k in range(32)]


def _settings(model: BenchModel, device: str, folder: Path) -> EngineConfig:
    config = model.config()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": _EOS}))
    write_tokenizer(folder, config["vocab_size"])
    return EngineConfig.model_validate(
        engine_settings(model, device, {}) | {"model": str(folder), "seed": 1}
    )


def _decode(
    built: BuiltEngine, rows: int, constraints: Sequence[StructuredOutput], max_tokens: int
) -> Line:
    """All rows to their ends; no constraints: the rows are free."""
    assert built.grammars is not None
    for constraint in constraints:
        built.grammars.start(constraint).result()
    for row in range(rows):
        held = constraints[row % len(constraints)] if constraints else None
        params = SamplingParams(
            temperature=0.8,
            seed=row,
            max_tokens=max_tokens,
            structured_output=held,
            ignore_eos=held is None,
        )
        built.engine.add(Submission(str(row), [*_PROMPT, row], params))
    num_tokens = num_steps = 0
    began = time.monotonic()
    for outputs in steps_to_end(built.engine):
        num_steps += 1
        num_tokens += sum(len(each.token_ids) for each in outputs.sequences)
    seconds = time.monotonic() - began
    return {
        "ms_per_step": round(1e3 * seconds / num_steps, 3),
        "out_tok_s": round(num_tokens / seconds, 1),
        "steps": num_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[256, 1024])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = _settings(MODELS[asked.model], asked.device, Path(folder))
        built = build_engine(config, lambda line: print(line, file=sys.stderr, flush=True))
        for rows, most, kind in itertools.product(asked.rows, asked.max_tokens, _KINDS):
            constraints = [] if kind == "free" else KINDS[kind]
            limit = min(most, _FREE_TOKENS) if kind == "free" else most
            _decode(built, rows, constraints, limit)  # warms caches up
            told: Line = {"model": asked.model, "rows": rows, "max_tokens": most, "kind": kind}
            print(json.dumps(told | _decode(built, rows, constraints, limit)), flush=True)
        built.shutdown()


if __name__ == "__main__":
    main()
