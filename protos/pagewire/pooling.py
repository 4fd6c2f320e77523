"""Vectors in place of text: what can be asked of a model, and how, for every API and the engine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from pagewire.errors import FailedPreconditionError, InvalidArgumentError
from pagewire.sampling_params import check_range, check_whole_number


class Task(StrEnum):
    """What can be asked of a model."""

    GENERATE = "generate"
    """Tokens that continue a prompt."""
    EMBED = "embed"
    """A vector for a text."""
    CLASSIFY = "classify"
    """Probabilities of classes for a text."""
    SCORE = "score"
    """A number for a pair of texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How a prompt's hidden states become its one vector. Which of them do is the model's affair.

    Attributes:
        task: EMBED or CLASSIFY. A cross-encoder's score is the one class of its pair.
        dimensions: of an embedding keep the first so many numbers. None: all.
        use_activation: embeddings get the length 1, classes probabilities in place of logits. None:
            as the model's files say.
        second_text_start: index of the first token of the second text of a pair, for models that
            tell the two apart; 0: a single text.
    """

    task: Task = Task.EMBED
    dimensions: int | None = None
    use_activation: bool | None = None
    second_text_start: int = 0

    def __post_init__(self) -> None:
        if self.task not in (Task.EMBED, Task.CLASSIFY):
            raise InvalidArgumentError("task", f"must be embed or classify, not {self.task!r}")
        object.__setattr__(self, "task", Task(self.task))
        if self.dimensions is not None:
            check_whole_number("dimensions", self.dimensions)
            check_range("dimensions", self.dimensions, 1, 2**31 - 1)
        if not isinstance(self.use_activation, bool | None):
            raise InvalidArgumentError(
                "use_activation", f"must be true or false, not {self.use_activation!r}"
            )
        check_whole_number("second_text_start", self.second_text_start)
        check_range("second_text_start", self.second_text_start, 0, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class PoolingInfo:
    """What a model that pools makes of a prompt.

    Attributes:
        size: numbers in a vector: of an embedding, or one a class.
        dimensions: lengths that embeddings may be cut to; none, unless `any_dimensions`.
        any_dimensions: they may be cut to every length.
        labels: names of the classes.
    """

    size: int
    dimensions: tuple[int, ...] = ()
    any_dimensions: bool = False
    labels: tuple[str, ...] = ()

    def check(self, params: PoolingParams) -> None:
        """Raises InvalidArgumentError for what this model can't be asked for."""
        wanted = params.dimensions
        if wanted is None or (params.task is Task.EMBED and wanted == self.size):
            return
        if params.task is not Task.EMBED:
            raise InvalidArgumentError("dimensions", "is for embeddings alone; leave it out")
        if wanted in self.dimensions or (self.any_dimensions and wanted < self.size):
            return
        if self.any_dimensions:
            may_be = f"the model's have {self.size} numbers, and may be cut to fewer"
        elif self.dimensions:
            listed = ", ".join(map(str, self.dimensions))
            may_be = f"the model's have {self.size} numbers, and may be cut to {listed}"
        else:
            may_be = (
                f"the model's have {self.size} numbers, and can't be cut: its config.json declares "
                "no such training (is_matryoshka or matryoshka_dimensions)"
            )
        raise InvalidArgumentError("dimensions", f"{wanted} is no length of embeddings: {may_be}")


def check_task(task: Task, tasks: Collection[Task], model: str) -> None:
    """Says what a model can do, and what to do for the rest.

    Args:
        task: what is asked of it.
        tasks: what it can do.
        model: its name, for the message.

    Raises:
        FailedPreconditionError: it can't.
    """
    if task in tasks:
        return
    if task is Task.GENERATE:
        lack = "gives vectors and generates no text; serve a model that generates"
        if Task.EMBED in tasks:
            lack += ", or start its engine with --runner generate if it is one of those"
    elif task is Task.CLASSIFY:
        lack = "has no classes; serve a sequence classifier, such as BertForSequenceClassification"
    elif Task.GENERATE in tasks:
        what = "no embeddings" if task is Task.EMBED else "no scores"
        lack = f"generates text and gives {what}; start its engine with --runner pooling"
    elif task is Task.EMBED:
        lack = "classifies texts and gives no embeddings; serve an embedding model"
    else:
        lack = "has several classes and gives no scores; serve a cross-encoder, which has one"
    raise FailedPreconditionError(f"{model} {lack}", field="model")
