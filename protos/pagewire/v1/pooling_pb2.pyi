from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_GENERATE: _ClassVar[Task]
    TASK_EMBED: _ClassVar[Task]
    TASK_CLASSIFY: _ClassVar[Task]
    TASK_SCORE: _ClassVar[Task]
TASK_UNSPECIFIED: Task
TASK_GENERATE: Task
TASK_EMBED: Task
TASK_CLASSIFY: Task
TASK_SCORE: Task

class PoolingParams(_message.Message):
    __slots__ = ("task", "dimensions", "use_activation", "second_text_start")
    TASK_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    USE_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    SECOND_TEXT_START_FIELD_NUMBER: _ClassVar[int]
    task: Task
    dimensions: int
    use_activation: bool
    second_text_start: int
    def __init__(self, task: _Optional[_Union[Task, str]] = ..., dimensions: _Optional[int] = ..., use_activation: _Optional[bool] = ..., second_text_start: _Optional[int] = ...) -> None: ...

class PoolingInfo(_message.Message):
    __slots__ = ("size", "dimensions", "any_dimensions", "labels")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    ANY_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    size: int
    dimensions: _containers.RepeatedScalarFieldContainer[int]
    any_dimensions: bool
    labels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, size: _Optional[int] = ..., dimensions: _Optional[_Iterable[int]] = ..., any_dimensions: _Optional[bool] = ..., labels: _Optional[_Iterable[str]] = ...) -> None: ...
