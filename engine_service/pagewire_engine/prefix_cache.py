"""Blocks whose content is known by a key, so that requests with the same beginning share them.

A full block's key is a hash of its tokens and of the key before it: it names all that attention
sees up to the block's end. Blocks that nobody holds stay here until their memory is wanted; the
least recently used goes first (the idea: vLLM's automatic prefix caching, and SGLang's
RadixAttention, arXiv 2312.07104).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

from pagewire_engine.request import Sequence


class PrefixCache:
    """Which block holds what, and which of them nobody holds. The blocks are plain numbers."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    @property
    def num_idle_blocks(self) -> int:
        """Blocks that are kept though nobody holds them."""
        return len(self._idle)

    def idle_blocks(self) -> list[int]:
        """These blocks, the least recently used first."""
        return list(self._idle)

    def find(self, key: bytes) -> int | None:
        """The block with this content."""
        return self._block_of.get(key)

    def publish(self, block: int, key: bytes) -> None:
        """Lets others find a held block by its content. Of two blocks with one content, the first
        stays the one that is found."""
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def hold(self, block: int) -> None:
        """Somebody holds an idle block again."""
        del self._idle[block]

    def let_go(self, block: int) -> bool:
        """Nobody holds the block any longer. Returns whether it is kept, idle."""
        if block not in self._key_of:
            return False
        self._idle[block] = None
        return True

    def evict(self) -> int:
        """Forgets the block that has been idle for longest, and returns it."""
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

    def forget(self, block: int) -> None:
        """Drops a held block's content from what can be found. No error if it never could be."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def reset(self) -> tuple[list[int], int]:
        """Forgets all. Returns the blocks that were idle, and how many could be found."""
        idle, num_known = list(self._idle), len(self._key_of)
        self._idle.clear()
        self._block_of.clear()
        self._key_of.clear()
        return idle, num_known

    def is_idle(self, block: int) -> bool:
        return block in self._idle


def extend_keys(sequence: Sequence, num_blocks: int, block_size: int) -> list[bytes]:
    """Keys of a sequence's first `num_blocks` blocks, which its tokens must fill; they are hashed
    once and kept with it."""
    keys = sequence.block_keys
    if len(keys) < num_blocks:
        key = keys[-1] if keys else hashlib.sha256(sequence.request.cache_key.encode()).digest()
        for index in range(len(keys), num_blocks):
            tokens = sequence.tokens(index * block_size, (index + 1) * block_size)
            key = hashlib.sha256(key + array("I", tokens).tobytes()).digest()
            keys.append(key)
    return keys
