"""Constraints on outputs with a real (tiny, random) model: they hold, and scheduling never changes
what is produced under them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jsonschema
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings

from pagewire.config import EngineConfig
from pagewire.errors import ErrorCode
from pagewire.outputs import FinishReason
from pagewire.structured_output import StructuredOutput
from pagewire_engine.engine import Engine
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.model_files import resolve_model
from pagewire_engine.outputs import RequestFailure
from pagewire_engine.submission import SequencePast, Submission
from tests.fakes.engine_run import Answers, answers_to
from tests.fakes.tiny_models import write_tiny_model
from tests.unit.engine.harness import settings, submission

EOS = 257
DOT = 13
MAX_TOKENS = 60

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": -50, "maximum": 5000},
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["x", "name"],
    "additionalProperties": False,
}
SCHEMA = StructuredOutput(json_schema=json.dumps(POINT))
EXPRESSION = StructuredOutput(regex="[a-f]{3,20}(-[0-9]{2}){1,6}")
STORY = StructuredOutput(
    json_schema=json.dumps(
        {
            "type": "object",
            "properties": {
                "story": {"type": "string"},
                "more": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["story", "more"],
        }
    )
)
GRAMMAR = StructuredOutput(grammar='root ::= "<" ([a-z]+ | root){1,3} ">"')


def constrained(
    request_id: str, prompt: range, constraint: StructuredOutput | None, **params: Any
) -> Submission:
    values: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": False}
    return submission(request_id, prompt, structured_output=constraint, **values | params)


REQUESTS = [
    constrained("greedy", range(3, 20), SCHEMA),
    constrained("hot", range(40, 51), SCHEMA, temperature=4.0, seed=5),
    constrained(
        "twins", range(90, 103), EXPRESSION, n=2, temperature=3.0, seed=-3, presence_penalty=0.5
    ),
    # Neither would come to its end by itself.
    constrained("endless", range(120, 131), STORY, n=2, temperature=2.0, seed=9, max_tokens=50),
    # A dot ends its reasoning; it is likely to come soon.
    constrained(
        "reasoned",
        range(50, 61),
        replace(SCHEMA, reasoning_end="."),
        temperature=1.5,
        seed=11,
        logit_bias={DOT: 4.0},
        max_tokens=90,
    ),
    constrained("free", range(60, 66), None, temperature=1.0, max_tokens=20),
    constrained("nested", range(7, 8), GRAMMAR, temperature=2.0, min_tokens=9, max_tokens=30),
]


class Laboratory:
    """The model loaded once; each `run` is an engine of its own around it."""

    def __init__(self, folder: Path) -> None:
        config = EngineConfig(
            model=str(folder),
            device="cpu",
            dtype="float32",
            block_size=4,
            num_gpu_blocks_override=256,
            swap_space=1 << 22,
            num_threads=1,
        )
        self.executor = SingleProcessExecutor(config, resolve_model(config))

    def engine(
        self, *, num_blocks: int = 256, overlaps_steps: bool = False, **limits: Any
    ) -> Engine:
        return Engine(
            self.executor,
            eos_token_ids=[EOS],
            settings=settings(num_blocks=num_blocks, **limits),
            overlaps_steps=overlaps_steps,
        )

    def run(self, requests: list[Submission], **limits: Any) -> tuple[Answers, Engine]:
        """Runs all together, none of which may fail."""
        engine = self.engine(**limits)
        told = answers_to(engine, requests)
        engine.queues.blocks.check()
        engine.close()
        return told, engine


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "llama-llama3-rope-tied")
    laboratory = Laboratory(folder)
    yield laboratory
    laboratory.executor.shutdown()


@pytest.fixture(scope="module")
def alone(laboratory: Laboratory) -> Answers:
    """Each request by itself, its prompt in one step."""
    return {r.request_id: laboratory.run([r])[0][r.request_id] for r in REQUESTS}


def text_of(token_ids: list[int]) -> str:
    """What the tokens say; the end-of-sequence token says nothing."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    symbols = "".join(alphabet[i] for i in token_ids if i < 256)
    from tokenizers.decoders import ByteLevel as Decoder

    return str(Decoder().decode(list(symbols)))


def test_what_ends_keeps_to_its_constraint(alone: Answers) -> None:
    ended = 0
    for name in ("greedy", "hot", "twins", "nested", "reasoned"):
        for token_ids in alone[name]:
            if token_ids[-1] != EOS:
                continue
            ended += 1
            text = text_of(token_ids)
            if name == "reasoned":
                thought, dot, text = text.partition(".")
                assert thought
                assert dot
            if name == "twins":
                assert re.fullmatch(EXPRESSION.regex or "", text)
            elif name == "nested":
                assert re.fullmatch(r"<[a-z<>]+>", text)
            else:
                jsonschema.validate(json.loads(text), POINT)
    assert ended >= 4
    assert alone["hot"] != alone["greedy"]
    assert alone["twins"][0] != alone["twins"][1]


def test_together(laboratory: Laboratory, alone: Answers) -> None:
    told, engine = laboratory.run(REQUESTS, max_num_batched_tokens=128)
    assert told == alone
    assert engine.stats().num_prefill_chunks == len(REQUESTS)


def test_in_chunks(laboratory: Laboratory, alone: Answers) -> None:
    told, engine = laboratory.run(REQUESTS, max_num_batched_tokens=7)
    assert told == alone
    assert engine.stats().num_prefill_chunks > 2 * len(REQUESTS)


def test_preempted(laboratory: Laboratory, alone: Answers) -> None:
    told, engine = laboratory.run(REQUESTS, num_blocks=26, max_num_batched_tokens=24)
    assert told == alone
    assert engine.stats().num_preemptions > 0
    assert engine.queues.num_swaps == 0


def test_swapped(laboratory: Laboratory, alone: Answers) -> None:
    told, engine = laboratory.run(
        REQUESTS,
        num_blocks=26,
        max_num_batched_tokens=24,
        num_cpu_blocks=26,
        preemption_mode="swap",
    )
    assert told == alone
    assert engine.queues.num_swaps > 0


@pytest.mark.parametrize("num_blocks", [26, 256])
def test_overlapping(laboratory: Laboratory, alone: Answers, num_blocks: int) -> None:
    told, engine = laboratory.run(REQUESTS, overlaps_steps=True, num_blocks=num_blocks)
    assert told == alone
    assert (engine.stats().num_preemptions > 0) == (num_blocks == 26)


def test_what_would_not_end_is_brought_to_its_end(laboratory: Laboratory, alone: Answers) -> None:
    (request,) = (r for r in REQUESTS if r.request_id == "endless")
    free = replace(STORY, fit_max_tokens=False)
    params = replace(request.sampling_params, structured_output=free)
    told, _ = laboratory.run([replace(request, sampling_params=params)])
    cut = [n for n, token_ids in enumerate(told["endless"]) if token_ids[-1] != EOS]
    assert cut
    for n in cut:
        token_ids = alone["endless"][n]
        assert token_ids[-1] == EOS
        assert 40 < len(token_ids) <= 50
        assert json.loads(text_of(token_ids))["story"]


@pytest.mark.parametrize("num_past", [5, 30, 42, 46])
def test_winding_down_goes_on_where_it_was(
    laboratory: Laboratory, alone: Answers, num_past: int
) -> None:
    (request,) = (r for r in REQUESTS if r.request_id == "endless")
    past = [SequencePast(n, ids[:num_past]) for n, ids in enumerate(alone["endless"])]
    told, _ = laboratory.run([replace(request, past=past)])
    assert told["endless"] == alone["endless"]


@pytest.mark.parametrize("num_past", [1, 7])
def test_resumed_in_another_engine(laboratory: Laboratory, alone: Answers, num_past: int) -> None:
    resumed = [
        replace(
            request,
            past=[
                SequencePast(index, tokens[:num_past])
                for index, tokens in enumerate(alone[request.request_id])
            ],
        )
        for request in REQUESTS
    ]
    told, engine = laboratory.run(resumed, max_num_batched_tokens=16)
    assert told == alone
    num_tokens = sum(len(tokens) for sequences in alone.values() for tokens in sequences)
    assert engine.stats().num_generation_tokens == num_tokens - 9 * num_past


def test_a_past_that_does_not_fit_fails_its_request_alone(
    laboratory: Laboratory, alone: Answers
) -> None:
    wrong = replace(REQUESTS[0], past=[SequencePast(0, [5, 6, 7])])
    engine = laboratory.engine()
    constraint = wrong.sampling_params.structured_output
    assert constraint is not None
    engine.add(wrong)
    engine.add(REQUESTS[1])
    failures: list[RequestFailure] = []
    tokens: list[int] = []
    while engine.has_work:
        outputs = engine.step()
        failures += outputs.failures
        for output in outputs.sequences:
            tokens += output.token_ids
    (failure,) = failures
    assert failure.request_id == wrong.request_id
    assert failure.error.code is ErrorCode.INVALID_ARGUMENT
    assert failure.error.field == f"structured_output.{constraint.kind}"
    assert [tokens] == alone["hot"]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("params", [{"min_tokens": 30}, {"ignore_eos": True}])
def test_a_complete_text_ends_whatever_suspends_its_stop(
    laboratory: Laboratory, params: dict[str, Any], overlaps: bool
) -> None:
    choice = StructuredOutput(choice=("yes", "yesterday"))
    engine = laboratory.engine(overlaps_steps=overlaps)
    engine.add(constrained("a", range(5, 9), choice, **params))
    told = [output for _ in range(40) if engine.has_work for output in engine.step().sequences]
    engine.close()
    token_ids = [token_id for output in told for token_id in output.token_ids]
    # What can go on does, and what can't go on ends.
    assert text_of(token_ids) == "yesterday"
    assert token_ids[-1] == EOS
    assert told[-1].finish_reason is FinishReason.STOP


SCALARS = st.one_of(
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-1000, 1000),
        st.integers(0, 500),
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 5)),
    st.just({"type": "boolean"}),
    st.just({"type": ["null", "boolean"]}),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.integers(-9, 9), st.text(max_size=4)), min_size=1, max_size=3),
    ),
    st.just({"type": "string", "pattern": "^[A-C]{1,3}[0-9]?$"}),
)


def _objects(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.sampled_from(["a", "b", "ü", 'q"']), children, max_size=3)
    return properties.map(
        lambda chosen: {
            "type": "object",
            "properties": chosen,
            "required": list(chosen)[:2],
            "additionalProperties": False,
        }
    )


SCHEMAS = st.recursive(
    SCALARS,
    lambda children: st.one_of(
        _objects(children),
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            children,
            st.integers(0, 2),
        ),
        st.builds(lambda a, b: {"anyOf": [a, b]}, children, children),
    ),
    max_leaves=5,
)


@given(schema=SCHEMAS, seed=st.integers(0, 2**31), temperature=st.sampled_from([0.0, 1.0, 6.0]))
@hypothesis_settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_whatever_ends_validates(
    laboratory: Laboratory, schema: dict[str, Any], seed: int, temperature: float
) -> None:
    constraint = StructuredOutput(json_schema=json.dumps(schema))
    request = constrained(
        "a", range(3, 6), constraint, seed=seed, temperature=temperature, max_tokens=120
    )
    told, _ = laboratory.run([request])
    ((*token_ids, last),) = told["a"]
    assert last == EOS
    jsonschema.validate(json.loads(text_of(token_ids)), schema)
