"""Runs an engine to the end of all that it was given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pagewire_engine.engine import Engine
from pagewire_engine.outputs import StepOutputs
from pagewire_engine.submission import Submission

# Token ids by request, and by sequence in it.
Answers = dict[str, list[list[int]]]


def steps_to_end(engine: Engine) -> Iterator[StepOutputs]:
    """What each step tells. No request may fail."""
    while engine.has_work:
        outputs = engine.step()
        assert not outputs.failures, outputs.failures
        yield outputs


def answers_to(engine: Engine, requests: Sequence[Submission]) -> Answers:
    """What an engine says to requests that are all there at once, with what they bring along."""
    told: Answers = {}
    for request in requests:
        told[request.request_id] = [[] for _ in range(request.sampling_params.n)]
        for past in request.past:
            told[request.request_id][past.index] += past.output_token_ids
        engine.add(request)
    for outputs in steps_to_end(engine):
        for output in outputs.sequences:
            told[output.request_id][output.sequence_index] += output.token_ids
    return told
