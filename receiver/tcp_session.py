"""One connection of the plain TCP worker: who calls, then Offer, Put and Commit, every byte that crosses counted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import structlog

from kvferry.core import frames, request_ids
from kvferry.core.admission import RETRY_AFTER_MS, Admission
from kvferry.core.errors import BusyError, InvalidRequestError, KvferryError
from kvferry.core.metrics import ReceiverMetrics
from kvferry.core.tokens import Token
from kvferry.core.wire import check_digest
from kvferry.receiver.intake import Intake, Judgement

METHOD = "tcp"
"""What logs and metrics call a connection, where they name a gRPC method otherwise."""

IDLE_SECONDS = 60.0
# Chunks that wait to be written while the next one is being received.
_AHEAD = 2
BUFFERS = _AHEAD + 1
"""A session's connection must keep the data of so many frames."""

# After an error the peer may be in the middle of a chunk; hung up on at once, it would not read why.
_LAST_WORDS_SECONDS = 2.0
_LAST_WORDS_BYTES = 16 * frames.MAX_FRAME_BYTES


class Session:
    """Frames in, frames out, in order.

    Attributes:
        admitted: whether the caller is known and has a place.
    """

    def __init__(
        self, connection: frames.Connection, intake: Intake, metrics: ReceiverMetrics, admission: Admission
    ) -> None:
        self._connection = connection
        self._intake = intake
        self._metrics = metrics
        self._admission = admission
        self._to_write: SimpleQueue[tuple[frames.Put, int] | None] = SimpleQueue()
        self._written: SimpleQueue[None] = SimpleQueue()
        self._writing = 0
        self._caller: Token | None = None
        self._failure: KvferryError | None = None
        self._charged: bytes | None = None
        self._received = 0
        self._sent = 0
        self._uncounted = [0, 0]
        self._skipped: list[tuple[int, int]] = []
        self.admitted = False

    def run(self) -> None:
        """Serve until the peer ends the stream between frames.

        Raises:
            KvferryError: when anything else ends the connection; the peer has been told.
        """
        try:
            if self._greet():
                with self._admission.limits.running(self._caller), self._writer():
                    self._serve()
        except KvferryError as error:
            # What a chunk was refused for counts for more than how the connection ended after that.
            failure = self._fail(error)
            self._connection.drain(_LAST_WORDS_BYTES)
            raise failure from None
        finally:
            self._settle()

    def _greet(self) -> bool:
        """Find out who calls; False when nobody says a word."""
        frame = self._connection.receive(frames.MAX_HELLO_BYTES)
        if frame is None:
            return False
        if not isinstance(frame, frames.Hello):
            raise InvalidRequestError(f"hello: must come first, not {type(frame).__name__}", field="hello")
        request_ids.adopt([(request_ids.HEADER, frame.request_id)])
        if frame.version != frames.VERSION:
            raise InvalidRequestError(
                f"hello: version {frame.version}, this receiver speaks {frames.VERSION}",
                field="version",
                value=frame.version,
                expected=frames.VERSION,
            )
        self._caller = self._admission.authenticate(frame.token)
        if self._caller is not None:
            structlog.contextvars.bind_contextvars(token=self._caller.name)
        return True

    def _serve(self) -> None:
        self.admitted = True
        self._connection.seconds = IDLE_SECONDS
        while (frame := self._connection.receive()) is not None:
            if isinstance(frame, frames.Put):
                self._put(frame)
                continue
            self._await_writer(0)
            self._count()
            if isinstance(frame, frames.Offer):
                self._offer(frame)
            elif isinstance(frame, frames.Commit):
                self._commit(frame)
            else:
                raise InvalidRequestError(f"frame: {type(frame).__name__} is not a request", field="frame")
        self._await_writer(0)

    def _offer(self, frame: frames.Offer) -> None:
        self._metrics.received("manifest", len(frame.manifest))
        control = self._crossed(len(frame.manifest))
        judgement = self._intake.offer(frame.manifest, self._caller)
        if judgement.verdict.accepted and not judgement.committed:
            self._charged = judgement.artifact_id
            self._intake.charge_offer(judgement.artifact_id, control)
        self._connection.send(_offered(judgement))

    def _put(self, frame: frames.Put) -> None:
        control = self._crossed(len(frame.data))
        self._charged = check_digest(frame.artifact_id, "artifact_id")
        self._to_write.put((frame, control))
        self._writing += 1
        self._await_writer(_AHEAD)

    @contextlib.contextmanager
    def _writer(self) -> Iterator[None]:
        """Have a thread that verifies, writes and acknowledges what ``_put`` hands over."""
        thread = threading.Thread(target=self._write_all, name="kvferry-tcp-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise BusyError("tcp: the system has no more threads", retry_after_ms=RETRY_AFTER_MS) from error
        try:
            yield
        finally:
            self._to_write.put(None)
            thread.join()

    def _write_all(self) -> None:
        went_well = False
        try:
            while (item := self._to_write.get()) is not None:
                self._write(*item)
                self._written.put(None)
            went_well = True
        finally:
            if not went_well:
                # A fault in our own program, which the thread's end reports. Nobody shall wait for this thread.
                self._fail(KvferryError("tcp: the receiver failed; its log says how"))
                for _ in range(BUFFERS):
                    self._written.put(None)

    def _write(self, frame: frames.Put, control: int) -> None:
        if self._failure is not None:
            self._skipped.append((len(frame.data), control))
            return
        try:
            self._intake.put(frame.artifact_id, frame.index, frame.data, control)
            self._connection.send(frames.Taken(frame.index))
        except KvferryError as error:
            # At once: the thread that reads may wait for a frame that only comes when the peer knows.
            self._fail(error)

    def _await_writer(self, left: int) -> None:
        """Wait until so many chunks are left to write."""
        while self._writing > left:
            self._written.get()
            self._writing -= 1
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: KvferryError) -> KvferryError:
        """Tell the peer why this is the end, once, and return that."""
        if self._failure is None:
            self._failure = error
            self._connection.seconds = _LAST_WORDS_SECONDS
            with contextlib.suppress(KvferryError):
                self._connection.send(frames.failure(error))
            self._connection.finish(_LAST_WORDS_SECONDS)
        return self._failure

    def _commit(self, frame: frames.Commit) -> None:
        artifact_id = check_digest(frame.artifact_id, "artifact_id")
        stored = self._intake.commit(artifact_id, frame.account_json, self._crossed(0))
        self._charged = None
        traffic = stored.record.traffic
        self._connection.send(
            frames.Committed(
                stored.artifact_id,
                stored.manifest.payload.digest,
                traffic.received_bytes if traffic else 0,
                traffic.control_bytes if traffic else 0,
            )
        )

    def _crossed(self, body: int) -> int:
        """Return how much crossed since the last time, less ``body`` bytes of manifest or payload."""
        received = self._connection.received - self._received - body
        sent = self._connection.sent - self._sent
        self._received += received + body
        self._sent += sent
        self._uncounted[0] += received
        self._uncounted[1] += sent
        return received + sent

    def _count(self) -> None:
        """Add what crossed to the metrics: not for every chunk, which would cost more than its protocol bytes."""
        self._metrics.received("control", self._uncounted[0])
        self._metrics.sent("control", self._uncounted[1])
        self._uncounted = [0, 0]

    def _settle(self) -> None:
        """Charge what crossed after the last request: its answer, and chunks that were cut off or came too late."""
        lost = self._connection.received - self._received if self._charged is not None else 0
        control = self._crossed(lost) + sum(skipped for _, skipped in self._skipped)
        lost += sum(data for data, _ in self._skipped)
        self._count()
        self._metrics.received("resent", lost)
        if self._charged is not None and control + lost:
            # Nothing is left to charge when the artifact was dropped meanwhile.
            with contextlib.suppress(KvferryError):
                self._intake.charge(self._charged, lost, control)


def _offered(judgement: Judgement) -> frames.Offered:
    reasons = tuple(
        (reason.code.value, reason.field, reason.artifact, reason.receiver) for reason in judgement.verdict.reasons
    )
    return frames.Offered(judgement.artifact_id, reasons, judgement.missing, judgement.committed)
