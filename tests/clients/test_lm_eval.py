"""lm-eval measures a server of the real model, and finds what it finds in transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The version that was tried. Its environment reads what is installed here beside its own, so that
# torch and transformers need not be fetched again.
LM_EVAL = "lm-eval[api,hf]==0.4.13"
ITEMS = 24


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its command, in an environment of its own."""
    folder = tmp_path_factory.mktemp("lm_eval")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    purelib = sysconfig.get_path("purelib", vars={"base": str(folder)})
    (Path(purelib) / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    installed = subprocess.run(
        # Most of its modules are never imported: compiling all took half of the time.
        [python, "-m", "pip", "install", "--quiet", "--no-compile", LM_EVAL],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "No matching distribution found for lm-eval" in installed.stderr:
        # pip says so too where it could ask none.
        if "connection broken by" in installed.stderr:
            pytest.skip(f"no package index can be reached: {installed.stderr:.200}")
        pytest.skip(f"the package index has no {LM_EVAL}")
    assert installed.returncode == 0, installed.stderr
    return folder / "bin" / "lm_eval"


@pytest.mark.slow
@pytest.mark.timeout(900)  # its packages are fetched first
def test_lm_eval_scores_a_server_as_it_scores_transformers(lm_eval: Path) -> None:
    compared = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.bench.lm_eval.compare",
            f"--lm-eval={lm_eval}",
            f"--limit={ITEMS}",
        ],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert compared.returncode == 0, compared.stdout + compared.stderr[-4000:]
    told = json.loads(compared.stdout.splitlines()[-1])
    assert told["items"] == {"pagewire_capitals": ITEMS, "pagewire_sums": ITEMS}
    assert told["scores"] == told["scores_of_transformers"]
    assert told["same_texts"] == ITEMS
    assert told["scores"]["pagewire_capitals"]["acc,none"] > 0.5  # it knows, and does not guess
