"""The step that needs the most memory, to be run once before the KV blocks get the rest."""

from __future__ import annotations

import math

from pagewire.sampling_params import SamplingParams
from pagewire_engine.step import NewSequence, ScheduledSequence, StepPlan

# What makes the sampler copy and sort every row's logits.
_COSTLY_PARAMS = SamplingParams(
    max_tokens=1, temperature=1.0, top_p=0.9999, repetition_penalty=1.1, logprobs=5
)


def largest_step(
    num_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int
) -> StepPlan:
    """A plan that computes `num_tokens`, in as many sequences as may be, which all sample.

    Each sequence takes a row of logits, so most are decodes; the last ones are prefill chunks that
    take all other tokens, as long as can be and ending at the longest context, where attention
    needs the most room. One decode has the longest context too. Every block table names block 0
    alone: what is computed means nothing, and the pool need not be there yet.
    """
    num_tokens = min(num_tokens, max_num_seqs * max_model_len)
    lengths = [1] * min(max_num_seqs, num_tokens)
    rest = num_tokens - len(lengths)
    for index in reversed(range(len(lengths))):
        chunk = min(max_model_len - 1, rest)
        lengths[index] += chunk
        rest -= chunk
    new, scheduled = [], []
    for sequence_id, length in enumerate(lengths):
        start = max_model_len - length if length > 1 or sequence_id == 0 else 0
        context = start + length
        blocks = [0] * math.ceil(context / block_size)
        new.append(NewSequence(sequence_id, 0, sequence_id, [0] * context, [], _COSTLY_PARAMS))
        scheduled.append(
            ScheduledSequence(sequence_id, start, length, 0, blocks, sample_for=(sequence_id,))
        )
    return StepPlan(step=0, new_sequences=new, scheduled=scheduled)
