"""Who holds which KV block: block tables, reference counts and copy-on-write.

Blocks are plain numbers here; the tensors behind them live in the worker's cache engine.
"""

from __future__ import annotations

from enum import Enum, auto
from itertools import chain

from pagewire_engine.request import Request, Sequence


class AllocStatus(Enum):
    """Whether a waiting request can be given its blocks."""

    OK = auto()
    LATER = auto()
    """Not before others have given blocks back."""
    NEVER = auto()
    """Not even with the whole pool."""


class BlockSpaceManager:
    """The pool of KV blocks.

    Every block is free, or held by as many block tables as its reference count says.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens a block holds.
        watermark: fraction of the pool that admission leaves free, so that running sequences can
            grow for a while before one has to be preempted.
    """

    # The prefix cache will keep blocks that nobody holds; until then none is cached.
    num_cached_blocks = 0

    def __init__(self, num_blocks: int, block_size: int, watermark: float = 0.01) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._watermark_blocks = int(watermark * num_blocks)
        # A stack: what was freed last is given out first, while it is still in the CPU's caches.
        self._free = list(range(num_blocks))
        self._ref_counts = [0] * num_blocks
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def block_table(self, sequence: Sequence) -> list[int]:
        """The blocks of a sequence in order of its tokens; not to be changed by the caller."""
        return self._tables[sequence.sequence_id]

    # -- admission -----------------------------------------------------------------------------

    def can_allocate(self, request: Request, *, pool_is_idle: bool) -> AllocStatus:
        """Whether a waiting request may start.

        Args:
            pool_is_idle: nothing runs. Then neither the watermark nor the later growth of n
                sequences counts: waiting would not bring more blocks.
        """
        if self._least_blocks(request) > self.num_blocks:
            return AllocStatus.NEVER
        if pool_is_idle:
            return AllocStatus.OK
        if self._expected_blocks(request) + self._watermark_blocks > len(self._free):
            return AllocStatus.LATER
        return AllocStatus.OK

    def allocate(self, request: Request) -> None:
        """Gives the leader of an admitted request the blocks of its whole prefill."""
        leader = request.leader
        end = request.num_prompt_tokens if request.leader_alone else leader.num_tokens
        num_blocks = self.blocks_for(end)
        self._tables[leader.sequence_id] = [self._take() for _ in range(num_blocks)]

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

    # -- growth --------------------------------------------------------------------------------

    def append_slots(
        self, sequence: Sequence, num_tokens: int
    ) -> tuple[tuple[int, int], ...] | None:
        """Gives a sequence slots for its next `num_tokens` tokens.

        Returns:
            The (source, destination) blocks to copy first: one pair where the block to be written
            to is shared (copy-on-write), else none. None, with nothing changed, when the free
            blocks do not suffice.
        """
        table = self._tables[sequence.sequence_id]
        start = sequence.num_computed_tokens
        index = start // self.block_size
        # Only this block can be shared and written to: tables part where a prompt ends.
        is_shared = index < len(table) and self._ref_counts[table[index]] > 1
        num_new = -(-(start + num_tokens) // self.block_size) - len(table)
        if num_new <= 0 and not is_shared:
            return ()
        if num_new + is_shared > len(self._free):
            return None
        copies: tuple[tuple[int, int], ...] = ()
        if is_shared:
            copies = ((table[index], self._take()),)
            self._ref_counts[table[index]] -= 1
            table[index] = copies[0][1]
        table.extend(self._take() for _ in range(num_new))
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets `child` share the blocks of `parent`."""
        table = self._tables[parent.sequence_id]
        for block in table:
            self._ref_counts[block] += 1
        self._tables[child.sequence_id] = list(table)

    # -- release -------------------------------------------------------------------------------

    def free(self, request: Request) -> None:
        """Takes back all blocks of a request. Safe to call twice and in every state."""
        for sequence in request.sequences:
            self.free_sequence(sequence)

    def free_sequence(self, sequence: Sequence) -> None:
        """Takes back the blocks of one sequence that no other shares. Safe to call twice."""
        for block in reversed(self._tables.pop(sequence.sequence_id, ())):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def _take(self) -> int:
        block = self._free.pop()
        self._ref_counts[block] = 1
        return block

    # -- for those who look on (see block_map) -----------------------------------------------------

    def reference_counts(self) -> list[int]:
        """How many sequences hold each block; a copy."""
        return list(self._ref_counts)

    def cpu_reference_counts(self) -> list[int]:
        """The same of the blocks in host memory."""
        return []

    def cached_blocks(self) -> list[int]:
        """The blocks that nobody holds and that are kept for their content."""
        return []

    def held_blocks(self, request: Request) -> list[int]:
        """The blocks that a request's sequences hold, each once; ~n stands for CPU block n."""
        tables = [self._tables.get(sequence.sequence_id, ()) for sequence in request.live]
        return list(dict.fromkeys(chain.from_iterable(tables)))

    # -- integrity -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError unless `free + held + cached == num_blocks` and every reference
        is accounted for. Takes time linear in the pool: for tests and idle moments."""
        references = [0] * self.num_blocks
        for table in self._tables.values():
            for block in table:
                references[block] += 1
        free = set(self._free)
        held = sum(count > 0 for count in references)
        if references != self._ref_counts:
            raise AssertionError("reference counts and block tables disagree")
        if len(free) != len(self._free) or any(references[block] for block in free):
            raise AssertionError("a free block is listed twice, or held")
        if len(free) + held + self.num_cached_blocks != self.num_blocks:
            raise AssertionError(
                f"{len(free)} free + {held} held + {self.num_cached_blocks} cached blocks "
                f"are not {self.num_blocks}"
            )
