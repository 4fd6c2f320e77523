from pagewire.v1 import pooling_pb2 as _pooling_pb2
from pagewire.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("session_id", "secret")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    secret: str
    def __init__(self, session_id: _Optional[str] = ..., secret: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("session_id", "secret", "epoch", "stream_endpoint", "heartbeat_interval_ms", "session_timeout_ms", "resumed", "curve_server_key", "draining")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STREAM_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    SESSION_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    CURVE_SERVER_KEY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    secret: str
    epoch: int
    stream_endpoint: str
    heartbeat_interval_ms: int
    session_timeout_ms: int
    resumed: bool
    curve_server_key: bytes
    draining: bool
    def __init__(self, session_id: _Optional[str] = ..., secret: _Optional[str] = ..., epoch: _Optional[int] = ..., stream_endpoint: _Optional[str] = ..., heartbeat_interval_ms: _Optional[int] = ..., session_timeout_ms: _Optional[int] = ..., resumed: _Optional[bool] = ..., curve_server_key: _Optional[bytes] = ..., draining: _Optional[bool] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("session_id", "secret")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    secret: str
    def __init__(self, session_id: _Optional[str] = ..., secret: _Optional[str] = ...) -> None: ...

class DetachResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("session_id", "stream", "request_id", "prompt_token_ids", "sampling_params", "beam_search", "pooling_params", "tenant", "priority", "adapter", "past", "resubmission", "adapter_version")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    POOLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PAST_FIELD_NUMBER: _ClassVar[int]
    RESUBMISSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    stream: int
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _sampling_pb2.SamplingParams
    beam_search: _sampling_pb2.BeamSearchParams
    pooling_params: _pooling_pb2.PoolingParams
    tenant: str
    priority: int
    adapter: str
    past: _containers.RepeatedCompositeFieldContainer[SequencePast]
    resubmission: bool
    adapter_version: str
    def __init__(self, session_id: _Optional[str] = ..., stream: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., beam_search: _Optional[_Union[_sampling_pb2.BeamSearchParams, _Mapping]] = ..., pooling_params: _Optional[_Union[_pooling_pb2.PoolingParams, _Mapping]] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., adapter: _Optional[str] = ..., past: _Optional[_Iterable[_Union[SequencePast, _Mapping]]] = ..., resubmission: _Optional[bool] = ..., adapter_version: _Optional[str] = ...) -> None: ...

class SequencePast(_message.Message):
    __slots__ = ("index", "output_token_ids", "finish_reason", "cumulative_logprob")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    index: int
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _sampling_pb2.FinishReason
    cumulative_logprob: float
    def __init__(self, index: _Optional[int] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., cumulative_logprob: _Optional[float] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ("seed", "adapter_version")
    SEED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    seed: int
    adapter_version: str
    def __init__(self, seed: _Optional[int] = ..., adapter_version: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "sequence", "reason", "stream")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    sequence: int
    reason: _sampling_pb2.FinishReason
    stream: int
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., sequence: _Optional[int] = ..., reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., stream: _Optional[int] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("unfinished",)
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    unfinished: int
    def __init__(self, unfinished: _Optional[int] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("epoch", "served_model_name", "architecture", "dtype", "device", "vocab_size", "max_model_len", "block_size", "num_blocks", "eos_token_ids", "default_sampling_params", "tokenizer_sha256", "created", "pagewire_version", "tasks", "pooling", "adapter_limits", "weights_sha256")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    PAGEWIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LIMITS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    served_model_name: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    default_sampling_params: _sampling_pb2.SamplingParams
    tokenizer_sha256: str
    created: int
    pagewire_version: str
    tasks: _containers.RepeatedScalarFieldContainer[_pooling_pb2.Task]
    pooling: _pooling_pb2.PoolingInfo
    adapter_limits: AdapterLimits
    weights_sha256: str
    def __init__(self, epoch: _Optional[int] = ..., served_model_name: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., default_sampling_params: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., tokenizer_sha256: _Optional[str] = ..., created: _Optional[int] = ..., pagewire_version: _Optional[str] = ..., tasks: _Optional[_Iterable[_Union[_pooling_pb2.Task, str]]] = ..., pooling: _Optional[_Union[_pooling_pb2.PoolingInfo, _Mapping]] = ..., adapter_limits: _Optional[_Union[AdapterLimits, _Mapping]] = ..., weights_sha256: _Optional[str] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ("adapter", "adapter_version")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    adapter_version: str
    def __init__(self, adapter: _Optional[str] = ..., adapter_version: _Optional[str] = ...) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("path", "data")
    PATH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    path: str
    data: bytes
    def __init__(self, path: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("interval_ms", "with_window")
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    WITH_WINDOW_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    with_window: bool
    def __init__(self, interval_ms: _Optional[int] = ..., with_window: _Optional[bool] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("epoch", "step", "num_waiting", "num_running", "num_swapped", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_preemptions", "num_prompt_tokens", "num_generation_tokens", "num_requests_finished", "num_requests_failed", "step_prefill_tokens", "step_decode_tokens", "step_time_s", "num_sessions", "num_prefill_chunks", "num_block_copies", "num_beam_forks", "prefix_cache_queries", "prefix_cache_hits", "num_cpu_blocks", "num_free_cpu_blocks", "iteration_tokens", "step_time", "window", "num_swaps", "num_overlapped_steps", "adapters", "time_to_first_token", "delta_wire", "num_steps_out_of_memory", "tls_certificate_expires_at")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    STEP_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCK_COPIES_FIELD_NUMBER: _ClassVar[int]
    NUM_BEAM_FORKS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_CPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_CPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ITERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPS_FIELD_NUMBER: _ClassVar[int]
    NUM_OVERLAPPED_STEPS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DELTA_WIRE_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_OUT_OF_MEMORY_FIELD_NUMBER: _ClassVar[int]
    TLS_CERTIFICATE_EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    num_waiting: int
    num_running: int
    num_swapped: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_requests_finished: int
    num_requests_failed: int
    step_prefill_tokens: int
    step_decode_tokens: int
    step_time_s: float
    num_sessions: int
    num_prefill_chunks: int
    num_block_copies: int
    num_beam_forks: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_cpu_blocks: int
    num_free_cpu_blocks: int
    iteration_tokens: Histogram
    step_time: Histogram
    window: EngineWindow
    num_swaps: int
    num_overlapped_steps: int
    adapters: AdapterStats
    time_to_first_token: Histogram
    delta_wire: DeltaWireStats
    num_steps_out_of_memory: int
    tls_certificate_expires_at: float
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_swapped: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_generation_tokens: _Optional[int] = ..., num_requests_finished: _Optional[int] = ..., num_requests_failed: _Optional[int] = ..., step_prefill_tokens: _Optional[int] = ..., step_decode_tokens: _Optional[int] = ..., step_time_s: _Optional[float] = ..., num_sessions: _Optional[int] = ..., num_prefill_chunks: _Optional[int] = ..., num_block_copies: _Optional[int] = ..., num_beam_forks: _Optional[int] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ..., num_cpu_blocks: _Optional[int] = ..., num_free_cpu_blocks: _Optional[int] = ..., iteration_tokens: _Optional[_Union[Histogram, _Mapping]] = ..., step_time: _Optional[_Union[Histogram, _Mapping]] = ..., window: _Optional[_Union[EngineWindow, _Mapping]] = ..., num_swaps: _Optional[int] = ..., num_overlapped_steps: _Optional[int] = ..., adapters: _Optional[_Union[AdapterStats, _Mapping]] = ..., time_to_first_token: _Optional[_Union[Histogram, _Mapping]] = ..., delta_wire: _Optional[_Union[DeltaWireStats, _Mapping]] = ..., num_steps_out_of_memory: _Optional[int] = ..., tls_certificate_expires_at: _Optional[float] = ...) -> None: ...

class DeltaWireStats(_message.Message):
    __slots__ = ("num_damaged", "num_other_session", "num_old_epoch", "num_unsent", "num_refused", "num_rewinds")
    NUM_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    NUM_OTHER_SESSION_FIELD_NUMBER: _ClassVar[int]
    NUM_OLD_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_UNSENT_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_REWINDS_FIELD_NUMBER: _ClassVar[int]
    num_damaged: int
    num_other_session: int
    num_old_epoch: int
    num_unsent: int
    num_refused: int
    num_rewinds: int
    def __init__(self, num_damaged: _Optional[int] = ..., num_other_session: _Optional[int] = ..., num_old_epoch: _Optional[int] = ..., num_unsent: _Optional[int] = ..., num_refused: _Optional[int] = ..., num_rewinds: _Optional[int] = ...) -> None: ...

class AdapterStats(_message.Message):
    __slots__ = ("num_loaded", "num_on_host", "num_on_device", "running", "waiting", "num_host_loads", "num_device_loads", "num_host_evictions")
    NUM_LOADED_FIELD_NUMBER: _ClassVar[int]
    NUM_ON_HOST_FIELD_NUMBER: _ClassVar[int]
    NUM_ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_LOADS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_LOADS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    num_loaded: int
    num_on_host: int
    num_on_device: int
    running: _containers.RepeatedScalarFieldContainer[str]
    waiting: _containers.RepeatedScalarFieldContainer[str]
    num_host_loads: int
    num_device_loads: int
    num_host_evictions: int
    def __init__(self, num_loaded: _Optional[int] = ..., num_on_host: _Optional[int] = ..., num_on_device: _Optional[int] = ..., running: _Optional[_Iterable[str]] = ..., waiting: _Optional[_Iterable[str]] = ..., num_host_loads: _Optional[int] = ..., num_device_loads: _Optional[int] = ..., num_host_evictions: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bounds", "counts", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class EngineWindow(_message.Message):
    __slots__ = ("blocks", "cpu_blocks", "requests", "step")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    cpu_blocks: bytes
    requests: _containers.RepeatedCompositeFieldContainer[EngineRequestView]
    step: StepComposition
    def __init__(self, blocks: _Optional[bytes] = ..., cpu_blocks: _Optional[bytes] = ..., requests: _Optional[_Iterable[_Union[EngineRequestView, _Mapping]]] = ..., step: _Optional[_Union[StepComposition, _Mapping]] = ...) -> None: ...

class EngineRequestView(_message.Message):
    __slots__ = ("id", "state", "num_prompt_tokens", "num_output_tokens", "num_computed_tokens", "blocks", "cpu_blocks")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[EngineRequestView.State]
        STATE_WAITING: _ClassVar[EngineRequestView.State]
        STATE_RUNNING: _ClassVar[EngineRequestView.State]
        STATE_SWAPPED: _ClassVar[EngineRequestView.State]
        STATE_FINISHED: _ClassVar[EngineRequestView.State]
    STATE_UNSPECIFIED: EngineRequestView.State
    STATE_WAITING: EngineRequestView.State
    STATE_RUNNING: EngineRequestView.State
    STATE_SWAPPED: EngineRequestView.State
    STATE_FINISHED: EngineRequestView.State
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    id: str
    state: EngineRequestView.State
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    cpu_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[str] = ..., state: _Optional[_Union[EngineRequestView.State, str]] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., cpu_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class StepComposition(_message.Message):
    __slots__ = ("step", "request", "num_tokens", "num_decodes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODES_FIELD_NUMBER: _ClassVar[int]
    step: int
    request: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_decodes: int
    def __init__(self, step: _Optional[int] = ..., request: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., num_decodes: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "base_model_name", "in_place", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    base_model_name: str
    in_place: bool
    version: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., base_model_name: _Optional[str] = ..., in_place: _Optional[bool] = ..., version: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: AdapterInfo
    def __init__(self, adapter: _Optional[_Union[AdapterInfo, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "mode", "timeout_s")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[UnloadAdapterRequest.Mode]
        MODE_WAIT: _ClassVar[UnloadAdapterRequest.Mode]
        MODE_ABORT: _ClassVar[UnloadAdapterRequest.Mode]
    MODE_UNSPECIFIED: UnloadAdapterRequest.Mode
    MODE_WAIT: UnloadAdapterRequest.Mode
    MODE_ABORT: UnloadAdapterRequest.Mode
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    mode: UnloadAdapterRequest.Mode
    timeout_s: float
    def __init__(self, name: _Optional[str] = ..., mode: _Optional[_Union[UnloadAdapterRequest.Mode, str]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("num_ended_requests", "host_bytes", "device_bytes")
    NUM_ENDED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_ended_requests: int
    host_bytes: int
    device_bytes: int
    def __init__(self, num_ended_requests: _Optional[int] = ..., host_bytes: _Optional[int] = ..., device_bytes: _Optional[int] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("unless_revision",)
    UNLESS_REVISION_FIELD_NUMBER: _ClassVar[int]
    unless_revision: str
    def __init__(self, unless_revision: _Optional[str] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "limits", "loadable_paths", "revision")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LOADABLE_PATHS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    limits: AdapterLimits
    loadable_paths: _containers.RepeatedScalarFieldContainer[str]
    revision: str
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterInfo, _Mapping]]] = ..., limits: _Optional[_Union[AdapterLimits, _Mapping]] = ..., loadable_paths: _Optional[_Iterable[str]] = ..., revision: _Optional[str] = ...) -> None: ...

class AdapterLimits(_message.Message):
    __slots__ = ("max_loras", "max_cpu_loras", "max_lora_rank")
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    MAX_CPU_LORAS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int
    def __init__(self, max_loras: _Optional[int] = ..., max_cpu_loras: _Optional[int] = ..., max_lora_rank: _Optional[int] = ...) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("name", "path", "version", "rank", "bytes", "state", "parent", "root", "alpha", "use_rslora", "modules", "host_bytes", "device_bytes", "num_running_requests", "num_waiting_requests", "has_chat_template", "has_tokenizer", "loaded_at", "from_settings")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[AdapterInfo.State]
        STATE_LOADING: _ClassVar[AdapterInfo.State]
        STATE_DISK: _ClassVar[AdapterInfo.State]
        STATE_HOST: _ClassVar[AdapterInfo.State]
        STATE_DEVICE: _ClassVar[AdapterInfo.State]
        STATE_LEAVING: _ClassVar[AdapterInfo.State]
    STATE_UNSPECIFIED: AdapterInfo.State
    STATE_LOADING: AdapterInfo.State
    STATE_DISK: AdapterInfo.State
    STATE_HOST: AdapterInfo.State
    STATE_DEVICE: AdapterInfo.State
    STATE_LEAVING: AdapterInfo.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    USE_RSLORA_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    LOADED_AT_FIELD_NUMBER: _ClassVar[int]
    FROM_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    version: str
    rank: int
    bytes: int
    state: AdapterInfo.State
    parent: str
    root: str
    alpha: float
    use_rslora: bool
    modules: _containers.RepeatedScalarFieldContainer[str]
    host_bytes: int
    device_bytes: int
    num_running_requests: int
    num_waiting_requests: int
    has_chat_template: bool
    has_tokenizer: bool
    loaded_at: int
    from_settings: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., version: _Optional[str] = ..., rank: _Optional[int] = ..., bytes: _Optional[int] = ..., state: _Optional[_Union[AdapterInfo.State, str]] = ..., parent: _Optional[str] = ..., root: _Optional[str] = ..., alpha: _Optional[float] = ..., use_rslora: _Optional[bool] = ..., modules: _Optional[_Iterable[str]] = ..., host_bytes: _Optional[int] = ..., device_bytes: _Optional[int] = ..., num_running_requests: _Optional[int] = ..., num_waiting_requests: _Optional[int] = ..., has_chat_template: _Optional[bool] = ..., has_tokenizer: _Optional[bool] = ..., loaded_at: _Optional[int] = ..., from_settings: _Optional[bool] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...
