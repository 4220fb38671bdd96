from kvferry.proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SenderServiceDescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SenderServiceDescribeResponse(_message.Message):
    __slots__ = ("node", "methods")
    NODE_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.NodeDescription
    methods: _containers.RepeatedCompositeFieldContainer[_common_pb2.MethodDescription]
    def __init__(self, node: _Optional[_Union[_common_pb2.NodeDescription, _Mapping]] = ..., methods: _Optional[_Iterable[_Union[_common_pb2.MethodDescription, _Mapping]]] = ...) -> None: ...

class SendRequest(_message.Message):
    __slots__ = ("start", "text")
    START_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    start: SendStart
    text: bytes
    def __init__(self, start: _Optional[_Union[SendStart, _Mapping]] = ..., text: _Optional[bytes] = ...) -> None: ...

class SendStart(_message.Message):
    __slots__ = ("method", "parameters", "receiver", "system", "question", "text_bytes", "text_digest", "allow_fallback")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ParameterValue
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ParameterValue, _Mapping]] = ...) -> None: ...
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEXT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FALLBACK_FIELD_NUMBER: _ClassVar[int]
    method: str
    parameters: _containers.MessageMap[str, ParameterValue]
    receiver: str
    system: str
    question: str
    text_bytes: int
    text_digest: bytes
    allow_fallback: bool
    def __init__(self, method: _Optional[str] = ..., parameters: _Optional[_Mapping[str, ParameterValue]] = ..., receiver: _Optional[str] = ..., system: _Optional[str] = ..., question: _Optional[str] = ..., text_bytes: _Optional[int] = ..., text_digest: _Optional[bytes] = ..., allow_fallback: _Optional[bool] = ...) -> None: ...

class ParameterValue(_message.Message):
    __slots__ = ("integer", "number", "text", "flag")
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    integer: int
    number: float
    text: str
    flag: bool
    def __init__(self, integer: _Optional[int] = ..., number: _Optional[float] = ..., text: _Optional[str] = ..., flag: _Optional[bool] = ...) -> None: ...

class SendResponse(_message.Message):
    __slots__ = ("progress", "end")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    progress: SendProgress
    end: SendEnd
    def __init__(self, progress: _Optional[_Union[SendProgress, _Mapping]] = ..., end: _Optional[_Union[SendEnd, _Mapping]] = ...) -> None: ...

class SendProgress(_message.Message):
    __slots__ = ("stage", "done", "total")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    stage: str
    done: int
    total: int
    def __init__(self, stage: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class SendEnd(_message.Message):
    __slots__ = ("artifact_id", "method", "form", "receiver", "account_json", "manifest_bytes", "payload_bytes", "moved_bytes", "wire_bytes", "reused", "fallback_reason")
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_JSON_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REUSED_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_REASON_FIELD_NUMBER: _ClassVar[int]
    artifact_id: bytes
    method: str
    form: str
    receiver: str
    account_json: str
    manifest_bytes: int
    payload_bytes: int
    moved_bytes: int
    wire_bytes: int
    reused: bool
    fallback_reason: str
    def __init__(self, artifact_id: _Optional[bytes] = ..., method: _Optional[str] = ..., form: _Optional[str] = ..., receiver: _Optional[str] = ..., account_json: _Optional[str] = ..., manifest_bytes: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., moved_bytes: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., reused: _Optional[bool] = ..., fallback_reason: _Optional[str] = ...) -> None: ...

class FetchSpansRequest(_message.Message):
    __slots__ = ("document_digest", "spans", "max_bytes")
    DOCUMENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    document_digest: bytes
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    max_bytes: int
    def __init__(self, document_digest: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class FetchSpansResponse(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...
