"""Who holds which KV block: block tables, reference counts, copy-on-write, swap and prefix cache.

Blocks are plain numbers here; the tensors behind them live in the worker's cache engine. Blocks of
the device are 0 and up; in the table of a swapped sequence, ~b stands for block b of host memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum, auto

from pagewire_engine.prefix_cache import PrefixCache, extend_keys
from pagewire_engine.request import Request, Sequence


class AllocStatus(Enum):
    """Whether a request can be given its blocks."""

    OK = auto()
    LATER = auto()
    """Not before others have given blocks back."""
    NEVER = auto()
    """Not even with the whole pool."""


class BlockSpaceManager:
    """The pools of KV blocks.

    Every block of the device is free, held by as many block tables as its reference count says, or
    cached: held by none, but still with the content that its key names.

    Args:
        num_blocks: blocks of the device; 0 for a model that keeps no keys and values: its requests
            need none.
        block_size: tokens a block holds.
        watermark: fraction of the pool that admission leaves free, so that running sequences can
            grow for a while before one has to be preempted.
        num_cpu_blocks: CPU blocks, to swap to.
        enable_prefix_caching: False: nothing is cached.

    Attributes:
        num_tokens_queried: tokens of prefills that the prefix cache was asked for.
        num_tokens_hit: those of them that need not be computed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        watermark: float = 0.01,
        *,
        num_cpu_blocks: int = 0,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.block_size = block_size
        self.num_tokens_queried = 0
        self.num_tokens_hit = 0
        self._watermark_blocks = int(watermark * num_blocks)
        # Stacks: what was freed last is given out first, while it is still in the CPU's caches.
        self._free = list(range(num_blocks))
        self._free_cpu = list(range(num_cpu_blocks))
        self._ref_counts = [0] * num_blocks
        self._cpu_ref_counts = [0] * num_cpu_blocks
        self._tables: dict[int, list[int]] = {}
        self._cache = PrefixCache()
        self._caches_prefixes = enable_prefix_caching

    @property
    def num_free_blocks(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody holds, with content that may be asked for again."""
        return self._cache.num_idle_blocks

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be given out: the free and the cached ones."""
        return len(self._free) + self._cache.num_idle_blocks

    @property
    def num_free_cpu_blocks(self) -> int:
        return len(self._free_cpu)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill or begin."""
        return -(-num_tokens // self.block_size) if self.num_blocks else 0

    def block_table(self, sequence: Sequence) -> list[int]:
        """The blocks of a sequence in order of its tokens; not to be changed by the caller."""
        return self._tables[sequence.sequence_id]

    def can_allocate(self, request: Request, *, pool_is_idle: bool) -> AllocStatus:
        """Whether a waiting request may start.

        Args:
            pool_is_idle: nothing runs. Then neither the watermark nor the later growth of n
                sequences counts: waiting would not bring more blocks.
        """
        if not self.can_ever_hold(request):
            return AllocStatus.NEVER
        if pool_is_idle:
            return self._can_allocate_now(request)
        wanted = self.num_wanted(request)
        return AllocStatus.OK if wanted <= self.num_available_blocks else AllocStatus.LATER

    def can_ever_hold(self, request: Request) -> bool:
        """Whether the whole pool suffices for a request."""
        return self._least_blocks(request) <= self.num_blocks

    def num_wanted(self, request: Request) -> int:
        """Blocks that must be available for a waiting request to start, the watermark included."""
        # What others hold costs nothing. What is idle has to be taken from the pool all the same.
        held = sum(not self._cache.is_idle(block) for block in self._cached_prefix(request))
        return self._expected_blocks(request) - held + self._watermark_blocks

    def num_alone(self, request: Request) -> int:
        """Blocks that only this request holds."""
        own = self._device_references(request)
        return sum(self._ref_counts[block] == count for block, count in own.items())

    def allocate(self, request: Request) -> int:
        """Gives the leader of an admitted request the blocks of its whole prefill, cached ones as
        far as there are: their tokens count as computed.

        Returns:
            Tokens that were found in the cache.
        """
        leader = request.leader
        prefix = self._cached_prefix(request)
        for block in prefix:
            self._hold(block)
        num_new = self.blocks_for(_prefill_end(request)) - len(prefix)
        self._tables[leader.sequence_id] = prefix + [self._take() for _ in range(num_new)]
        leader.num_computed_tokens = len(prefix) * self.block_size
        leader.publish_at = self._publish_after(len(prefix))
        self.num_tokens_queried += _prefill_end(request)
        self.num_tokens_hit += leader.num_computed_tokens
        return leader.num_computed_tokens

    def _can_allocate_now(self, request: Request) -> AllocStatus:
        """With nothing running, only swapped groups can hold blocks: those that others of them had
        shared."""
        prefix = self._cached_prefix(request)
        held = sum(not self._cache.is_idle(block) for block in prefix)
        wanted = self.blocks_for(_prefill_end(request)) - held
        return AllocStatus.OK if wanted <= self.num_available_blocks else AllocStatus.LATER

    def _least_blocks(self, request: Request) -> int:
        """Blocks without which its longest sequence can't go on, were it alone.

        The last token a sequence may produce needs no slot: nothing is computed from it.
        """
        longest = max(sequence.num_tokens for sequence in request.live)
        return self.blocks_for(min(longest + 1, request.max_num_tokens - 1))

    def _expected_blocks(self, request: Request) -> int:
        """Blocks it holds once all of its sequences have come to their first decode."""
        if len(request.live) == 1:
            return self.blocks_for(request.live[0].num_tokens)
        shared = request.num_prompt_tokens // self.block_size
        return shared + sum(self.blocks_for(s.num_tokens) - shared for s in request.live)

    def publish(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Lets others find the blocks that a sequence has filled.

        Args:
            num_computed_tokens: whose keys and values are in the cache by now.
        """
        table, size = self._tables[sequence.sequence_id], self.block_size
        num_full = num_computed_tokens // size
        keys = extend_keys(sequence, num_full, size)
        for index in range(sequence.publish_at // size - 1, num_full):
            self._cache.publish(table[index], keys[index])
        sequence.publish_at = self._publish_after(num_full)

    def reset_prefix_cache(self) -> int:
        """Forgets all content; blocks that are held stay so. Returns how many blocks could have
        been found."""
        idle, num_known = self._cache.reset()
        self._free.extend(idle)
        return num_known

    def _cached_prefix(self, request: Request) -> list[int]:
        """The cached blocks that a waiting request's prefill begins with.

        The prefill's last token is always computed, in a block of its own: its logits are wanted.
        """
        if not self._caches_prefixes or not request.may_skip_prompt:
            return []
        num_blocks = (_prefill_end(request) - 1) // self.block_size
        keys = extend_keys(request.leader, num_blocks, self.block_size)
        prefix: list[int] = []
        for key in keys[:num_blocks]:
            block = self._cache.find(key)
            if block is None:
                break
            prefix.append(block)
        return prefix

    def _publish_after(self, num_full_blocks: int) -> int:
        return (num_full_blocks + 1) * self.block_size if self._caches_prefixes else sys.maxsize

    def has_slot(self, sequence: Sequence) -> bool:
        """Whether a sequence has a slot for its next token, in a block that it holds alone."""
        table = self._tables[sequence.sequence_id]
        index = sequence.num_computed_tokens // self.block_size
        return index < len(table) and self._ref_counts[table[index]] == 1

    def append_slots(
        self, sequence: Sequence, num_tokens: int
    ) -> tuple[tuple[int, int], ...] | None:
        """Gives a sequence slots for its next `num_tokens` tokens.

        Returns:
            The (source, destination) blocks to copy first: one pair where the block to be written
            to is shared (copy-on-write), else none. None, with nothing changed, when the available
            blocks do not suffice.
        """
        table = self._tables[sequence.sequence_id]
        start = sequence.num_computed_tokens
        index = start // self.block_size
        # Only this block can be shared and written to: tables part where a prompt ends.
        is_shared = index < len(table) and self._ref_counts[table[index]] > 1
        num_new = max(0, self.blocks_for(start + num_tokens) - len(table))
        if num_new == 0 and not is_shared:
            return ()
        if num_new + is_shared > self.num_available_blocks:
            return None
        copies: tuple[tuple[int, int], ...] = ()
        if is_shared:
            copies = ((table[index], self._take()),)
            self._ref_counts[table[index]] -= 1
            table[index] = copies[0][1]
        table.extend(self._take() for _ in range(num_new))
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets `child` share the blocks of `parent`, and what is known of them."""
        table = self._tables[parent.sequence_id]
        for block in table:
            if block < 0:
                self._cpu_ref_counts[~block] += 1
            else:
                self._ref_counts[block] += 1
        self._tables[child.sequence_id] = list(table)
        num_published = parent.publish_at // self.block_size - 1
        child.publish_at = parent.publish_at
        child.block_keys = parent.block_keys[:num_published]

    def can_swap_out(self, request: Request) -> bool:
        """Whether host memory has room for the blocks that a request holds alone."""
        return self.num_alone(request) <= len(self._free_cpu)

    def swap_out(
        self, request: Request, unwritten: Mapping[int, int] | None = None
    ) -> list[tuple[int, int]]:
        """Moves the blocks that a request holds alone to host memory; those that others hold too
        stay where they are, held.

        Args:
            unwritten: blocks that a copy is still to be written to, and where from.

        Returns:
            (device block, CPU block) to copy before anything else is written.
        """
        own = self._device_references(request)
        alone = {block for block, count in own.items() if self._ref_counts[block] == count}
        moved: dict[int, int] = {}
        for sequence in request.live:
            table = self._tables.get(sequence.sequence_id, [])
            for index, block in enumerate(table):
                if block in alone:
                    cpu_block = moved.get(block)
                    if cpu_block is None:
                        cpu_block = moved[block] = self._free_cpu.pop()
                    self._cpu_ref_counts[cpu_block] += 1
                    table[index] = ~cpu_block
        for block in reversed(moved):
            self._ref_counts[block] = 0
            self._give_back(block)
        sources = unwritten or {}
        return [(sources.get(block, block), cpu_block) for block, cpu_block in moved.items()]

    def can_swap_in(self, request: Request, *, pool_is_idle: bool) -> AllocStatus:
        """Whether a swapped request may go on. NEVER: waiting would not bring the blocks."""
        wanted = len(self._cpu_blocks(request)) + self._growth(request)
        if wanted > self.num_blocks:
            return AllocStatus.NEVER
        if pool_is_idle:
            enough = wanted <= self.num_available_blocks
            return AllocStatus.OK if enough else AllocStatus.NEVER
        enough = wanted + self._watermark_blocks <= self.num_available_blocks
        return AllocStatus.OK if enough else AllocStatus.LATER

    def swap_in(self, request: Request) -> list[tuple[int, int]]:
        """Moves a request's blocks back. Returns (CPU block, device block) to copy first."""
        moved = {cpu_block: self._take() for cpu_block in self._cpu_blocks(request)}
        for cpu_block, block in moved.items():
            self._ref_counts[block] = self._cpu_ref_counts[cpu_block]
            self._cpu_ref_counts[cpu_block] = 0
            self._free_cpu.append(cpu_block)
        for sequence in request.live:
            table = self._tables.get(sequence.sequence_id, [])
            table[:] = [moved[~block] if block < 0 else block for block in table]
        return list(moved.items())

    def _growth(self, request: Request) -> int:
        """Blocks that a request's sequences may take in its next step, at most."""
        growth = 0
        for sequence in request.live:
            table = self._tables.get(sequence.sequence_id)
            if table is not None:
                growth += max(0, self.blocks_for(sequence.num_tokens) - len(table))
                growth += len(request.live) > 1  # it may part from the others
        return growth

    def _device_references(self, request: Request) -> Counter[int]:
        """How often a request's block tables name each block of the device."""
        tables = [self._tables.get(sequence.sequence_id, []) for sequence in request.live]
        return Counter(block for table in tables for block in table if block >= 0)

    def _cpu_blocks(self, request: Request) -> list[int]:
        tables = [self._tables.get(sequence.sequence_id, []) for sequence in request.live]
        return list(dict.fromkeys(~block for table in tables for block in table if block < 0))

    def free(self, request: Request) -> None:
        """Takes back all blocks of a request. Safe to call twice and in every state."""
        for sequence in request.sequences:
            self.free_sequence(sequence)

    def free_sequence(self, sequence: Sequence) -> None:
        """Takes back the blocks of one sequence that no other shares. Safe to call twice."""
        sequence.publish_at = sys.maxsize
        # The last first: of a prefix, its end is the first to be evicted.
        for block in reversed(self._tables.pop(sequence.sequence_id, ())):
            if block < 0:
                self._cpu_ref_counts[~block] -= 1
                if self._cpu_ref_counts[~block] == 0:
                    self._free_cpu.append(~block)
                continue
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._give_back(block)

    def distrust(self, request: Request) -> None:
        """Lets nobody find the blocks that a request holds alone: its step went wrong."""
        for block, count in self._device_references(request).items():
            if self._ref_counts[block] == count:
                self._cache.forget(block)

    def _give_back(self, block: int) -> None:
        if not self._cache.let_go(block):
            self._free.append(block)

    def _hold(self, block: int) -> None:
        """Takes a share in a block that was found by its content."""
        if self._ref_counts[block] == 0:
            self._cache.hold(block)
        self._ref_counts[block] += 1

    def _take(self) -> int:
        block = self._free.pop() if self._free else self._cache.evict()
        self._ref_counts[block] = 1
        return block

    def reference_counts(self) -> list[int]:
        """How many sequences hold each block; a copy."""
        return list(self._ref_counts)

    def cpu_reference_counts(self) -> list[int]:
        """The same of the blocks in host memory."""
        return list(self._cpu_ref_counts)

    def cached_blocks(self) -> list[int]:
        """The blocks that nobody holds and that are kept for their content."""
        return self._cache.idle_blocks()

    def copied_tables(self, sequences: Iterable[Sequence]) -> list[list[int]]:
        """The block tables of those sequences that have one; ~n stands for CPU block n."""
        tables = self._tables
        return [
            tables[sequence.sequence_id].copy()
            for sequence in sequences
            if sequence.sequence_id in tables
        ]

    def check(self) -> None:
        """Raises AssertionError unless `free + held + cached == num_blocks`, in both pools, and
        every reference is accounted for. Takes time linear in the pools: for tests."""
        references, cpu_references = [0] * self.num_blocks, [0] * self.num_cpu_blocks
        for table in self._tables.values():
            for block in table:
                (references if block >= 0 else cpu_references)[max(block, ~block)] += 1
        if references != self._ref_counts or cpu_references != self._cpu_ref_counts:
            raise AssertionError("reference counts and block tables disagree")
        self._check_pool(self._free, references, self.num_cached_blocks)
        self._check_pool(self._free_cpu, cpu_references, 0)
        free = set(self._free)
        for block in range(self.num_blocks):
            if self._cache.is_idle(block) and (references[block] or block in free):
                raise AssertionError(f"block {block} is cached, and held or free as well")

    @staticmethod
    def _check_pool(free: list[int], references: list[int], num_cached: int) -> None:
        held = sum(count > 0 for count in references)
        if len(set(free)) != len(free) or any(references[block] for block in free):
            raise AssertionError("a free block is listed twice, or held")
        if len(free) + held + num_cached != len(references):
            raise AssertionError(
                f"{len(free)} free + {held} held + {num_cached} cached blocks "
                f"are not {len(references)}"
            )


def _prefill_end(request: Request) -> int:
    """Tokens that the leader computes before it, or anyone, can be given a token."""
    return request.num_prompt_tokens if request.leader_alone else request.leader.num_tokens
