"""What the engine is asked: plain data into the loop's inbox."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.outputs import FinishReason
from pagewire.pooling import PoolingParams
from pagewire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SequencePast:
    """What a sequence has produced already, when its request is submitted again."""

    index: int
    output_token_ids: list[int]
    finish_reason: FinishReason | None = None
    cumulative_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as it enters the engine.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: at least one.
        sampling_params: with a seed (admission drew one if the client gave none).
        priority: lower runs first.
        tenant: whose fair share it counts on.
        adapter: the engine's number for the LoRA that it runs with; 0: none. It is held, and let go
            of when the request has ended.
        cache_key: what besides its tokens the keys and values depend on, such as an adapter and
            its version: requests share cached blocks only with those of the same.
        past: see SequencePast.
        resubmission: admitted before; queue bounds do not apply.
        told_at_end: each sequence's tokens are told with its end, all at once: to make and carry
            a message for each token is half of what a small model's step costs the host. Not for
            requests with a past or with log probabilities.
        arrival: when it was handed over, in seconds of the engine's clock; None: as it is added.
        grammar: what its constraint was compiled to; held, and not looked at, so that it need not
            be compiled again when the request starts.
        pooling: the answer is a vector and no token; then `sampling_params` says nothing.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    priority: int = 0
    tenant: str = ""
    adapter: int = 0
    cache_key: str = ""
    past: list[SequencePast] = field(default_factory=list)
    resubmission: bool = False
    told_at_end: bool = False
    arrival: float | None = None
    grammar: object = None
    pooling: PoolingParams | None = None

    def __post_init__(self) -> None:
        if self.told_at_end and (self.past or self.sampling_params.logprobs is not None):
            raise ValueError("a past or log probabilities can't be told at the end alone")
