"""A fake engine that emits one token a stream and step, at a fixed rate, and notes when.

Run as a program: serves until its standard input is closed, then prints the times at which each
stream's tokens were emitted, as one line of JSON. Both wires, the loop and the scheduler are real;
only the model is not. Prompt token 0 of a request is the number its tokens are noted under.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from array import array
from pathlib import Path

from pagewire.collector import settle_collector
from pagewire.config import EngineConfig
from pagewire.sampling_params import SamplingParams
from pagewire_engine.build import BuiltEngine, assemble_engine
from pagewire_engine.cli import SWITCH_INTERVAL_S
from pagewire_engine.executor.base import LandedStep, PendingStep
from pagewire_engine.service import EngineServer
from pagewire_engine.step import SampledToken, StepPlan, StepResult, WorkerInfo
from pagewire_engine.tokenizer_files import load_tokenizer_files

VOCAB_SIZE = 49152
# Ordinary words of the real vocabulary: each token is text as soon as it comes.
FIRST_WORD, NUM_WORDS = 1000, 997
_PAUSE_S = 0.02


def expected_token(number: int, position: int) -> int:
    """The token at an output position of a stream."""
    return FIRST_WORD + (number * 31 + position) % NUM_WORDS


class PacedExecutor:
    """Implements `pagewire_engine.executor.base.Executor`: no model, a metronome.

    Args:
        steps_per_s: steps begin at this rate.
        busy_s: seconds of Python a step computes, holding the interpreter as a scheduler does.
        metronome: False: a step lasts as long as it lasts, 1 / steps_per_s of sleep and the rest.
    """

    def __init__(self, steps_per_s: float, busy_s: float = 0.0, *, metronome: bool = True) -> None:
        self._interval_s = 1 / steps_per_s
        self._busy_s = busy_s
        self._metronome = metronome
        self._next = 0.0
        # Arrays: millions of objects would hold the collector up, and with it the steps.
        self._sequences: dict[int, tuple[int, array[float]]] = {}
        self.emitted: dict[int, array[float]] = {}

    def info(self) -> WorkerInfo:
        return WorkerInfo("PacedForCausalLM", "float32", "cpu", VOCAB_SIZE, 65536, 65536, 16)

    @property
    def launches_ahead(self) -> bool:
        return False

    def launch(self, plan: StepPlan) -> PendingStep:
        return LandedStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        for new in plan.new_sequences:
            number = new.prompt_token_ids[0]
            self._sequences[new.sequence_id] = (number, self.emitted.setdefault(number, array("d")))
        now = self._pass_time()
        sampled = []
        for entry in plan.scheduled:
            for sequence_id in entry.sample_for:
                number, times = self._sequences[sequence_id]
                token_id = expected_token(number, len(times))
                times.append(now)
                sampled.append(SampledToken(sequence_id, token_id, 0.0))
        for sequence_id in plan.forgotten:
            self._sequences.pop(sequence_id, None)
        return StepResult(plan.step, sampled)

    def _pass_time(self) -> float:
        began = now = time.monotonic()
        while now - began < self._busy_s:
            now = time.monotonic()
        if not self._metronome:
            time.sleep(self._interval_s)
        elif self._next > now:
            time.sleep(self._next - now)
        now = time.monotonic()
        # Steps that come a little late are made up for, so that the load offered is that of the
        # rate; after a pause it is not.
        behind_s = now - self._next
        self._next = (now if behind_s > _PAUSE_S else self._next) + self._interval_s
        return now

    def shutdown(self) -> None:
        self._sequences.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps-per-s", type=float, required=True)
    parser.add_argument("--busy-ms", type=float, help="steps without a metronome, this long busy")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder or GGUF file")
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    source = arguments.tokenizer
    folder, gguf = (source, None) if source.is_dir() else (source.parent, source)
    tokenizer_files = load_tokenizer_files(folder, gguf, mode="auto")
    config = EngineConfig(model="paced", port=arguments.port, max_num_seqs=arguments.max_num_seqs)
    executor = PacedExecutor(
        arguments.steps_per_s,
        (arguments.busy_ms or 0.0) / 1000,
        metronome=arguments.busy_ms is None,
    )
    built = BuiltEngine(
        engine=assemble_engine(executor, config, ()),
        executor=executor,
        info=executor.info(),
        served_model_name="paced",
        eos_token_ids=(),
        default_sampling_params=SamplingParams(),
        tokenizer_files=tokenizer_files,
    )
    server = EngineServer(built, config)
    server.start()
    settle_collector()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop()
    emitted = {number: list(times) for number, times in executor.emitted.items()}
    print(json.dumps(emitted), flush=True)


if __name__ == "__main__":
    main()
