"""Which part of an output is reasoning, which its constraint does not hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pagewire.structured_output import StructuredOutput


class ReasoningMarks(NamedTuple):
    """What a model's reasoning stands between.

    Attributes:
        start: the text before it, where it may be left out; None where the prompt has begun it.
        end: the text after it.
        start_token, end_token: the control tokens that these are; None for plain text.
    """

    start: str | None
    end: str
    start_token: int | None = None
    end_token: int | None = None

    @classmethod
    def of(
        cls, constraint: StructuredOutput, control_tokens: Mapping[str, int]
    ) -> ReasoningMarks | None:
        """Those of a constraint; None where it holds from the first token.

        Args:
            constraint: what the output is held to.
            control_tokens: the model's, by their texts.
        """
        start, end = constraint.reasoning_start, constraint.reasoning_end
        if end is None:
            return None
        start_token = None if start is None else control_tokens.get(start)
        return cls(start, end, start_token, control_tokens.get(end))


class ReasoningSpan:
    """Reads an output, and tells what of it is the answer.

    Args:
        marks: of the reasoning.

    Attributes:
        inside: the output so far ends within the reasoning.
        is_over: what follows is the answer.
    """

    __slots__ = ("_marks", "_text", "inside", "is_over")

    def __init__(self, marks: ReasoningMarks) -> None:
        self._marks = marks
        self._text = b""
        self.inside = marks.start is None
        self.is_over = False

    def read(self, token_id: int, text: bytes) -> bytes:
        """The bytes of the answer in the token that has come.

        Args:
            token_id: the token.
            text: its bytes.
        """
        if self.is_over:
            return text
        self._text += text
        return self._read_inside(token_id) if self.inside else self._read_beginning(token_id)

    def _read_beginning(self, token_id: int) -> bytes:
        marks, begun = self._marks, self._text.lstrip()
        if marks.start_token is not None:
            self.inside, self.is_over = token_id == marks.start_token, bool(begun)
        else:
            start = (marks.start or "").encode()
            self.inside = begun.startswith(start)
            self.is_over = not self.inside and not start.startswith(begun)
        if self.inside:
            self.is_over = False
            return self._read_inside(token_id)
        return self._text if self.is_over else b""

    def _read_inside(self, token_id: int) -> bytes:
        marks, end = self._marks, self._marks.end.encode()
        if marks.end_token is not None:
            self._text = b""
            self._end(token_id == marks.end_token)
            return b""
        _, found, answer = self._text.partition(end)
        self._end(bool(found))
        if not found:
            self._text = self._text[-len(end) :]
        return answer

    def _end(self, is_over: bool) -> None:
        if is_over:
            self.inside, self.is_over = False, True
