"""The Python SDK: send a document to one machine, ask about it on another.

    from kvferry.client import Client

    with Client(sender="localhost:7411", receiver="localhost:7412") as kv:
        report = kv.send("report.txt", method="B1")
        answer = report.ask("What is the access code of the north warehouse?")
        print(answer.text, answer.ledger.wire_bytes)

``AsyncClient`` is the same for asyncio. Neither needs MLX.
"""

from kvferry.client._async_client import AsyncClient, AsyncSendReport
from kvferry.client._async_streams import AsyncAnswerStream
from kvferry.client._client import Client, SendReport
from kvferry.client._documents import DocumentSource
from kvferry.client._references import ArtifactReference
from kvferry.client._streams import AnswerStream
from kvferry.client._values import Answer, Artifact, AskOptions, Piece, Progress, SendResult
from kvferry.core.choice import AutoChoice
from kvferry.core.errors import (
    AuthenticationError,
    BusyError,
    CancelledError,
    ConfigError,
    ContainerError,
    ContextOverflowError,
    DeadlineError,
    IntegrityError,
    InvalidRequestError,
    KvferryError,
    LookUpError,
    ManifestError,
    ModelError,
    NotFoundError,
    ParityError,
    PeerError,
    QuarantinedError,
    QuotaError,
    RefusedError,
    StoreError,
    TooLargeError,
    TransferError,
    UnavailableError,
    UnknownMethodError,
)
from kvferry.core.ledger import Ledger, SenderAccount
from kvferry.core.wire import MethodInfo, NodeInfo

__all__ = [
    "Answer",
    "AnswerStream",
    "Artifact",
    "ArtifactReference",
    "AskOptions",
    "AsyncAnswerStream",
    "AsyncClient",
    "AsyncSendReport",
    "AuthenticationError",
    "AutoChoice",
    "BusyError",
    "CancelledError",
    "Client",
    "ConfigError",
    "ContainerError",
    "ContextOverflowError",
    "DeadlineError",
    "DocumentSource",
    "IntegrityError",
    "InvalidRequestError",
    "KvferryError",
    "Ledger",
    "LookUpError",
    "ManifestError",
    "MethodInfo",
    "ModelError",
    "NodeInfo",
    "NotFoundError",
    "ParityError",
    "PeerError",
    "Piece",
    "Progress",
    "QuarantinedError",
    "QuotaError",
    "RefusedError",
    "SendReport",
    "SendResult",
    "SenderAccount",
    "StoreError",
    "TooLargeError",
    "TransferError",
    "UnavailableError",
    "UnknownMethodError",
]
