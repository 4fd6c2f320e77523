"""Watchers see numbers in place of request ids."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from pagewire.v1 import engine_pb2
from pagewire_frontend.grpc_api.operations import RequestNumbers


@given(st.lists(st.lists(st.sampled_from("abcdef"), unique=True), max_size=12))
def test_a_request_keeps_its_number_and_no_two_share_one(windows: list[list[str]]) -> None:
    numbers = RequestNumbers()
    previous: dict[str, str] = {}
    used: set[str] = set()
    for ids in windows:
        window = engine_pb2.EngineWindow()
        for request_id in ids:
            window.requests.add(id=request_id)
        numbers.replace(window)
        told = dict(zip(ids, (view.id for view in window.requests), strict=True))
        assert all(number.isdecimal() for number in told.values())
        assert len(set(told.values())) == len(told)
        for request_id, number in told.items():
            if request_id in previous:
                assert number == previous[request_id]
            else:
                assert number not in used, "the number of another request"
        previous = told
        used |= set(told.values())
