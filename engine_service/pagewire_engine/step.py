"""What passes between the engine and its workers: plain data, so that a worker can live anywhere.

A worker keeps, for each sequence it was told of, the token ids and the block table. The engine
sends what changed, and the worker appends the tokens it samples itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.outputs import PositionLogprobs
from pagewire.pooling import PoolingParams
from pagewire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence the worker does not know yet, or has forgotten since it was preempted.

    Attributes:
        sequence_id: the engine's number for it, never reused.
        sequence_index: its index within the request (part of the random counter).
        seed: the request's seed.
        prompt_token_ids: the prompt.
        output_token_ids: what it has produced so far.
        sampling_params: the request's.
        adapter: the engine's number for the LoRA that it runs with; 0: none.
        pooling: set where the sequence is to be pooled, and no token is sampled.
    """

    sequence_id: int
    sequence_index: int
    seed: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: SamplingParams
    pooling: PoolingParams | None = None
    adapter: int = 0


@dataclass(slots=True)  # one a sequence and step: frozen, it would take four times as long to make
class ScheduledSequence:
    """One sequence's part of a step: compute tokens [start, start + num_tokens) of prompt + output.

    Attributes:
        sequence_id: whose tokens.
        start: tokens whose keys and values are in the cache already (the context length before
            this step).
        num_tokens: tokens to compute now; 1 for a decode, a chunk's length for a prefill.
        table_start: index in the block table at which `block_ids` are written; what follows is cut
            off.
        block_ids: physical blocks from there on. The table covers start + num_tokens tokens after
            it.
        sample_for: sequences that each take a token from the last row's logits: none for an inner
            chunk, itself for the rest, and every sequence of the request when one prompt starts n
            of them.
    """

    sequence_id: int
    start: int
    num_tokens: int
    table_start: int
    block_ids: list[int]
    sample_for: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the engine.

    Attributes:
        step: its number.
        new_sequences: sequences to remember before anything else.
        scheduled: what to compute, in batch order: decodes first, then prefill chunks.
        forgotten: ids of sequences that ended or were preempted; forget them before
            `new_sequences` are added.
        swap_out: (device block, CPU block) to copy to host memory, before anything else is
            written.
        swap_in: (CPU block, device block) to copy back, after `swap_out`.
        block_copies: (source, destination) blocks to copy on the device, after `swap_in` and
            before computing (copy-on-write).
        appended: (sequence id, token id) for beams that the worker knows: their tokens are chosen
            by the engine, and not appended by the worker itself.
    """

    step: int
    new_sequences: list[NewSequence] = field(default_factory=list)
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    appended: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to execute."""
        return not (self.scheduled or self.swap_out or self.swap_in)


@dataclass(slots=True)  # one a token: see ScheduledSequence
class SampledToken:
    """A token chosen for a sequence.

    Attributes:
        sequence_id: whose.
        token_id: which.
        logprob: its raw log probability; NaN where the request did not ask for any.
        logprobs: what the request asked to be told, else None.
    """

    sequence_id: int
    token_id: int
    logprob: float
    logprobs: PositionLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest next tokens of a beam, in falling order, and their log probabilities.

    The log probabilities are raw, but for a temperature other than 0 and 1.
    """

    sequence_id: int
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class PooledVector:
    """What pooling made of a sequence."""

    sequence_id: int
    values: list[float]


@dataclass(frozen=True, slots=True)
class PromptLogprobsChunk:
    """Log probabilities of prompt tokens [start, start + len(positions)) of one sequence; start is
    1 or above."""

    sequence_id: int
    start: int
    positions: list[PositionLogprobs]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced.

    Attributes:
        step: its number.
        sampled: one entry for each id in the plan's `sample_for`, in the plan's order, less the
            failed and the beams.
        prompt_logprobs: for requests that asked.
        failed: (sequence id, why) where a sequence's numbers came out wrong (NaN logits): it alone
            fails.
        candidates: for the beams among the ids in `sample_for`, in the plan's order.
        refused: (sequence id, why) where a sequence's constraint can't be kept: it alone fails.
        vectors: for the pooled ones among the ids in `sample_for`, in the plan's order.
    """

    step: int
    sampled: list[SampledToken]
    prompt_logprobs: list[PromptLogprobsChunk] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    vectors: list[PooledVector] = field(default_factory=list)

    def extend(self, part: StepResult) -> None:
        """Adds what another part of the same step produced."""
        self.sampled.extend(part.sampled)
        self.prompt_logprobs.extend(part.prompt_logprobs)
        self.failed.extend(part.failed)
        self.candidates.extend(part.candidates)
        self.refused.extend(part.refused)
        self.vectors.extend(part.vectors)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What the engine must know of a loaded model.

    Attributes:
        architecture: Hugging Face's class name, such as LlamaForCausalLM.
        dtype: of weights and activations, such as float32.
        device: cpu or cuda:0.
        vocab_size: rows of the output embedding.
        max_model_len: longest sequence, prompt and output together.
        num_blocks: KV blocks in the pool.
        block_size: tokens a block holds.
        num_cpu_blocks: blocks of host memory that swapped requests may take.
        startup_s: seconds that the phases of loading took, by name.
    """

    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    num_cpu_blocks: int = 0
    startup_s: dict[str, float] = field(default_factory=dict, compare=False)
