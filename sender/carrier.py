"""What a way to a receiver must be able to do, and the chunks that go over it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvferry.core.compat import Verdict
from kvferry.core.errors import StoreError
from kvferry.core.payloads import Carriable


@dataclass(frozen=True)
class Offered:
    """A receiver's answer to an offer. ``missing`` holds half-open runs of chunk indices, not yet checked."""

    artifact_id: bytes
    accepted: bool
    verdict: Verdict
    missing: list[tuple[int, int]]
    committed: bool


@dataclass(frozen=True)
class Receipt:
    """A receiver's answer to a commit."""

    payload_digest: bytes
    received_bytes: int
    control_bytes: int


class Counting(Protocol):
    """Counts what crosses, by kind: a daemon's metrics, or nothing at all."""

    def sent(self, kind: str, count: int) -> None:
        """Count bytes that went out."""

    def received(self, kind: str, count: int) -> None:
        """Count bytes that came in."""


class Chunks:
    """The chunks of one transfer on their way out, counted. Its attempts share it.

    Attributes:
        unreadable: why the last chunk that was asked for could not be read.
    """

    def __init__(self, stored: Carriable, metrics: Counting) -> None:
        self._stored = stored
        self._metrics = metrics
        self._tried: set[int] = set()
        self._went: set[int] = set()
        self.unreadable: StoreError | None = None

    @property
    def artifact_id(self) -> bytes:
        """Whose chunks they are."""
        return self._stored.artifact_id

    def went(self, index: int) -> bool:
        """Whether this attempt has handed a chunk out."""
        return index in self._went

    def read(self, wanted: list[int]) -> Iterator[tuple[int, bytes]]:
        """Yield the chunks of an attempt with their indices. Ends early, without an error, where one cannot be read."""
        went = self._went = set()
        for index in wanted:
            try:
                data = self._stored.read_chunk(index)
            except StoreError as error:
                # Raised here, in a thread that is not ours, it would reach nobody.
                self.unreadable = error
                return
            self._metrics.sent("resent" if index in self._tried else "payload", len(data))
            self._tried.add(index)
            went.add(index)
            yield index, data


class Carrier(Protocol):
    """One connection to a receiver. Everything that it sends and receives, chunk bytes apart, it counts."""

    async def offer(self, manifest: bytes) -> Offered:
        """Offer an artifact.

        Raises:
            KvferryError: when that fails.
        """

    def put(self, chunks: Chunks, wanted: list[int]) -> AsyncGenerator[int, None]:
        """Send chunks and yield what is acknowledged, whatever that is. Closing the generator stops everything.

        Raises:
            KvferryError: when the receiver ends the transfer or its connection, or is silent for too long.
        """

    async def commit(self, artifact_id: bytes, account_json: str, seconds: float) -> Receipt:
        """Have an artifact published.

        Raises:
            KvferryError: when that fails or takes longer than ``seconds``.
        """
