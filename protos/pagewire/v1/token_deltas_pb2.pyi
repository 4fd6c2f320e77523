from pagewire.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineFrame(_message.Message):
    __slots__ = ("hello_reply", "deltas", "heartbeat", "goodbye", "session_id", "checksum")
    HELLO_REPLY_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    hello_reply: HelloReply
    deltas: StepDeltas
    heartbeat: Heartbeat
    goodbye: Goodbye
    session_id: str
    checksum: int
    def __init__(self, hello_reply: _Optional[_Union[HelloReply, _Mapping]] = ..., deltas: _Optional[_Union[StepDeltas, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., session_id: _Optional[str] = ..., checksum: _Optional[int] = ...) -> None: ...

class FrontendFrame(_message.Message):
    __slots__ = ("hello", "ack", "session_id", "checksum")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ack: Ack
    session_id: str
    checksum: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., session_id: _Optional[str] = ..., checksum: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("session_id", "secret", "epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    secret: str
    epoch: int
    def __init__(self, session_id: _Optional[str] = ..., secret: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("session_id", "epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("session_id", "epoch", "reason", "stopping")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    reason: str
    stopping: bool
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ..., stopping: _Optional[bool] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("epoch", "frame", "rewind")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    REWIND_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    frame: int
    rewind: bool
    def __init__(self, epoch: _Optional[int] = ..., frame: _Optional[int] = ..., rewind: _Optional[bool] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("epoch", "step", "step_age_ms", "busy", "draining", "num_running", "num_waiting")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    step_age_ms: int
    busy: bool
    draining: bool
    num_running: int
    num_waiting: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., step_age_ms: _Optional[int] = ..., busy: _Optional[bool] = ..., draining: _Optional[bool] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ...) -> None: ...

class StepDeltas(_message.Message):
    __slots__ = ("epoch", "frame", "base_frame", "step", "stream", "sequence", "start", "count", "token_id", "finished", "failed", "logprobs", "prompt_logprobs", "vectors", "started")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    BASE_FRAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    frame: int
    base_frame: int
    step: int
    stream: _containers.RepeatedScalarFieldContainer[int]
    sequence: _containers.RepeatedScalarFieldContainer[int]
    start: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    token_id: _containers.RepeatedScalarFieldContainer[int]
    finished: _containers.RepeatedCompositeFieldContainer[SequenceFinished]
    failed: _containers.RepeatedCompositeFieldContainer[StreamFailed]
    logprobs: _containers.RepeatedCompositeFieldContainer[SequenceLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    vectors: _containers.RepeatedCompositeFieldContainer[SequenceVector]
    started: _containers.RepeatedCompositeFieldContainer[StreamStarted]
    def __init__(self, epoch: _Optional[int] = ..., frame: _Optional[int] = ..., base_frame: _Optional[int] = ..., step: _Optional[int] = ..., stream: _Optional[_Iterable[int]] = ..., sequence: _Optional[_Iterable[int]] = ..., start: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ..., token_id: _Optional[_Iterable[int]] = ..., finished: _Optional[_Iterable[_Union[SequenceFinished, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[StreamFailed, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[SequenceLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., vectors: _Optional[_Iterable[_Union[SequenceVector, _Mapping]]] = ..., started: _Optional[_Iterable[_Union[StreamStarted, _Mapping]]] = ...) -> None: ...

class StreamStarted(_message.Message):
    __slots__ = ("stream", "sequence", "times")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    stream: int
    sequence: int
    times: RequestTimes
    def __init__(self, stream: _Optional[int] = ..., sequence: _Optional[int] = ..., times: _Optional[_Union[RequestTimes, _Mapping]] = ...) -> None: ...

class SequenceFinished(_message.Message):
    __slots__ = ("stream", "sequence", "reason", "stop_token_id", "num_tokens", "cumulative_logprob", "times")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    stream: int
    sequence: int
    reason: _sampling_pb2.FinishReason
    stop_token_id: int
    num_tokens: int
    cumulative_logprob: float
    times: RequestTimes
    def __init__(self, stream: _Optional[int] = ..., sequence: _Optional[int] = ..., reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., cumulative_logprob: _Optional[float] = ..., times: _Optional[_Union[RequestTimes, _Mapping]] = ...) -> None: ...

class RequestTimes(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "decode_s", "cached_tokens", "preemptions", "steps", "step_time_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    decode_s: float
    cached_tokens: int
    preemptions: int
    steps: int
    step_time_s: float
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., steps: _Optional[int] = ..., step_time_s: _Optional[float] = ...) -> None: ...

class StreamFailed(_message.Message):
    __slots__ = ("stream", "code", "message", "field", "retry_after_s")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    stream: int
    code: int
    message: str
    field: str
    retry_after_s: float
    def __init__(self, stream: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class SequenceLogprobs(_message.Message):
    __slots__ = ("stream", "sequence", "start", "positions")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    stream: int
    sequence: int
    start: int
    positions: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.PositionLogprobs]
    def __init__(self, stream: _Optional[int] = ..., sequence: _Optional[int] = ..., start: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[_sampling_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("stream", "start", "positions")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    stream: int
    start: int
    positions: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.PositionLogprobs]
    def __init__(self, stream: _Optional[int] = ..., start: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[_sampling_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...

class SequenceVector(_message.Message):
    __slots__ = ("stream", "sequence", "values")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    stream: int
    sequence: int
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, stream: _Optional[int] = ..., sequence: _Optional[int] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...
