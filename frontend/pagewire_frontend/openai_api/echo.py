"""The prompt, given back at the head of a completion (`echo`)."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagewire.outputs import PositionLogprobs, TokenLogprob
from pagewire_frontend.generation_types import PositionTextLogprobs, TextLogprob
from pagewire_frontend.openai_api.logprobs import CompletionLogprobs

if TYPE_CHECKING:
    from pagewire_frontend.tokenizer import Tokenizer


class Echo:
    """One prompt's text and, where asked for, its tokens' log probabilities.

    Args:
        tokenizer: of the model.
        prompt: the text that was sent; None where token ids were.
        token_ids: the prompt as the model saw it.

    Attributes:
        text: what precedes the produced text.
        token_ids: of the prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: str | None,
        token_ids: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self.token_ids = list(token_ids)
        self.text = (
            prompt
            if prompt is not None
            else tokenizer.decode(self.token_ids, skip_special_tokens=False)
        )

    def fill(self, logprobs: CompletionLogprobs, positions: Sequence[PositionLogprobs]) -> None:
        """Adds all of the prompt's positions; the first token has no log probability. More of their
        alternatives may have been asked for than `logprobs` shows."""
        offsets = self._text_offsets()
        first = self.token_ids[0]
        logprobs.add_first(self._text_logprob(TokenLogprob(first, 0.0, 0)))
        logprobs.add(
            [
                PositionTextLogprobs(
                    token=self._text_logprob(position.token),
                    top=[self._text_logprob(token) for token in position.top[: logprobs.num_top]],
                    text_offset=offset,
                )
                for position, offset in zip(positions, offsets[1:], strict=False)
            ],
            0,
        )

    def _text_offsets(self) -> list[int]:
        """Where each token begins in `text`, in characters. A BOS that the tokenizer added is not
        in a text that was sent, and takes no room."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        offset = 0
        offsets = []
        for token_id in self.token_ids:
            offsets.append(offset)
            special = self._tokenizer.special_token_text(token_id)
            if special is not None and not self.text.startswith(special, offset):
                continue
            offset += len(decoder.decode(self._tokenizer.token_bytes_of(token_id)))
        return offsets

    def _text_logprob(self, token: TokenLogprob) -> TextLogprob:
        raw = self._tokenizer.token_bytes_of(token.token_id)
        return TextLogprob(
            token.token_id, token.logprob, token.rank, raw.decode("utf-8", "replace"), raw
        )
