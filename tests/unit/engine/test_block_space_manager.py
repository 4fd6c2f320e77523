"""The pool: block tables, reference counts, copy-on-write, and a state machine over all of it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagewire_engine.block_space_manager import AllocStatus, BlockSpaceManager
from pagewire_engine.request import Request, Sequence
from tests.unit.engine.harness import submission


def make_request(
    num_prompt_tokens: int, n: int = 1, number: int = 0, max_tokens: int = 64
) -> Request:
    return Request(
        submission(str(number), range(num_prompt_tokens), n=n, max_tokens=max_tokens),
        seed=0,
        arrival_number=number,
        first_sequence_id=number * 1000,
        max_model_len=256,
        eos_token_ids=frozenset(),
        now=0.0,
    )


def compute(sequence: Sequence, num_tokens: int) -> None:
    """As if a step had computed that many tokens, the last of which gave a new one."""
    sequence.num_computed_tokens += num_tokens
    if sequence.num_computed_tokens == sequence.num_tokens:
        sequence.append(5)


def test_blocks_are_handed_out_from_the_top() -> None:
    blocks = BlockSpaceManager(8, 4)
    request = make_request(9)
    blocks.allocate(request)
    assert blocks.block_table(request.sequences[0]) == [7, 6, 5]


def test_freeing_twice_gives_back_once() -> None:
    blocks = BlockSpaceManager(8, 4)
    request = make_request(9)
    blocks.free(request)
    blocks.allocate(request)
    blocks.free(request)
    blocks.free(request)
    blocks.check()
    assert blocks.num_free_blocks == 8


@pytest.mark.parametrize(
    ("num_prompt_tokens", "status"),
    [(8, AllocStatus.OK), (20, AllocStatus.OK), (21, AllocStatus.LATER), (32, AllocStatus.NEVER)],
)
def test_admission_is_three_valued(num_prompt_tokens: int, status: AllocStatus) -> None:
    blocks = BlockSpaceManager(8, 4)
    blocks.allocate(make_request(12))
    request = make_request(num_prompt_tokens, number=1)
    assert blocks.can_allocate(request, pool_is_idle=False) is status


def test_a_prompt_that_fills_the_pool_may_have_one_token_of_output() -> None:
    blocks = BlockSpaceManager(8, 4)
    assert blocks.can_allocate(make_request(32, max_tokens=1), pool_is_idle=True) is AllocStatus.OK
    request = make_request(32, max_tokens=2)
    assert blocks.can_allocate(request, pool_is_idle=True) is AllocStatus.NEVER


def test_the_watermark_is_kept_free_unless_nothing_runs() -> None:
    blocks = BlockSpaceManager(10, 4, watermark=0.2)
    request = make_request(33)
    assert blocks.can_allocate(request, pool_is_idle=False) is AllocStatus.LATER
    assert blocks.can_allocate(request, pool_is_idle=True) is AllocStatus.OK
    smaller = make_request(32)
    assert blocks.can_allocate(smaller, pool_is_idle=False) is AllocStatus.OK


def test_the_last_holder_of_a_shared_block_writes_in_place() -> None:
    blocks = BlockSpaceManager(8, 4)
    request = make_request(6, n=3)
    blocks.allocate(request)
    first, second, third = request.sequences
    compute(first, 6)
    for child in (second, third):
        blocks.fork(first, child)
        compute(child, 6)
    assert blocks.num_free_blocks == 6

    assert blocks.append_slots(first, 1) == ((6, 5),)
    assert blocks.append_slots(second, 1) == ((6, 4),)
    assert blocks.append_slots(third, 1) == ()
    assert [blocks.block_table(s) for s in request.sequences] == [[7, 5], [7, 4], [7, 6]]
    blocks.check()


def test_a_prompt_of_whole_blocks_is_shared_without_copies() -> None:
    blocks = BlockSpaceManager(8, 4)
    request = make_request(8, n=2)
    blocks.allocate(request)
    first, second = request.sequences
    compute(first, 8)
    blocks.fork(first, second)
    compute(second, 8)
    assert blocks.append_slots(first, 1) == ()
    assert blocks.append_slots(second, 1) == ()
    assert [blocks.block_table(s) for s in request.sequences] == [[7, 6, 5], [7, 6, 4]]


def test_nothing_changes_when_blocks_lack() -> None:
    blocks = BlockSpaceManager(2, 4)
    request = make_request(6, n=2)
    blocks.allocate(request)
    first, second = request.sequences
    compute(first, 6)
    blocks.fork(first, second)
    assert blocks.append_slots(first, 1) is None
    assert blocks.block_table(first) == blocks.block_table(second) == [1, 0]
    blocks.check()


def test_blocks_of_later_tokens_are_no_room_for_a_copy() -> None:
    """A leader that was aborted between two chunks leaves its prompt's blocks to the next."""
    blocks = BlockSpaceManager(2, 4)
    request = make_request(8, n=2)
    blocks.allocate(request)
    first, second = request.sequences
    compute(first, 2)
    blocks.fork(first, second)
    compute(second, 2)
    assert blocks.append_slots(second, 1) is None
    blocks.free_sequence(first)
    assert blocks.append_slots(second, 1) == ()
    blocks.check()


def test_check_finds_a_leak() -> None:
    blocks = BlockSpaceManager(4, 4)
    blocks.allocate(make_request(6))
    blocks._free.pop()
    with pytest.raises(AssertionError, match="are not 4"):
        blocks.check()


class BlockSpaceMachine(RuleBasedStateMachine):
    """Requests of n sequences start, grow, fork, are swapped, end and are freed in any order.

    A slot holds what a model would make of all tokens up to its own: what each sequence reads
    through its table must be what its tokens make, whoever wrote it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockSpaceManager(12, 4, num_cpu_blocks=8)
        self.requests: list[Request] = []
        self.swapped: list[Request] = []
        self.slots: dict[int, int] = {}
        self.cpu_slots: dict[int, int] = {}
        self.number = 0
        self.tokens = itertools.count(1000)
        self.fork_ids = itertools.count(1_000_000)

    @rule(num_prompt_tokens=st.integers(1, 14), n=st.integers(1, 3))
    def allocate(self, num_prompt_tokens: int, n: int) -> None:
        self.number += 1
        # All prompts begin alike.
        request = make_request(num_prompt_tokens, n, self.number)
        if self.blocks.can_allocate(request, pool_is_idle=False) is not AllocStatus.OK:
            return
        num_cached = self.blocks.allocate(request)
        assert num_cached % 4 == 0
        assert num_cached < num_prompt_tokens
        self.requests.append(request)
        leader = request.leader
        assert self.blocks.append_slots(leader, num_prompt_tokens - num_cached) == ()
        self.write(leader, num_prompt_tokens - num_cached)
        for child in request.sequences[1:]:
            self.blocks.fork(leader, child)
            child.num_computed_tokens = num_prompt_tokens
        for sequence in request.sequences:
            sequence.append(next(self.tokens))

    def write(self, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_computed_tokens
        table = self.blocks.block_table(sequence)
        for position in range(start, start + num_tokens):
            slot = table[position // 4] * 4 + position % 4
            self.slots[slot] = hash(tuple(sequence.tokens(0, position + 1)))
        sequence.num_computed_tokens += num_tokens
        if sequence.num_computed_tokens >= sequence.publish_at:
            self.blocks.publish(sequence, sequence.num_computed_tokens)

    def copy(self, source: int, destination: int) -> None:
        for offset in range(4):
            if source * 4 + offset in self.slots:
                self.slots[destination * 4 + offset] = self.slots[source * 4 + offset]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([s for r in self.requests for s in r.live]))
        before = list(self.blocks.block_table(sequence))
        copies = self.blocks.append_slots(sequence, 1)
        if copies is None:
            assert self.blocks.block_table(sequence) == before
            assert self.blocks.num_available_blocks == 0
            return
        for source, destination in copies:
            self.copy(source, destination)
        self.write(sequence, 1)
        sequence.append(next(self.tokens))

    @precondition(lambda self: self.requests or self.swapped)
    @rule(data=st.data())
    def fork_a_beam(self, data: st.DataObject) -> None:
        """In the midst of its answer, swapped or not; its last token is another."""
        request = data.draw(st.sampled_from(self.requests + self.swapped))
        parent = data.draw(st.sampled_from(request.live))
        child = parent.fork(next(self.fork_ids))
        child.output_token_ids[-1] = next(self.tokens)
        self.blocks.fork(parent, child)
        request.sequences.append(child)
        request.live.append(child)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if not self.blocks.can_swap_out(request):
            return
        for block, cpu_block in self.blocks.swap_out(request):
            for offset in range(4):
                if block * 4 + offset in self.slots:
                    self.cpu_slots[cpu_block * 4 + offset] = self.slots[block * 4 + offset]
        self.requests.remove(request)
        self.swapped.append(request)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.swapped))
        if self.blocks.can_swap_in(request, pool_is_idle=False) is not AllocStatus.OK:
            return
        for cpu_block, block in self.blocks.swap_in(request):
            for offset in range(4):
                if cpu_block * 4 + offset in self.cpu_slots:
                    self.slots[block * 4 + offset] = self.cpu_slots[cpu_block * 4 + offset]
        self.swapped.remove(request)
        self.requests.append(request)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.blocks.reset_prefix_cache()
        assert self.blocks.num_cached_blocks == 0

    @precondition(lambda self: self.requests or self.swapped)
    @rule(data=st.data())
    def end_sequence(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests + self.swapped))
        sequence = data.draw(st.sampled_from(request.live))
        request.live.remove(sequence)
        self.blocks.free_sequence(sequence)
        if not request.live:
            self.forget(request)

    @precondition(lambda self: self.requests or self.swapped)
    @rule(data=st.data(), times=st.integers(1, 2), distrust=st.booleans())
    def free(self, data: st.DataObject, times: int, distrust: bool) -> None:
        request = data.draw(st.sampled_from(self.requests + self.swapped))
        self.forget(request)
        if distrust:
            self.blocks.distrust(request)
        for _ in range(times):
            self.blocks.free(request)

    def forget(self, request: Request) -> None:
        (self.requests if request in self.requests else self.swapped).remove(request)

    @invariant()
    def the_pools_add_up(self) -> None:
        self.blocks.check()

    @invariant()
    def every_sequence_reads_what_its_tokens_make(self) -> None:
        for sequence in (s for request in self.requests for s in request.live):
            table = self.blocks.block_table(sequence)
            for position in range(sequence.num_computed_tokens):
                read = self.slots[table[position // 4] * 4 + position % 4]
                assert read == hash(tuple(sequence.tokens(0, position + 1)))


TestBlockSpaceMachine = BlockSpaceMachine.TestCase
TestBlockSpaceMachine.settings = hypothesis_settings(max_examples=60, stateful_step_count=40)
