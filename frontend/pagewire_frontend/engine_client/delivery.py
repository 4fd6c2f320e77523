"""From the content of the delta wire's frames to the mailboxes of live requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from pagewire.conversion import times_from_proto
from pagewire.errors import InternalError, PagewireError, ResourceExhaustedError, error_from_code
from pagewire.outputs import FinishReason, PositionLogprobs, TokenLogprob
from pagewire.v1 import sampling_pb2, token_deltas_pb2
from pagewire_frontend.engine_client.mailbox import BacklogError, Mailbox, MissingTokensError

OnFailure = Callable[[int, PagewireError], None]


def deliver(
    deltas: token_deltas_pb2.StepDeltas, streams: dict[int, Mailbox], on_failure: OnFailure
) -> tuple[dict[int, Mailbox], dict[int, Mailbox]]:
    """Puts an accepted frame's content into the mailboxes.

    Streams that are not known have ended here; what still comes of them is dropped.

    Returns:
        The mailboxes it has touched, and those of them that got a first token or an end, by the
        numbers of their streams.
    """
    touched, urgent = _deliver_tokens(deltas, streams, on_failure)
    for started in deltas.started:
        mailbox = streams.get(started.stream)
        if mailbox is not None:
            mailbox.add_start(started.sequence, times_from_proto(started.times))
    touched |= _deliver_prompt_logprobs(deltas, streams, on_failure)
    ended = _deliver_ends(deltas, streams, on_failure)
    touched |= ended
    urgent |= ended
    for failed in deltas.failed:
        if failed.stream in streams:
            on_failure(failed.stream, _error(failed))
    return touched, urgent


def _deliver_tokens(
    deltas: token_deltas_pb2.StepDeltas, streams: dict[int, Mailbox], on_failure: OnFailure
) -> tuple[dict[int, Mailbox], dict[int, Mailbox]]:
    """Returns the mailboxes that got some, and those of them that got a first one."""
    touched: dict[int, Mailbox] = {}
    first: dict[int, Mailbox] = {}
    logprobs = {
        (entry.stream, entry.sequence, entry.start): _positions(entry.positions)
        for entry in deltas.logprobs
    }
    tokens = list(deltas.token_id)
    sequences: Iterable[int] = deltas.sequence or itertools.repeat(0)
    offset = 0
    for number, sequence, start, count in zip(
        deltas.stream, sequences, deltas.start, deltas.count, strict=False
    ):
        mailbox = streams.get(number)
        if mailbox is not None:
            touched[number] = mailbox
            if start == 0:
                first[number] = mailbox
            run = tokens[offset : offset + count]
            try:
                if logprobs:
                    positions = logprobs.get((number, sequence, start), ())
                    mailbox.add_tokens(sequence, start, run, positions)
                else:
                    mailbox.add_tokens(sequence, start, run)
            except (MissingTokensError, IndexError) as error:
                on_failure(number, InternalError(f"the delta wire lost tokens: {error}"))
            except BacklogError as error:
                on_failure(number, _unread(error))
        offset += count
    return touched, first


def _deliver_prompt_logprobs(
    deltas: token_deltas_pb2.StepDeltas, streams: dict[int, Mailbox], on_failure: OnFailure
) -> dict[int, Mailbox]:
    """Returns the mailboxes that got some."""
    touched: dict[int, Mailbox] = {}
    for prompt in deltas.prompt_logprobs:
        mailbox = streams.get(prompt.stream)
        if mailbox is not None:
            touched[prompt.stream] = mailbox
            try:
                mailbox.add_prompt_logprobs(prompt.start, _positions(prompt.positions))
            except MissingTokensError as error:
                on_failure(prompt.stream, InternalError(f"the delta wire lost some: {error}"))
    return touched


def _deliver_ends(
    deltas: token_deltas_pb2.StepDeltas, streams: dict[int, Mailbox], on_failure: OnFailure
) -> dict[int, Mailbox]:
    """Returns the mailboxes of which a sequence has ended."""
    ended: dict[int, Mailbox] = {}
    vectors = {(entry.stream, entry.sequence): list(entry.values) for entry in deltas.vectors}
    for end in deltas.finished:
        mailbox = streams.get(end.stream)
        if mailbox is None:
            continue
        ended[end.stream] = mailbox
        try:
            _finish(mailbox, end, vectors.get((end.stream, end.sequence)))
        except UnknownReasonError as error:
            on_failure(end.stream, InternalError(f"it ended for a reason unknown here: {error}"))
        except (MissingTokensError, IndexError) as error:
            on_failure(end.stream, InternalError(f"the delta wire lost tokens: {error}"))
    return ended


def _finish(
    mailbox: Mailbox, end: token_deltas_pb2.SequenceFinished, vector: list[float] | None
) -> None:
    try:
        reason = FinishReason(end.reason)
    except ValueError:
        raise UnknownReasonError(str(end.reason)) from None
    mailbox.finish(
        end.sequence,
        reason,
        stop_token_id=end.stop_token_id if end.HasField("stop_token_id") else None,
        num_tokens=end.num_tokens,
        cumulative_logprob=end.cumulative_logprob,
        times=times_from_proto(end.times),
        vector=vector,
    )


class UnknownReasonError(Exception):
    """An engine of a later version names a reason that there was not."""


def _unread(error: BacklogError) -> PagewireError:
    return ResourceExhaustedError(
        f"the client does not read its answer, of which {error} wait for it; read as messages "
        "come, or ask for fewer log probabilities"
    )


def _error(failed: token_deltas_pb2.StreamFailed) -> PagewireError:
    retry_after_s = failed.retry_after_s if failed.HasField("retry_after_s") else None
    return error_from_code(failed.code, failed.message, failed.field, retry_after_s)


def _positions(messages: Iterable[sampling_pb2.PositionLogprobs]) -> list[PositionLogprobs]:
    return [
        PositionLogprobs(_token(message.token), [_token(token) for token in message.top])
        for message in messages
    ]


def _token(message: sampling_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob, message.rank)
