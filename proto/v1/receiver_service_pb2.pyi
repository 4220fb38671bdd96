from kvferry.proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReceiverServiceDescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReceiverServiceDescribeResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.NodeDescription
    def __init__(self, node: _Optional[_Union[_common_pb2.NodeDescription, _Mapping]] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    def __init__(self, manifest: _Optional[bytes] = ...) -> None: ...

class OfferResponse(_message.Message):
    __slots__ = ("artifact_id", "verdict", "missing", "committed")
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    artifact_id: bytes
    verdict: _common_pb2.Verdict
    missing: _containers.RepeatedCompositeFieldContainer[ChunkRange]
    committed: bool
    def __init__(self, artifact_id: _Optional[bytes] = ..., verdict: _Optional[_Union[_common_pb2.Verdict, _Mapping]] = ..., missing: _Optional[_Iterable[_Union[ChunkRange, _Mapping]]] = ..., committed: _Optional[bool] = ...) -> None: ...

class ChunkRange(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("artifact_id", "index", "data")
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    artifact_id: bytes
    index: int
    data: bytes
    def __init__(self, artifact_id: _Optional[bytes] = ..., index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("index",)
    INDEX_FIELD_NUMBER: _ClassVar[int]
    index: int
    def __init__(self, index: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("artifact_id", "account_json")
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_JSON_FIELD_NUMBER: _ClassVar[int]
    artifact_id: bytes
    account_json: str
    def __init__(self, artifact_id: _Optional[bytes] = ..., account_json: _Optional[str] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("receipt",)
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    receipt: Receipt
    def __init__(self, receipt: _Optional[_Union[Receipt, _Mapping]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("artifact_id", "payload_bytes", "payload_digest", "verify_ms", "received_bytes", "control_bytes")
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VERIFY_MS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTROL_BYTES_FIELD_NUMBER: _ClassVar[int]
    artifact_id: bytes
    payload_bytes: int
    payload_digest: bytes
    verify_ms: float
    received_bytes: int
    control_bytes: int
    def __init__(self, artifact_id: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., payload_digest: _Optional[bytes] = ..., verify_ms: _Optional[float] = ..., received_bytes: _Optional[int] = ..., control_bytes: _Optional[int] = ...) -> None: ...

class AskRequest(_message.Message):
    __slots__ = ("artifact_id", "question", "max_tokens", "temperature", "top_p", "seed", "allow_fallback", "sender")
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FALLBACK_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    artifact_id: bytes
    question: str
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    allow_fallback: bool
    sender: str
    def __init__(self, artifact_id: _Optional[bytes] = ..., question: _Optional[str] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., allow_fallback: _Optional[bool] = ..., sender: _Optional[str] = ...) -> None: ...

class AskResponse(_message.Message):
    __slots__ = ("piece", "end")
    PIECE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    piece: AnswerPiece
    end: AnswerEnd
    def __init__(self, piece: _Optional[_Union[AnswerPiece, _Mapping]] = ..., end: _Optional[_Union[AnswerEnd, _Mapping]] = ...) -> None: ...

class AnswerPiece(_message.Message):
    __slots__ = ("token_id", "text")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: str
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class AnswerEnd(_message.Message):
    __slots__ = ("text", "token_ids", "finish_reason", "ledger_json")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LEDGER_JSON_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    ledger_json: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., ledger_json: _Optional[str] = ...) -> None: ...

class TokenizerRequest(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, known: _Optional[_Iterable[bytes]] = ...) -> None: ...

class TokenizerResponse(_message.Message):
    __slots__ = ("digest", "length", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    length: int
    data: bytes
    def __init__(self, digest: _Optional[bytes] = ..., length: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class MeasureRequest(_message.Message):
    __slots__ = ("padding",)
    PADDING_FIELD_NUMBER: _ClassVar[int]
    padding: bytes
    def __init__(self, padding: _Optional[bytes] = ...) -> None: ...

class MeasureResponse(_message.Message):
    __slots__ = ("received",)
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    received: int
    def __init__(self, received: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("artifacts",)
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    artifacts: _containers.RepeatedCompositeFieldContainer[ArtifactSummary]
    def __init__(self, artifacts: _Optional[_Iterable[_Union[ArtifactSummary, _Mapping]]] = ...) -> None: ...

class ArtifactSummary(_message.Message):
    __slots__ = ("artifact_id", "method", "form", "payload_bytes", "prefix_tokens", "committed_at", "quarantined", "used_at")
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    USED_AT_FIELD_NUMBER: _ClassVar[int]
    artifact_id: bytes
    method: str
    form: str
    payload_bytes: int
    prefix_tokens: int
    committed_at: float
    quarantined: str
    used_at: float
    def __init__(self, artifact_id: _Optional[bytes] = ..., method: _Optional[str] = ..., form: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., prefix_tokens: _Optional[int] = ..., committed_at: _Optional[float] = ..., quarantined: _Optional[str] = ..., used_at: _Optional[float] = ...) -> None: ...

class DropRequest(_message.Message):
    __slots__ = ("artifact_id",)
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    artifact_id: bytes
    def __init__(self, artifact_id: _Optional[bytes] = ...) -> None: ...

class DropResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
