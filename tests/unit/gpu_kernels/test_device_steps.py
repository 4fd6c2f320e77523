"""Single steps of the runner of GPUs: failures, padding, slots that change hands."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pagewire.errors import UnavailableError
from pagewire.sampling_params import SamplingParams
from pagewire.structured_output import StructuredOutput
from pagewire_engine.models.base import CausalLM
from pagewire_engine.step import NewSequence, ScheduledSequence, StepPlan
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.worker.cuda_graphs import GraphSizes, StepGraphs, decode_sizes
from tests.fakes.device_executor import DeviceExecutor, RerunRecorder
from tests.fakes.fake_engine_client import byte_tokenizer, ids_of
from tests.fakes.step_driver import load
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_model

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """A tiny random model."""
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "llama-biases-untied-odd-heads")
    return load(folder)[0]


def _new(sequence_id: int, prompt: list[int], params: SamplingParams = GREEDY) -> NewSequence:
    return NewSequence(sequence_id, 0, 11, prompt, [], params)


def _prompt(sequence_id: int, length: int, first_block: int) -> ScheduledSequence:
    blocks = list(range(first_block, first_block - (-length // 4)))
    return ScheduledSequence(sequence_id, 0, length, 0, blocks, (sequence_id,))


def _decode(sequence_id: int, start: int, new_block: int | None = None) -> ScheduledSequence:
    blocks = [] if new_block is None else [new_block]
    return ScheduledSequence(sequence_id, start, 1, -(-start // 4), blocks, (sequence_id,))


def _tokens(executor: DeviceExecutor, *plans: StepPlan) -> list[dict[int, int]]:
    """Each step's tokens by sequence, every step but the first launched ahead of a result."""
    pending = [executor.launch(plan) for plan in plans]
    return [{t.sequence_id: t.token_id for t in step.result().sampled} for step in pending]


@pytest.mark.parametrize("sizes", [(), (4,)])
def test_nan_fails_its_own_sequence_only(model: CausalLM, sizes: tuple[int, ...]) -> None:
    model = copy.deepcopy(model)
    model.input_embedding().weight[300] = math.nan
    executor = DeviceExecutor(model, num_blocks=16, graph_sizes=sizes)
    prompts = {1: [5, 6, 7], 2: [300, 6, 7], 3: [8, 9, 10]}
    new = [_new(i, prompt) for i, prompt in prompts.items()]
    first = executor.launch(StepPlan(1, new, [_prompt(i, 3, i) for i in prompts]))
    # The next step is on its way before anybody knows.
    second = executor.launch(StepPlan(2, [], [_decode(i, 3) for i in prompts]))
    result = first.result()
    assert [sequence_id for sequence_id, _ in result.failed] == [2]
    assert "NaN" in result.failed[0][1]
    assert [token.sequence_id for token in result.sampled] == [1, 3]
    assert [token.sequence_id for token in second.result().sampled] == [1, 3]
    # A later user of the failed sequence's block and slot must not see its NaN.
    reuse = StepPlan(3, [_new(4, [5])], [_prompt(4, 1, 2)], forgotten=[2])
    assert not executor.execute(reuse).failed


def test_no_allowed_token_fails_the_sequence(model: CausalLM) -> None:
    params = SamplingParams(temperature=1.0, min_tokens=2, stop_token_ids=tuple(range(VOCAB_SIZE)))
    executor = DeviceExecutor(model, num_blocks=16, graph_sizes=(2,))
    plan = StepPlan(
        1, [_new(1, [5, 6], params), _new(2, [7, 8])], [_prompt(1, 2, 1), _prompt(2, 2, 2)]
    )
    result = executor.execute(plan)
    assert result.failed == [(1, "min_tokens and stop_token_ids together allow no token")]
    assert [token.sequence_id for token in result.sampled] == [2]


@pytest.mark.parametrize(("failing", "sizes"), [(1, ()), (2, (2,)), (3, (2,))])
def test_a_failed_launch_can_be_tried_again_and_counts_once(
    model: CausalLM, sizes: tuple[int, ...], failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [
        StepPlan(1, [_new(1, [5, 6, 7, 8, 9])], [_prompt(1, 5, 3)]),
        StepPlan(2, [], [_decode(1, 5)]),
        StepPlan(3, [_new(2, [1, 2])], [_decode(1, 6), _prompt(2, 2, 6)]),
        StepPlan(4, [], [_decode(1, 7), _decode(2, 2)]),
        StepPlan(5, [], [_decode(1, 8, new_block=9), _decode(2, 3)]),
    ]
    expected = _tokens(DeviceExecutor(model, num_blocks=16), *plans)
    executor = DeviceExecutor(model, num_blocks=16, graph_sizes=sizes)
    before = [executor.launch(plan) for plan in plans[: failing - 1]]

    def broken(tensor: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    # After sampling: the device's state has advanced.
    with monkeypatch.context() as patch:
        patch.setattr(executor.runner._downloads, "begin", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            executor.launch(plans[failing - 1])
    told = [step.result() for step in before]
    for plan in plans[failing - 1 :]:
        again = plan if plan.step > failing else StepPlan(plan.step, [], plan.scheduled)
        told.append(executor.execute(again))
    assert [{t.sequence_id: t.token_id for t in step.sampled} for step in told] == expected


def test_padding_writes_nothing_and_samples_nothing(model: CausalLM) -> None:
    plans = [
        StepPlan(1, [_new(1, [5, 6, 7])], [_prompt(1, 3, 0)]),
        *(StepPlan(2 + n, [], [_decode(1, 3 + n, 1 if n == 1 else None)]) for n in range(4)),
    ]
    alone, padded = (DeviceExecutor(model, num_blocks=8, graph_sizes=sizes) for sizes in ((), (8,)))
    assert _tokens(padded, *plans) == _tokens(alone, *plans)
    assert padded.runner.num_replays == 4
    for ours, theirs in zip(padded.cache.key_caches, alone.cache.key_caches, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.allclose(ours, theirs, atol=1e-5, equal_nan=True)


def test_sequences_that_wait_give_their_slots_to_others(model: CausalLM) -> None:
    """Two at a time of five, all of them known: with four slots, they come and go."""
    prompts = {i: [10 * i, 10 * i + 1, 10 * i + 2] for i in range(1, 6)}
    blocks = {i: 2 * i for i in prompts}
    single = DeviceExecutor(model, num_blocks=16)
    alone = {
        i: _tokens(
            single,
            StepPlan(1, [_new(i, prompt)], [_prompt(i, 3, blocks[i])]),
            StepPlan(2, [], [_decode(i, 3)]),
            StepPlan(3, [], [_decode(i, 4, blocks[i] + 1)]),
        )
        for i, prompt in prompts.items()
    }
    executor = DeviceExecutor(model, num_blocks=16, max_num_seqs=2, graph_sizes=(1, 2))
    plans = [
        StepPlan(i, [_new(i, prompt)], [_prompt(i, 3, blocks[i])]) for i, prompt in prompts.items()
    ]
    plans += [
        StepPlan(10, [], [_decode(1, 3), _decode(2, 3)]),
        StepPlan(11, [], [_decode(3, 3), _decode(4, 3)]),
        StepPlan(12, [], [_decode(5, 3), _decode(1, 4, blocks[1] + 1)]),
        StepPlan(13, [], [_decode(2, 4, blocks[2] + 1), _decode(3, 4, blocks[3] + 1)]),
        StepPlan(14, [], [_decode(4, 4, blocks[4] + 1), _decode(5, 4, blocks[5] + 1)]),
    ]
    told: dict[int, list[int]] = {i: [] for i in prompts}
    under_way = executor.launch(plans[0])
    for plan in [*plans[1:], None]:
        behind = None if plan is None else executor.launch(plan)
        for token in under_way.result().sampled:
            told[token.sequence_id].append(token.token_id)
        if behind is not None:
            under_way = behind
    for i in prompts:
        assert told[i] == [tokens[i] for tokens in alone[i]]


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCompiler]:
    files = {"tokenizer.json": byte_tokenizer().to_str().encode()}
    compiler = GrammarCompiler(lambda: files, vocab_size=VOCAB_SIZE, eos_token_ids=[257, 258])
    yield compiler
    compiler.close()


@pytest.mark.parametrize("sizes", [(), (2,)])
def test_a_constraint_is_kept_and_its_neighbour_goes_on(
    model: CausalLM, sizes: tuple[int, ...], grammars: GrammarCompiler
) -> None:
    plans = [
        StepPlan(1, [], [_prompt(1, 3, 1), _prompt(2, 3, 4)]),
        StepPlan(2, [], [_decode(1, 3), _decode(2, 3)]),
        StepPlan(3, [], [_decode(1, 4, new_block=2), _decode(2, 4, new_block=5)]),
        StepPlan(4, [], [_decode(1, 5), _decode(2, 5)]),
    ]
    told = {}
    for constraint in (None, StructuredOutput(regex="abc")):
        params = replace(GREEDY, structured_output=constraint)
        new = [_new(1, [5, 6, 7], params), _new(2, [8, 9, 10])]
        executor = DeviceExecutor(model, num_blocks=16, graph_sizes=sizes, grammars=grammars)
        told[constraint is None] = _tokens(
            executor, replace(plans[0], new_sequences=new), *plans[1:]
        )
    constrained = [tokens[1] for tokens in told[False]]
    assert constrained[:3] == ids_of("abc")
    assert constrained[3] in (257, 258)
    assert [tokens[2] for tokens in told[False]] == [tokens[2] for tokens in told[True]]


def test_a_constraint_that_cannot_be_kept_fails_its_own_sequence_only(
    model: CausalLM, grammars: GrammarCompiler
) -> None:
    params = replace(GREEDY, structured_output=StructuredOutput(regex="(("))
    executor = DeviceExecutor(model, num_blocks=16, graph_sizes=(2,), grammars=grammars)
    new = [_new(1, [5, 6, 7], params), _new(2, [8, 9, 10])]
    first = executor.launch(StepPlan(1, new, [_prompt(1, 3, 1), _prompt(2, 3, 4)]))
    second = executor.launch(StepPlan(2, [], [_decode(1, 3), _decode(2, 3)]))
    for result in (first.result(), second.result()):
        assert [sequence_id for sequence_id, _ in result.refused] == [1]
        assert [token.sequence_id for token in result.sampled] == [2]
        assert not result.failed


def test_nan_fails_a_constrained_sequence_also_where_its_mask_hides_it(
    model: CausalLM, grammars: GrammarCompiler
) -> None:
    model = copy.deepcopy(model)
    model.lm_head.weight[300] = math.nan
    params = replace(GREEDY, structured_output=StructuredOutput(regex="abc"))
    executor = DeviceExecutor(model, num_blocks=16, grammars=grammars)
    result = executor.execute(StepPlan(1, [_new(1, [5, 6, 7], params)], [_prompt(1, 3, 1)]))
    assert not result.sampled
    assert [sequence_id for sequence_id, _ in result.failed] == [1]


def test_what_fails_when_a_step_lands_is_nobodys_request(model: CausalLM) -> None:
    executor = DeviceExecutor(model, num_blocks=16)
    step = executor.launch(StepPlan(1, [_new(1, [5, 6, 7])], [_prompt(1, 3, 0)]))

    class Broken:
        def take(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    step.download = Broken()  # type: ignore[attr-defined]
    with pytest.raises(UnavailableError, match="illegal memory access"):
        step.result()


def test_a_plan_that_only_forgets_launches_nothing(model: CausalLM) -> None:
    executor = DeviceExecutor(model, num_blocks=16)
    assert executor.execute(StepPlan(9, forgotten=[4])).step == 9


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 1000, 5000])
def test_sizes_rise_to_the_most_and_are_few(most: int) -> None:
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert len(sizes) <= 64
    assert all(after <= 2 * max(before, 1) for before, after in itertools.pairwise(sizes))


def test_the_smallest_graph_that_holds_a_step_is_taken() -> None:
    graphs = StepGraphs((1, 2, 4, 8), 100, RerunRecorder())
    graphs.capture(lambda rows: torch.zeros(rows, 3))
    assert [graph.num_rows if graph else None for graph in (
        graphs.find(1, 5), graphs.find(3, 5), graphs.find(8, 5), graphs.find(9, 5),
        graphs.find(3, 101),
    )] == [1, 4, 8, None, None]  # fmt: skip
    assert StepGraphs().find(1, 1) is None


def _sizes(num_weights: float, max_context: int = 8192, max_num_tokens: int = 8192) -> GraphSizes:
    return GraphSizes.of(
        max_num_seqs=64,
        max_num_tokens=max_num_tokens,
        max_context=max_context,
        num_weights=int(num_weights),
    )


def test_layers_are_graphs_where_launching_them_takes_longer_than_computing() -> None:
    assert _sizes(1e8).layers[-1] == 2048
    assert _sizes(1.24e9).layers[-1] == 2048
    assert 512 < _sizes(8e9).layers[-1] < 2048
    assert _sizes(1e8, max_num_tokens=100).layers[-1] == 96
    assert not _sizes(0).layers
    assert not _sizes(1e12).layers


def test_long_contexts_have_graphs_of_their_own() -> None:
    sizes = _sizes(1e8, max_context=131072)
    assert sizes.max_contexts == [8192, 131072]
    graphs = sizes.graphs(RerunRecorder())
    recorded: list[tuple[int, int]] = []
    for decodes in graphs.decodes:

        def run(rows: int, context: int = decodes.max_context) -> torch.Tensor:
            recorded.append((rows, context))
            return torch.full((rows, 1), context)

        decodes.capture(run)
    assert len(recorded) == 2 * len(sizes.decodes)
    for longest, context in ((5, 8192), (8192, 8192), (8193, 131072), (131072, 131072)):
        graph = graphs.find_decode(3, longest)
        assert graph is not None
        assert graph.output[0].item() == context
    assert graphs.find_decode(3, 131073) is None
    assert sizes.count == 2 * len(sizes.decodes) + len(sizes.layers)
    assert _sizes(1e8).max_contexts == [8192]
