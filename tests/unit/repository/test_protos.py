"""The .proto files, as compilers of other ages and languages read them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor

from pagewire.v1 import (
    engine_pb2,
    inference_pb2,
    operations_pb2,
    pooling_pb2,
    sampling_pb2,
    token_deltas_pb2,
)

FILES = [engine_pb2, inference_pb2, operations_pb2, pooling_pb2, sampling_pb2, token_deltas_pb2]


def messages(found: Iterator[Descriptor]) -> Iterator[Descriptor]:
    for message in found:
        yield message
        yield from messages(iter(message.nested_types))


@pytest.mark.parametrize("module", FILES, ids=lambda module: module.DESCRIPTOR.name)
def test_no_two_fields_have_one_name_in_json(module: object) -> None:
    # protoc before 22, which Debian and Ubuntu ship, refuses a file with `steps` beside `step_s`.
    top = module.DESCRIPTOR.message_types_by_name.values()  # type: ignore[attr-defined]  # a module
    for message in messages(iter(top)):
        names = [field.name.replace("_", "").lower() for field in message.fields]
        assert len(set(names)) == len(names), message.full_name
