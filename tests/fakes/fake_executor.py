"""An executor without a model, whose answers depend on every block the engine hands out.

It keeps token ids where a model keeps keys and values: each computed token is written to the slot
that the block table names, and the next token is a hash of the whole context read back through the
table. A wrong table, a block given out twice, a missing copy-on-write or a stale slot changes the
answer, as it would with a model, only in microseconds.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from pagewire.outputs import PositionLogprobs, TokenLogprob
from pagewire_engine.adapters.description import (
    AdapterDescription,
    AdapterFolder,
    AdapterMemory,
)
from pagewire_engine.adapters.errors import AdapterFileError
from pagewire_engine.adapters.files import read_config
from pagewire_engine.executor.base import LandedStep, PendingStep
from pagewire_engine.step import (
    Candidates,
    NewSequence,
    PooledVector,
    PromptLogprobsChunk,
    SampledToken,
    ScheduledSequence,
    StepPlan,
    StepResult,
    WorkerInfo,
)


def vector_of_crc(crc: int) -> list[float]:
    """Both halves, which float32 holds exactly."""
    return [float(crc & 0xFFFF), float(crc >> 16)]


@dataclass(slots=True)
class FakeWorkerSequence:
    """What a worker remembers of a sequence: its tokens and its block table."""

    new: NewSequence
    output_token_ids: list[int]
    block_table: list[int] = field(default_factory=list)

    def token(self, position: int) -> int:
        prompt = self.new.prompt_token_ids
        if position < len(prompt):
            return prompt[position]
        return self.output_token_ids[position - len(prompt)]

    @property
    def num_tokens(self) -> int:
        return len(self.new.prompt_token_ids) + len(self.output_token_ids)


class FakeExecutor:
    """Implements `pagewire_engine.executor.base.Executor` over integers.

    Args:
        num_blocks: blocks in the pool; 0: an encoder, which computes each prompt whole and keeps
            nothing.
        block_size: tokens a block holds.
        vocab_size: tokens are in [0, vocab_size).
        num_cpu_blocks: blocks that swapped requests may take.
        max_model_len: reported by `info()`.
        step_time_s: how long each step sleeps (with the GIL released, as a model's would).
        on_execute: called with each plan after its sequences and tables were remembered, its swaps
            done, and before anything is copied or computed; what it raises, `execute` raises.

    Attributes:
        plans: number of plans executed, reruns included.
        adapters: numbers of those in memory, and what each does.
        load_time_s: how long it takes to load one.
        nan_sequences: ids reported in `StepResult.failed` instead of being sampled.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 1000,
        *,
        num_cpu_blocks: int = 0,
        max_model_len: int = 4096,
        step_time_s: float = 0.0,
        on_execute: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_cpu_blocks = num_cpu_blocks
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.step_time_s = step_time_s
        self.on_execute = on_execute
        self.plans = 0
        self.nan_sequences: set[int] = set()
        self.sequences: dict[int, FakeWorkerSequence] = {}
        self.adapters: dict[int, int] = {}
        self.load_time_s = 0.0
        self.num_host_loads = 0
        self._slots = array("q", [-1]) * (num_blocks * block_size)
        self._cpu_slots = array("q", [-1]) * (num_cpu_blocks * block_size)

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            architecture="FakeForCausalLM",
            dtype="float32",
            device="cpu",
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_cpu_blocks=self.num_cpu_blocks,
        )

    @property
    def launches_ahead(self) -> bool:
        return False

    def launch(self, plan: StepPlan) -> PendingStep:
        return LandedStep(self.execute(plan))

    def load_adapter(self, number: int, folder: AdapterFolder) -> AdapterDescription:
        """Any folder with an adapter_config.json is one; its content decides what it does."""
        assert number not in self.adapters, "an adapter was loaded twice"
        config = read_config(folder)
        content = json.dumps(config, sort_keys=True).encode()
        if self.load_time_s:
            time.sleep(self.load_time_s)
        if config.get("r", 1) > 64:
            raise AdapterFileError("the rank is too high")
        self.adapters[number] = 1 + zlib.crc32(content) % 1000
        self.num_host_loads += 1
        return AdapterDescription(
            weights_version=hashlib.sha256(content).hexdigest(),
            rank=config.get("r", 1),
            alpha=1.0,
            use_rslora=False,
            modules=["fake_proj"],
            num_bytes=100,
        )

    def drop_adapter(self, number: int) -> None:
        self.adapters.pop(number, None)

    def adapter_memory(self) -> AdapterMemory:
        return AdapterMemory(list(self.adapters), {}, self.num_host_loads)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans += 1
        self._remember(plan)
        self._swap(plan)
        if self.on_execute is not None:
            self.on_execute(plan)
        if self.step_time_s:
            time.sleep(self.step_time_s)
        for source, destination in plan.block_copies:
            self._copy_block(self._slots, source, self._slots, destination)
        # All of the batch is written before any of it is read, as attention layers do.
        for entry in plan.scheduled:
            self._write(entry)
        return self._sample(plan)

    def shutdown(self) -> None:
        self.sequences.clear()

    def _remember(self, plan: StepPlan) -> None:
        for sequence_id in plan.forgotten:
            del self.sequences[sequence_id]
        for new in plan.new_sequences:
            assert new.sequence_id not in self.sequences, "a sequence was told of twice"
            self.sequences[new.sequence_id] = FakeWorkerSequence(new, list(new.output_token_ids))
        for sequence_id, token_id in plan.appended:
            self.sequences[sequence_id].output_token_ids.append(token_id)
        for entry in plan.scheduled:
            table = self.sequences[entry.sequence_id].block_table
            assert entry.table_start <= len(table), "a block table would have a hole"
            table[entry.table_start :] = entry.block_ids
            blocks_needed = -(-(entry.start + entry.num_tokens) // self.block_size)
            if not self.num_blocks:
                blocks_needed = 0
            assert len(table) == blocks_needed, "a block table does not cover its tokens"

    def _swap(self, plan: StepPlan) -> None:
        for device_block, cpu_block in plan.swap_out:
            self._copy_block(self._slots, device_block, self._cpu_slots, cpu_block)
        for cpu_block, device_block in plan.swap_in:
            self._copy_block(self._cpu_slots, cpu_block, self._slots, device_block)

    def _write(self, entry: ScheduledSequence) -> None:
        sequence = self.sequences[entry.sequence_id]
        end = entry.start + entry.num_tokens
        assert end <= sequence.num_tokens, "more tokens are scheduled than the sequence has"
        if not self.num_blocks:
            assert (entry.start, end) == (0, sequence.num_tokens), "a part of a prompt"
            return
        for position in range(entry.start, end):
            block = sequence.block_table[position // self.block_size]
            slot = block * self.block_size + position % self.block_size
            self._slots[slot] = sequence.token(position) + self._salt(sequence)

    def _salt(self, sequence: FakeWorkerSequence) -> int:
        """What a sequence's adapter does to its keys and values."""
        number = sequence.new.adapter
        return 0 if number == 0 else self.adapters[number] << 32

    def _sample(self, plan: StepPlan) -> StepResult:
        sampled: list[SampledToken] = []
        failed: list[tuple[int, str]] = []
        candidates: list[Candidates] = []
        prompt_logprobs: list[PromptLogprobsChunk] = []
        vectors: list[PooledVector] = []
        for entry in plan.scheduled:
            chunk = self._prompt_logprobs(entry)
            if chunk is not None:
                prompt_logprobs.append(chunk)
            if not entry.sample_for:
                continue
            context = self._context_hash(entry)
            for sequence_id in entry.sample_for:
                if sequence_id in self.nan_sequences:
                    failed.append((sequence_id, "the logits are not numbers"))
                elif self.sequences[sequence_id].new.pooling is not None:
                    vectors.append(PooledVector(sequence_id, vector_of_crc(context)))
                elif self.sequences[sequence_id].new.sampling_params.beam_search is not None:
                    candidates.append(self._candidates(sequence_id, context))
                else:
                    sampled.append(self._choose(self.sequences[sequence_id], context))
        for token in sampled:
            self.sequences[token.sequence_id].output_token_ids.append(token.token_id)
        for sequence_id, _ in failed:
            self.sequences[sequence_id].output_token_ids.append(0)
        return StepResult(plan.step, sampled, prompt_logprobs, failed, candidates, vectors=vectors)

    def _context_hash(self, entry: ScheduledSequence) -> int:
        """CRC of the tokens [0, start + num_tokens), read through the block table."""
        end = entry.start + entry.num_tokens
        table = self.sequences[entry.sequence_id].block_table
        if not self.num_blocks:
            return zlib.crc32(array("q", self.sequences[entry.sequence_id].new.prompt_token_ids))
        crc = 0
        for index, block in enumerate(table):
            tokens = self._read_block(block)[: end - index * self.block_size]
            crc = zlib.crc32(tokens.tobytes(), crc)
        return crc

    def _choose(self, sequence: FakeWorkerSequence, context: int) -> SampledToken:
        new, params = sequence.new, sequence.new.sampling_params
        noise = array("q", [context])
        if not params.greedy:
            noise.extend((new.seed, new.sequence_index, len(sequence.output_token_ids)))
        token_id = zlib.crc32(noise.tobytes()) % self.vocab_size
        if params.logprobs is None:
            return SampledToken(new.sequence_id, token_id, float("nan"))
        logprobs = self._position_logprobs(token_id, context, params.logprobs)
        return SampledToken(new.sequence_id, token_id, logprobs.token.logprob, logprobs)

    def _candidates(self, sequence_id: int, context: int) -> Candidates:
        """Scattered over the vocabulary, their log probabilities falling unevenly; the first of it
        are end-of-sequence ids to many a test, and come up as often as others."""
        params = self.sequences[sequence_id].new.sampling_params
        assert params.beam_search is not None
        count = min(2 * params.beam_search.num_candidates(1), self.vocab_size)
        token_ids: dict[int, None] = {}
        draw = 0
        while len(token_ids) < count:
            token_ids[zlib.crc32(array("q", [context, draw]).tobytes()) % self.vocab_size] = None
            draw += 1
        steps = [zlib.crc32(array("q", [context, -rank]).tobytes()) % 97 for rank in range(count)]
        logprobs = [-sum(steps[: rank + 1]) / 100 - 0.1 for rank in range(count)]
        return Candidates(sequence_id, list(token_ids), logprobs)

    def _prompt_logprobs(self, entry: ScheduledSequence) -> PromptLogprobsChunk | None:
        """Row r of a chunk predicts prompt token r + 1."""
        new = self.sequences[entry.sequence_id].new
        if new.sampling_params.prompt_logprobs is None:
            return None
        start = entry.start + 1
        end = min(entry.start + entry.num_tokens + 1, len(new.prompt_token_ids))
        if start >= end:
            return None
        positions = [
            self._position_logprobs(
                new.prompt_token_ids[position], position, new.sampling_params.prompt_logprobs
            )
            for position in range(start, end)
        ]
        return PromptLogprobsChunk(entry.sequence_id, start, positions)

    def _position_logprobs(self, token_id: int, salt: int, num_top: int) -> PositionLogprobs:
        logprob = -((token_id * 31 + salt) % 997) / 100.0
        top = [
            TokenLogprob((token_id + rank) % self.vocab_size, logprob - rank, rank + 1)
            for rank in range(num_top)
        ]
        return PositionLogprobs(TokenLogprob(token_id, logprob, 1), top)

    def _read_block(self, block: int) -> array[int]:
        return self._slots[block * self.block_size : (block + 1) * self.block_size]

    def _copy_block(
        self, source: array[int], source_block: int, target: array[int], target_block: int
    ) -> None:
        size = self.block_size
        tokens = source[source_block * size : (source_block + 1) * size]
        assert len(tokens) == size, "there is no such block"
        assert (target_block + 1) * size <= len(target), "there is no such block"
        target[target_block * size : (target_block + 1) * size] = tokens


class FreeExecutor(FakeExecutor):
    """Answers at once, and keeps the time it takes to itself."""

    seconds = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        begun = time.thread_time()
        sampled = [
            SampledToken(sequence_id, 7, 0.0)
            for entry in plan.scheduled
            for sequence_id in entry.sample_for
        ]
        self.seconds += time.thread_time() - begun
        return StepResult(plan.step, sampled)
