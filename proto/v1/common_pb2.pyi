from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReasonCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_CODE_UNSPECIFIED: _ClassVar[ReasonCode]
    REASON_CODE_VERSION_UNSUPPORTED: _ClassVar[ReasonCode]
    REASON_CODE_UNKNOWN_METHOD: _ClassVar[ReasonCode]
    REASON_CODE_WEIGHTS_MISMATCH: _ClassVar[ReasonCode]
    REASON_CODE_CONFIG_MISMATCH: _ClassVar[ReasonCode]
    REASON_CODE_QUANTIZATION_MISMATCH: _ClassVar[ReasonCode]
    REASON_CODE_ADAPTER_MISMATCH: _ClassVar[ReasonCode]
    REASON_CODE_TOKENIZER_MISMATCH: _ClassVar[ReasonCode]
    REASON_CODE_CHAT_TEMPLATE_MISMATCH: _ClassVar[ReasonCode]
    REASON_CODE_PROMPT_MISMATCH: _ClassVar[ReasonCode]
    REASON_CODE_ROPE_MISMATCH: _ClassVar[ReasonCode]
    REASON_CODE_LAYOUT_MISMATCH: _ClassVar[ReasonCode]
    REASON_CODE_LAYOUT_UNSUPPORTED: _ClassVar[ReasonCode]
    REASON_CODE_DTYPE_UNSUPPORTED: _ClassVar[ReasonCode]
    REASON_CODE_ENCODING_UNSUPPORTED: _ClassVar[ReasonCode]
    REASON_CODE_NO_MAPPER: _ClassVar[ReasonCode]
    REASON_CODE_TOO_LARGE: _ClassVar[ReasonCode]
REASON_CODE_UNSPECIFIED: ReasonCode
REASON_CODE_VERSION_UNSUPPORTED: ReasonCode
REASON_CODE_UNKNOWN_METHOD: ReasonCode
REASON_CODE_WEIGHTS_MISMATCH: ReasonCode
REASON_CODE_CONFIG_MISMATCH: ReasonCode
REASON_CODE_QUANTIZATION_MISMATCH: ReasonCode
REASON_CODE_ADAPTER_MISMATCH: ReasonCode
REASON_CODE_TOKENIZER_MISMATCH: ReasonCode
REASON_CODE_CHAT_TEMPLATE_MISMATCH: ReasonCode
REASON_CODE_PROMPT_MISMATCH: ReasonCode
REASON_CODE_ROPE_MISMATCH: ReasonCode
REASON_CODE_LAYOUT_MISMATCH: ReasonCode
REASON_CODE_LAYOUT_UNSUPPORTED: ReasonCode
REASON_CODE_DTYPE_UNSUPPORTED: ReasonCode
REASON_CODE_ENCODING_UNSUPPORTED: ReasonCode
REASON_CODE_NO_MAPPER: ReasonCode
REASON_CODE_TOO_LARGE: ReasonCode

class Reason(_message.Message):
    __slots__ = ("code", "field", "artifact_value", "receiver_value")
    CODE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_VALUE_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_VALUE_FIELD_NUMBER: _ClassVar[int]
    code: ReasonCode
    field: str
    artifact_value: str
    receiver_value: str
    def __init__(self, code: _Optional[_Union[ReasonCode, str]] = ..., field: _Optional[str] = ..., artifact_value: _Optional[str] = ..., receiver_value: _Optional[str] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("accepted", "reasons")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reasons: _containers.RepeatedCompositeFieldContainer[Reason]
    def __init__(self, accepted: _Optional[bool] = ..., reasons: _Optional[_Iterable[_Union[Reason, _Mapping]]] = ...) -> None: ...

class NodeDescription(_message.Message):
    __slots__ = ("role", "kvferry_version", "mlx_version", "mlx_lm_version", "device", "blas", "model", "unix_time", "prefill_tokens_per_second")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    KVFERRY_VERSION_FIELD_NUMBER: _ClassVar[int]
    MLX_VERSION_FIELD_NUMBER: _ClassVar[int]
    MLX_LM_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BLAS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    role: str
    kvferry_version: str
    mlx_version: str
    mlx_lm_version: str
    device: str
    blas: str
    model: ModelDescription
    unix_time: float
    prefill_tokens_per_second: float
    def __init__(self, role: _Optional[str] = ..., kvferry_version: _Optional[str] = ..., mlx_version: _Optional[str] = ..., mlx_lm_version: _Optional[str] = ..., device: _Optional[str] = ..., blas: _Optional[str] = ..., model: _Optional[_Union[ModelDescription, _Mapping]] = ..., unix_time: _Optional[float] = ..., prefill_tokens_per_second: _Optional[float] = ...) -> None: ...

class ModelDescription(_message.Message):
    __slots__ = ("id", "weights", "tokenizer", "chat_template", "dtype", "layers", "context_length", "dense_bytes_per_token")
    ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DENSE_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    id: str
    weights: str
    tokenizer: str
    chat_template: str
    dtype: str
    layers: int
    context_length: int
    dense_bytes_per_token: int
    def __init__(self, id: _Optional[str] = ..., weights: _Optional[str] = ..., tokenizer: _Optional[str] = ..., chat_template: _Optional[str] = ..., dtype: _Optional[str] = ..., layers: _Optional[int] = ..., context_length: _Optional[int] = ..., dense_bytes_per_token: _Optional[int] = ...) -> None: ...

class MethodDescription(_message.Message):
    __slots__ = ("id", "name", "form", "label", "aware", "source", "summary")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    AWARE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    form: str
    label: str
    aware: bool
    source: str
    summary: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., form: _Optional[str] = ..., label: _Optional[str] = ..., aware: _Optional[bool] = ..., source: _Optional[str] = ..., summary: _Optional[str] = ...) -> None: ...
