"""Carrying an artifact over the plain TCP worker: the same steps as over gRPC, in frames."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

from kvferry.core import frames
from kvferry.core.addresses import Address
from kvferry.core.compat import Reason, ReasonCode, Verdict, refusal
from kvferry.core.errors import IntegrityError, KvferryError, PeerError, TransferError, UnavailableError
from kvferry.core.ledger import SenderAccount, Traffic, to_json
from kvferry.core.stored import Stored


def deliver(
    stored: Stored,
    account: SenderAccount,
    receiver: Address,
    seconds: float,
    *,
    token: str = "",
    context: ssl.SSLContext | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Traffic | None:
    """Deliver an artifact. Blocking.

    Args:
        stored: what to carry.
        account: what making it cost.
        receiver: host and port of the TCP worker.
        seconds: how long each frame may take.
        token: presented first.
        context: TLS, or None.
        progress: told the bytes that are acknowledged, and all.

    Returns:
        What crossed, or None when the receiver had the artifact already.

    Raises:
        RefusedError: when the verdict is against the artifact.
        TransferError: when the connection breaks; delivering again moves only what is missing.
        KvferryError: whatever the receiver reports.
    """
    with _connected(receiver, seconds, context) as connection:
        connection.send(frames.Hello(token))
        connection.send(frames.Offer(stored.encoded))
        missing = _read_offer(stored, connection)
        if missing is None:
            return None
        _put(stored, connection, missing, progress)
        connection.send(frames.Commit(stored.artifact_id, to_json(account)))
        receipt, _ = connection.expect()
        if not isinstance(receipt, frames.Committed):
            raise PeerError(f"{receiver}: answered Commit with {type(receipt).__name__}")
        if receipt.payload_digest != stored.manifest.payload.digest:
            raise IntegrityError("payload: the receipt names another digest", field="payload_digest")
        length = stored.manifest.payload.length
        return Traffic(len(stored.encoded), length, receipt.received_bytes, receipt.control_bytes)


@contextlib.contextmanager
def _connected(receiver: Address, seconds: float, context: ssl.SSLContext | None) -> Iterator[frames.Connection]:
    try:
        endpoint = socket.create_connection((receiver.host, receiver.port), timeout=seconds)
    except OSError as error:
        raise UnavailableError(
            f"{receiver}: cannot be reached ({error.strerror or error})", peer=str(receiver)
        ) from error
    with endpoint:
        try:
            wrapped = context.wrap_socket(endpoint, server_hostname=receiver.host) if context else endpoint
        except OSError as error:
            raise UnavailableError(f"{receiver}: TLS handshake failed ({error})", peer=str(receiver)) from error
        with wrapped:
            yield frames.Connection(wrapped)


def _read_offer(stored: Stored, connection: frames.Connection) -> list[int] | None:
    answer, _ = connection.expect()
    if not isinstance(answer, frames.Offered) or answer.artifact_id != stored.artifact_id:
        raise IntegrityError("manifest: the receiver read other bytes than were sent", field="manifest")
    if answer.reasons:
        raise refusal(Verdict(tuple(Reason(_code(code), *rest) for code, *rest in answer.reasons)))
    if answer.committed:
        return None
    wanted = [index for start, end in answer.missing for index in range(max(start, 0), min(end, stored.plan.count))]
    if len(wanted) != sum(end - start for start, end in answer.missing):
        raise PeerError(f"missing: the receiver asks for chunks that are none of the payload's {stored.plan.count}")
    return wanted


def _code(name: str) -> ReasonCode:
    return ReasonCode(name) if name in ReasonCode.__members__ else ReasonCode.UNKNOWN_METHOD


def _put(
    stored: Stored,
    connection: frames.Connection,
    wanted: list[int],
    progress: Callable[[int, int], None] | None,
) -> None:
    reader = _Acknowledgements(stored, connection, wanted, progress)
    reader.start()
    try:
        for index in wanted:
            if reader.failed:
                break
            connection.send(frames.Put(stored.artifact_id, index, stored.read_chunk(index)))
    except TransferError:
        # The receiver may have said why before it hung up; that is the better error.
        connection.shutdown()
        reader.finish()
        raise
    reader.finish()


class _Acknowledgements(threading.Thread):
    """Reads one acknowledgement a chunk while chunks are still going out."""

    def __init__(
        self,
        stored: Stored,
        connection: frames.Connection,
        wanted: list[int],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        super().__init__(name="kvferry-tcp-reader", daemon=True)
        self._stored = stored
        self._connection = connection
        self._pending = set(wanted)
        self._progress = progress
        self._error: KvferryError | None = None

    @property
    def failed(self) -> bool:
        """Whether no further chunk needs to be sent."""
        return self._error is not None

    def run(self) -> None:
        """Read until every chunk is acknowledged or something is wrong."""
        plan, total = self._stored.plan, self._stored.manifest.payload.length
        done = total - sum(end - start for start, end in map(plan.range, self._pending))
        try:
            while self._pending:
                answer, _ = self._connection.expect()
                if not isinstance(answer, frames.Taken) or answer.index not in self._pending:
                    raise TransferError("chunks: acknowledged without being sent")
                self._pending.discard(answer.index)
                start, end = plan.range(answer.index)
                done += end - start
                if self._progress is not None:
                    self._progress(done, total)
        except KvferryError as error:
            self._error = error

    def finish(self) -> None:
        """Wait for the last acknowledgement.

        Raises:
            KvferryError: what went wrong.
        """
        self.join()
        if self._error is not None:
            raise self._error
