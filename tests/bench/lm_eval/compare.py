"""lm-eval's scores of a pagewire server and of transformers, of the same weights, item by item.

    python -m venv /tmp/lm-eval
    /tmp/lm-eval/bin/pip install torch==2.13.0 "lm-eval[api,hf]"
    python -m tests.bench.lm_eval.compare --lm-eval /tmp/lm-eval/bin/lm_eval

lm-eval has an environment of its own, since it brings other versions of much. Prints a JSON line;
status 1 where a score differs, or an item by more than TOLERANCE.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.serve_process import MODEL, ServeProcess

ROOT = Path(__file__).resolve().parents[3]
TASKS = {
    "pagewire_capitals": ("acc,none", "acc_norm,none"),
    "pagewire_sums": ("exact_match,stripped",),
}
# Of a choice's log probability, a sum over its tokens, in fp32 on both sides.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Evaluation:
    """What one run of lm-eval found: scores by task and metric, and by task what the model said to
    each item."""

    scores: dict[str, dict[str, float]]
    answers: dict[str, list[Any]]
    seconds: float


def write_model(folder: Path) -> None:
    """The embedded model as a Hugging Face folder, which both sides can load."""
    from pagewire.config import EngineConfig
    from pagewire_engine.tokenizer_files import load_model_tokenizer
    from pagewire_frontend.model_download import smollm2_path
    from tests.fakes.smollm2 import smollm2_reference

    gguf = smollm2_path()
    smollm2_reference(gguf).save_pretrained(folder)
    config = EngineConfig(model=str(gguf))
    for name, content in load_model_tokenizer(config, gguf.parent, gguf).items():
        (folder / name).write_bytes(content)


def evaluate(
    lm_eval: str, model: str, arguments: dict[str, Any], out: Path, limit: int | None
) -> Evaluation:
    """Runs lm-eval on all tasks, or on the first items of each."""
    started = time.monotonic()
    subprocess.run(
        [
            lm_eval,
            f"--model={model}",
            "--model_args=" + ",".join(f"{name}={value}" for name, value in arguments.items()),
            "--tasks=" + ",".join(TASKS),
            f"--include_path={Path(__file__).parent}",
            f"--output_path={out}",
            "--log_samples",
            "--batch_size=8",
            "--device=cpu",
            "--seed=1",
            *(() if limit is None else (f"--limit={limit}",)),
        ],
        cwd=ROOT,
        # Threads that wait for one another by spinning take minutes beside other programs.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=sys.stderr,
    )
    seconds = time.monotonic() - started
    (results,) = out.rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    scores = {task: {name: found[task][name] for name in names} for task, names in TASKS.items()}
    return Evaluation(scores, {task: _answers(out, task) for task in TASKS}, seconds)


def _answers(out: Path, task: str) -> list[Any]:
    (samples,) = out.rglob(f"samples_{task}_*.jsonl")
    items = [json.loads(line) for line in samples.read_text().splitlines()]
    return [item["resps"] for item in sorted(items, key=lambda item: item["doc_id"])]


def largest_difference(ours: list[Any], theirs: list[Any]) -> float:
    """Between the log probabilities of all items' choices."""
    differences = [
        abs(float(own[0][0]) - float(other[0][0]))
        for item, other_item in zip(ours, theirs, strict=True)
        for own, other in zip(item, other_item, strict=True)
    ]
    return max(differences)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lm-eval", default="lm_eval", help="its command")
    parser.add_argument("--limit", type=int, help="of each task's items, the first so many")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "model")
        flags = [f"--model={folder / 'model'}", f"--served-model-name={MODEL}", "--http-port=0",
                 "--grpc-port=0", "--ui-port=0", "--dtype=float32"]  # fmt: skip
        with ServeProcess(flags, cwd=folder) as server:
            url = server.wait_for("pagewire is ready").split("OpenAI API ")[1].split("/v1")[0]
            arguments = {
                "model": MODEL,
                "base_url": f"{url}/v1/completions",
                "tokenizer_backend": "remote",
                "tokenized_requests": False,
                "num_concurrent": 8,
            }
            ours = evaluate(
                options.lm_eval, "local-completions", arguments, folder / "ours", options.limit
            )
        theirs = evaluate(
            options.lm_eval,
            "hf",
            {"pretrained": folder / "model", "dtype": "float32"},
            folder / "theirs",
            options.limit,
        )
    choices, sums = TASKS
    difference = largest_difference(ours.answers[choices], theirs.answers[choices])
    pairs = list(zip(ours.answers[sums], theirs.answers[sums], strict=True))
    line = {
        "scores": ours.scores,
        "scores_of_transformers": theirs.scores,
        "largest_loglikelihood_difference": difference,
        "same_texts": sum(own == other for own, other in pairs),
        "items": {task: len(answers) for task, answers in ours.answers.items()},
        "seconds": [round(ours.seconds, 1), round(theirs.seconds, 1)],
    }
    print(json.dumps(line))
    same = ours.scores == theirs.scores and all(own == other for own, other in pairs)
    return 0 if same and difference <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
