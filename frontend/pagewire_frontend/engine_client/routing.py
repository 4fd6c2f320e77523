"""Which of several engines gets a request: where its prompt's beginning is cached, unless another
engine has so much less to do that computing it there again is cheaper.

The policy is pure: loads and prompts in, a name out. Costs are counted in requests that run beside
one another: one more of them is as dear as the prefill of `TOKENS_A_REQUEST` tokens.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

TOKENS_A_REQUEST = 64
# A request adds this much to its engine's load for each token that must be prefilled.
LOAD_OF_A_TOKEN = 1 / 512
# Bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016): no affinity leads to an engine that has
# more than this many times the mean, and so many requests besides.
LOAD_FACTOR = 1.25
LOAD_SLACK = 16.0
# Beginnings are compared at powers of two: enough for half of what two prompts share.
_FIRST_DEPTH = 16
_LAST_DEPTH = 32_768
# Where an unknown prompt starts out, so that frontends that know nothing of one another agree:
# beyond what a chat template puts before every chat.
_HOME_DEPTH = 64
_MOST_KEYS = 65_536
_KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """A prompt's beginnings.

    Attributes:
        keys: (tokens, hash of the adapter and of that many first tokens), the shortest first.
        home: the hash that ranks engines of equal cost.
        num_tokens: of the prompt.
    """

    keys: tuple[tuple[int, bytes], ...]
    home: bytes
    num_tokens: int

    @staticmethod
    def of(prompt_token_ids: Sequence[int], adapter: str = "") -> PromptKeys:
        """Hashes a prompt. The same in every process."""
        ids = array("I", prompt_token_ids[:_LAST_DEPTH])
        if sys.byteorder == "big":
            ids.byteswap()
        data = memoryview(ids).cast("B")
        digest = hashlib.blake2b(adapter.encode(), digest_size=_KEY_BYTES)
        keys: list[tuple[int, bytes]] = []
        depth, done = _FIRST_DEPTH, 0
        while depth <= len(ids):
            digest.update(data[done * ids.itemsize : depth * ids.itemsize])
            keys.append((depth, digest.digest()))
            depth, done = 2 * depth, depth
        home = next((key for depth, key in keys if depth == _HOME_DEPTH), None)
        if home is None:
            digest.update(data[done * ids.itemsize :])
            home = digest.digest()
        return PromptKeys(tuple(keys), home, len(prompt_token_ids))


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that may get the request.

    Attributes:
        name: whose.
        load: requests that it has, more or less.
    """

    name: str
    load: float


@dataclass(slots=True)
class Router:
    """Remembers where recent prompts went, within bounds.

    Attributes:
        most_keys: beginnings that are remembered; the least recently used are forgotten.
    """

    most_keys: int = _MOST_KEYS
    _homes: OrderedDict[bytes, set[str]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._homes)

    def choose(self, prompt: PromptKeys, candidates: Sequence[Candidate]) -> str:
        """The name of the candidate whose load, with what it must prefill, is the least.

        Args:
            prompt: the request's.
            candidates: at least one, whose names differ.
        """
        mean = sum(one.load for one in candidates) / len(candidates)
        least = min(one.load for one in candidates)
        bound = max(least, LOAD_FACTOR * mean + LOAD_SLACK)
        cached = self.cached_tokens(prompt)

        def cost(one: Candidate) -> tuple[float, int, bytes]:
            known = cached.get(one.name, 0)
            uncached = prompt.num_tokens - known
            rank = hashlib.blake2b(prompt.home + one.name.encode(), digest_size=_KEY_BYTES)
            return one.load + uncached / TOKENS_A_REQUEST, -known, rank.digest()

        return min((one for one in candidates if one.load <= bound), key=cost).name

    def cached_tokens(self, prompt: PromptKeys) -> dict[str, int]:
        """How much of a prompt's beginning has gone to an engine before, by its name."""
        cached: dict[str, int] = {}
        for depth, key in prompt.keys:
            homes = self._homes.get(key)
            if homes is None:
                break
            for name in homes:
                cached[name] = depth
        return cached

    def note(self, prompt: PromptKeys, name: str) -> None:
        """The prompt went to an engine, which has its beginnings cached from now on."""
        homes = self._homes
        # The longest first: what many prompts share is the last to be forgotten.
        for _, key in reversed(prompt.keys):
            if key in homes:
                homes[key].add(name)
                homes.move_to_end(key)
            else:
                homes[key] = {name}
        while len(homes) > self.most_keys:
            homes.popitem(last=False)

    def forget(self, name: str) -> None:
        """An engine's cache is gone."""
        for key in [key for key, names in self._homes.items() if name in names]:
            self._homes[key].discard(name)
            if not self._homes[key]:
                del self._homes[key]


def weight(num_prompt_tokens: int, num_cached: int, num_sequences: int) -> float:
    """What a request adds to the load of its engine."""
    return num_sequences + (num_prompt_tokens - num_cached) * LOAD_OF_A_TOKEN
