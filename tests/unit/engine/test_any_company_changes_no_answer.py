"""Requests of every kind together with a real (tiny, random) model, short of blocks, aborted and
submitted again under the same id: whatever happens to others, each answers as if it were alone
(DESIGN invariants 1, 4 and 5)."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pagewire.beam_search_params import BeamSearchParams
from pagewire.config import EngineConfig
from pagewire.outputs import FinishReason, PositionLogprobs
from pagewire.structured_output import StructuredOutput
from pagewire_engine.adapters.description import AdapterFolder
from pagewire_engine.adapters.turns import AdapterTurns
from pagewire_engine.engine import Engine
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.model_files import resolve_model
from pagewire_engine.submission import Submission
from tests.fakes.tiny_adapters import write_tiny_adapter
from tests.fakes.tiny_models import write_tiny_model
from tests.unit.engine.harness import Recorded, settings, submission

EOS = 257
POINT = json.dumps({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
OBJECT = StructuredOutput(json_schema=POINT)
# Of tokens of one byte each: a sequence is mostly within a character.
CHARACTERS = StructuredOutput(regex="[ä世🙂]{4,9}(-[0-9]{2}){1,3}")
BEAMS = BeamSearchParams(beam_width=3, n=2, max_tokens=9, logprobs=1).as_sampling_params()
SEEDED: dict[str, Any] = {"temperature": 1.5, "seed": 5, "max_tokens": 24}
PENALISED = {"presence_penalty": 0.5, "repetition_penalty": 1.3, "top_p": 0.9}
KINDS = [
    submission("plain", [7] * 9 + [3], max_tokens=20),
    submission("told", [7] * 9 + [4], prompt_logprobs=1, logprobs=2, **SEEDED),
    submission("twins", range(40, 61), n=2, prompt_logprobs=0, **SEEDED, **PENALISED),
    submission("object", range(9), structured_output=OBJECT, ignore_eos=False, **SEEDED),
    submission("letters", [7] * 9, n=2, structured_output=CHARACTERS, ignore_eos=False, **SEEDED),
    replace(submission("at end", range(5), n=3, **SEEDED), told_at_end=True),
    Submission("beams", list(range(70, 80)), BEAMS),
    replace(submission("adapted", [7] * 12, logprobs=0, **SEEDED), adapter=1, cache_key="1"),
    replace(submission("other", [7] * 12, n=2, **SEEDED, **PENALISED), adapter=2, cache_key="2"),
]


class Always:
    """Implements AdapterStore: all weights are there."""

    def __init__(self) -> None:
        self.num_released = 0

    def want(self, number: int) -> None: ...

    def let_go(self, number: int) -> None: ...

    def is_ready(self, number: int) -> bool:
        return True

    def release(self, number: int) -> None:
        self.num_released += 1


class Asked:
    """A request under an id, and what was told of it."""

    def __init__(self, kind: str, num_sequences: int) -> None:
        self.kind = kind
        self.num_sequences = num_sequences
        self.told = Recorded()
        self.logprobs: dict[int, list[PositionLogprobs]] = {}
        self.aborted: set[int] = set()

    @property
    def ended(self) -> bool:
        return len(self.told.reasons) == self.num_sequences


class Run:
    """An engine of its own around the one model."""

    # The worker knows sequences by it, and outlives the engines.
    sequence_ids = itertools.count()

    def __init__(self, executor: SingleProcessExecutor, **limits: Any) -> None:
        overlaps = limits.pop("overlaps_steps", False)
        self.store = Always()
        self.settings = settings(**{"num_blocks": 256, **limits})
        self.engine = Engine(
            executor,
            eos_token_ids=[EOS],
            settings=self.settings,
            overlaps_steps=overlaps,
            adapters=AdapterTurns(1, self.store, turn_steps=8),
        )
        self.engine._sequence_ids = self.engine._requests._sequence_ids = self.sequence_ids
        self.asked: dict[str, list[Asked]] = {}

    def ask(self, kind: Submission, request_id: str) -> None:
        asked = Asked(kind.request_id, kind.sampling_params.n)
        self.asked.setdefault(request_id, []).append(asked)
        self.engine.add(replace(kind, request_id=request_id))

    def abort(self, request_id: str, index: int | None) -> None:
        asked = self.asked[request_id][-1]
        everything = index is None or asked.kind == "beams"  # a beam is no result
        if request_id in self.engine:
            asked.aborted |= set(range(asked.num_sequences)) if everything else {index or 0}
        self.engine.abort(request_id, None if everything else index)
        self.take(self.engine.take_outputs())

    def step(self) -> None:
        self.take(self.engine.step())
        self.engine.queues.blocks.check()

    def take(self, outputs: Any) -> None:
        assert not outputs.failures
        for prompt in outputs.prompt_logprobs:
            told = self._live(prompt.request_id).told
            assert prompt.start == len(told.prompt_logprobs) + 1
            told.prompt_logprobs += prompt.positions
        for output in outputs.sequences:
            asked, index = self._live(output.request_id), output.sequence_index
            tokens = asked.told.tokens.setdefault(index, [])
            assert output.start == len(tokens)
            tokens += output.token_ids
            asked.logprobs.setdefault(index, []).extend(output.logprobs or ())
            if output.finish_reason is not None:
                assert index not in asked.told.reasons
                asked.told.reasons[index] = output.finish_reason

    def _live(self, request_id: str) -> Asked:
        return next(asked for asked in self.asked[request_id] if not asked.ended)

    def finish(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.step()
        assert all(asked.ended for each in self.asked.values() for asked in each)
        blocks = self.engine.queues.blocks
        assert blocks.num_available_blocks == self.settings.num_blocks
        assert blocks.num_free_cpu_blocks == self.settings.num_cpu_blocks
        kinds = [asked.kind for each in self.asked.values() for asked in each]
        assert self.store.num_released == kinds.count("adapted") + kinds.count("other")
        self.engine.close()


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SingleProcessExecutor]:
    folder = tmp_path_factory.mktemp("model")
    reference = write_tiny_model(folder / "model", "llama-llama3-rope-tied")
    config = EngineConfig(
        model=str(folder / "model"),
        device="cpu",
        dtype="float32",
        block_size=4,
        num_gpu_blocks_override=256,
        swap_space=1 << 22,
        num_threads=1,
        enable_lora=True,
        max_loras=1,
    )
    executor = SingleProcessExecutor(config, resolve_model(config))
    for number in (1, 2):
        write_tiny_adapter(folder / str(number), reference, seed=number)
        executor.load_adapter(number, AdapterFolder(str(folder / str(number))))
    yield executor
    executor.shutdown()


@pytest.fixture(scope="module")
def alone(executor: SingleProcessExecutor) -> dict[str, Asked]:
    """Each by itself, its prompt in one step, nothing cached."""
    answers = {}
    for kind in KINDS:
        run = Run(executor, enable_prefix_caching=False)
        run.ask(kind, "x")
        run.finish()
        (answers[kind.request_id],) = run.asked["x"]
    return answers


def close(ours: list[PositionLogprobs], whole: list[PositionLogprobs]) -> bool:
    """Alike but for the last bits, as far as ours go."""
    return all(
        one.token.token_id == other.token.token_id
        and one.token.logprob == pytest.approx(other.token.logprob, abs=2e-3)
        for one, other in zip(ours, whole[: len(ours)], strict=True)
    )


def check(asked: Asked, whole: Asked) -> None:
    for index, reason in asked.told.reasons.items():
        tokens, expected = asked.told.tokens[index], whole.told.tokens[index]
        if reason is FinishReason.ABORT:
            assert index in asked.aborted
            expected = expected[: len(tokens)]
        assert tokens == expected
        assert close(asked.logprobs.get(index, []), whole.logprobs.get(index, []))
    if not asked.aborted:
        assert len(asked.told.prompt_logprobs) == len(whole.told.prompt_logprobs)
    assert close(asked.told.prompt_logprobs, whole.told.prompt_logprobs)


@pytest.mark.parametrize("overlaps_steps", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_each_answers_as_if_alone(
    executor: SingleProcessExecutor, alone: dict[str, Asked], mode: str, overlaps_steps: bool
) -> None:
    reached: Counter[str] = Counter()
    for seed in range(4):
        draw = random.Random(seed)
        run = Run(
            executor,
            overlaps_steps=overlaps_steps,
            num_blocks=draw.choice([24, 28]),
            num_cpu_blocks=60,
            preemption_mode=mode,
            max_num_batched_tokens=draw.choice([7, 64]),
            max_num_seqs=draw.choice([8, 16]),
        )
        for kind in draw.sample(KINDS, len(KINDS)):
            run.ask(kind, kind.request_id)
            for _ in range(draw.randrange(4)):
                run.step()
            if draw.random() < 0.6:
                request_id = draw.choice(list(run.asked))
                run.abort(request_id, draw.choice([None, 0]))
                if request_id not in run.engine:
                    run.ask(draw.choice(KINDS), request_id)
        run.finish()
        for asked in (asked for each in run.asked.values() for asked in each):
            check(asked, alone[asked.kind])
            reached["aborts"] += bool(asked.aborted)
        reached["preemptions"] += run.engine.stats().num_preemptions
        reached["swaps"] += run.engine.stats().num_swaps
    assert reached["aborts"] > 2
    assert reached["preemptions"] > 3
    assert (reached["swaps"] > 0) is (mode != "recompute")
