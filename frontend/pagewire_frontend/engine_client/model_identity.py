"""What two engines must have in common."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.pooling import PoolingInfo, Task
from pagewire_frontend.engine_client.base import ModelInfo


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """What must not change under a request that goes on in another engine, or in another life of
    its own: tokens of two models are never mixed in one stream."""

    architecture: str
    vocab_size: int
    tokenizer_sha256: str
    weights_sha256: str
    tasks: tuple[Task, ...]
    pooling: PoolingInfo | None

    @staticmethod
    def of(info: ModelInfo) -> StreamIdentity:
        return StreamIdentity(
            info.architecture,
            info.vocab_size,
            info.tokenizer_sha256,
            info.weights_sha256,
            info.tasks,
            info.pooling,
        )

    def reads_alike(self, other: StreamIdentity) -> bool:
        """Whether a prompt in this model's token ids is one in the other's, too."""
        return (self.tokenizer_sha256, self.vocab_size, self.tasks) == (
            other.tokenizer_sha256,
            other.vocab_size,
            other.tasks,
        )


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """What the engines that share a frontend's requests must have in common: what clients see."""

    stream: StreamIdentity
    served_model_name: str
    max_model_len: int
    has_adapters: bool

    @staticmethod
    def of(info: ModelInfo) -> ReplicaIdentity:
        return ReplicaIdentity(
            StreamIdentity.of(info),
            info.served_model_name,
            info.max_model_len,
            info.max_loras > 0,
        )

    def difference_to(self, other: ReplicaIdentity) -> str:
        """What another has that this one has not, for the log: "max_model_len 512 and not 1024"."""
        pairs = [
            (name, getattr(mine, name), getattr(theirs, name))
            for mine, theirs in ((self, other), (self.stream, other.stream))
            for name in type(mine).__dataclass_fields__
            if name != "stream"
        ]
        return ", ".join(
            f"{name} {_shown(mine)} and not {_shown(theirs)}"
            for name, mine, theirs in pairs
            if mine != theirs
        )


def _shown(value: object) -> str:
    text = str(value)
    return f"{text[:12]}..." if len(text) == 64 else text or "none"
