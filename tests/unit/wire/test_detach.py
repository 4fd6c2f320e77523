"""A frontend that closes ends its session, and all that runs in it, at once."""

from __future__ import annotations

import pytest

from pagewire.errors import InvalidArgumentError, NotFoundError, UnauthenticatedError
from pagewire_engine.session_table import SessionTable


def table_with_a_request(aborted: list[str]) -> tuple[SessionTable, str, str]:
    table = SessionTable(7, 30.0, aborted.append)
    session, _ = table.attach("", "")
    table.connect(session, b"identity", 0.0)
    stream, _ = table.open_stream(session.session_id, 1, "r", {0: 0}, 0)
    assert stream.live
    return table, session.session_id, session.secret


def test_detaching_aborts_what_runs_and_forgets_the_session() -> None:
    aborted: list[str] = []
    table, session_id, secret = table_with_a_request(aborted)
    table.detach(session_id, secret)
    assert len(aborted) == 1
    assert len(table) == 0
    assert table.by_identity(b"identity") is None
    with pytest.raises(NotFoundError):
        table.find(session_id, "r")
    # Its request id may be used again; and to detach again is no error.
    other, _ = table.attach("", "")
    table.connect(other, b"other", 0.0)
    assert table.open_stream(other.session_id, 1, "r", {0: 0}, 0)[1]
    table.detach(session_id, secret)
    assert len(table) == 1


def test_detaching_needs_the_sessions_secret() -> None:
    aborted: list[str] = []
    table, session_id, _ = table_with_a_request(aborted)
    with pytest.raises(UnauthenticatedError):
        table.detach(session_id, "guessed")
    assert not aborted
    assert len(table) == 1


def test_to_look_for_a_stream_changes_nothing_and_to_dismiss_it_refuses_it_when_it_comes() -> None:
    table, session_id, _ = table_with_a_request([])
    assert table.find(session_id, "later", 2) is None
    assert table.open_stream(session_id, 2, "later", {0: 0}, 0)[1]
    assert table.dismiss(session_id, "late", 3) is None
    with pytest.raises(InvalidArgumentError):
        table.open_stream(session_id, 3, "late", {0: 0}, 0)
    # Of one that runs the id is free at once.
    assert table.dismiss(session_id, "r", 2) is None
    assert table.dismiss(session_id, "r", 1) is not None
    assert table.open_stream(session_id, 4, "r", {0: 0}, 0)[1]
