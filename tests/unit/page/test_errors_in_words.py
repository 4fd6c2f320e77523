"""A server's errors as people at the page read them."""

from __future__ import annotations

import grpc
import pytest

from pagewire_ui.frontend_link import explain, in_words


@pytest.mark.parametrize(
    ("details", "told"),
    [
        ("messages: has 2031 tokens; shorten it", "The conversation has 2031 tokens; shorten it."),
        ("sampling_params.top_p: must be above 0", "Top p must be above 0."),
        ("messages[3].role: must be 'user'", "The role of message 4 must be 'user'."),
        ("messages[0]: has no content", "Message 1 has no content."),
        ("sampling_params.stop[1]: must not be empty", "Stop number 2 must not be empty."),
        ("name: 'tiny' is the served model's name", "'tiny' is the served model's name."),
        ("model: the adapter 'sql' was unloaded", "The adapter 'sql' was unloaded."),
        ("path: must name one under --lora-dir", "The folder must name one under --lora-dir."),
        ("there is no such thing.", "There is no such thing."),
        ("Reason: unknown", "Reason: unknown."),
    ],
)  # fmt: skip
def test_a_field_of_the_api_becomes_a_word_or_goes(details: str, told: str) -> None:
    assert in_words(details) == told
    assert explain(grpc.StatusCode.INVALID_ARGUMENT, details, "a:1") == told


def test_what_a_server_does_not_do_is_told_from_what_it_does_not_know() -> None:
    def told(details: str) -> str:
        return explain(grpc.StatusCode.UNIMPLEMENTED, details, "a:1")

    assert told("path: pickled weights are not read") == "Pickled weights are not read."
    for details in ("", "Method not found!", "unknown service pagewire.v1.Adapters"):
        assert "older version" in told(details)
