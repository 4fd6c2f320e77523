"""Vectors of MiniLM beside those of the sentence-transformers library, which is no dependency:

    pip install --target /tmp/st --no-deps sentence-transformers scikit-learn scipy joblib \\
        threadpoolctl cloudpickle narwhals
    python -m tests.bench.embeddings --library /tmp/st

Status 1 where a number differs by more than 1e-6.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Any

import numpy as np

from tests.fakes.minilm import minilm_path

TEXTS = [
    "The cat sits outside",
    "Die Katze sitzt drau\u00dfen \U0001f408",
    "a " * 600,  # more than the model takes
    "\u00dcn\u00efc\u00f6d\u00e9 \u0661\u0662\u0663 \u200b x",
    "[MASK] [SEP] hello",
]
TOLERANCE = 1e-6


def main() -> int:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library", help="folder that sentence-transformers was installed to")
    folder = parser.parse_args().library
    if folder:
        sys.path.append(folder)
    library: Any = importlib.import_module("sentence_transformers")
    model = library.SentenceTransformer(str(minilm_path()), device="cpu", local_files_only=True)
    theirs = model.encode(TEXTS, convert_to_numpy=True)

    from pagewire import LLM

    with LLM(str(minilm_path()), dtype="float32") as llm:
        outputs = llm.embed(TEXTS, truncate_prompt_tokens=-1, use_tqdm=False)
    ours = np.array([output.outputs.embedding for output in outputs])
    largest = float(np.abs(ours - theirs).max())
    told = {"sentence_transformers": library.__version__, "largest_difference": largest}
    print(json.dumps(told))
    return int(largest > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
