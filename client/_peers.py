"""Where a client's two daemons are, how long they may take, and the guards that both clients share."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from kvferry.client import _types
from kvferry.core import addresses
from kvferry.core.addresses import RECEIVER_PORT, SENDER_PORT, Address
from kvferry.core.errors import ConfigError, InvalidRequestError
from kvferry.core.tls import PeerSecurity
from kvferry.core.tokens import check_secret

PathLike = str | os.PathLike[str]

DEFAULT_SENDER = f"127.0.0.1:{SENDER_PORT}"
DEFAULT_RECEIVER = f"127.0.0.1:{RECEIVER_PORT}"
DEFAULT_TIMEOUT = 30.0
# A receiver may read a long text before the first token, and says nothing while it does.
DEFAULT_IDLE_TIMEOUT = 600.0


@dataclass(frozen=True)
class Peers:
    """Both daemons.

    Attributes:
        deliver_to: where the sender shall deliver; "" leaves that to its configuration, None is ``receiver``.
        look_up_at: where the receiver shall look passages up; "" leaves that to its configuration, None is ``sender``.
        timeout: seconds for a call without a stream.
        idle_timeout: seconds between two messages of a stream.
    """

    sender: Address
    receiver: Address
    deliver_to: str | None
    look_up_at: str | None
    timeout: float
    idle_timeout: float

    @classmethod
    def parse(
        cls,
        sender: str,
        receiver: str,
        *,
        deliver_to: str | None,
        look_up_at: str | None,
        timeout: float,
        idle_timeout: float,
    ) -> Peers:
        """Check what a client was given.

        Raises:
            ConfigError: naming the argument and its value.
        """
        given = {"sender": sender, "receiver": receiver, "deliver_to": deliver_to, "look_up_at": look_up_at}
        for field, value in given.items():
            if value is not None or field in {"sender", "receiver"}:
                _types.check_text(field, value, ConfigError)
        for field, seconds in {"timeout": timeout, "idle_timeout": idle_timeout}.items():
            if not _types.is_number(seconds):
                raise _types.wrong(field, seconds, "a number of seconds", ConfigError)
            if not (math.isfinite(seconds) and seconds > 0):
                raise ConfigError(f"{field}: {seconds!r} seconds, must be above 0", field=field, value=seconds)
        if deliver_to:
            addresses.parse_receiver(deliver_to, "deliver_to")
        if look_up_at:
            addresses.parse(look_up_at, "look_up_at", default_port=SENDER_PORT)
        return cls(
            addresses.parse(sender, "sender", default_port=SENDER_PORT),
            addresses.parse(receiver, "receiver", default_port=RECEIVER_PORT),
            deliver_to,
            look_up_at,
            timeout,
            idle_timeout,
        )

    @property
    def delivery_address(self) -> str:
        """What a send tells the sender.

        Raises:
            ConfigError: when the receiver's address would mean another machine to the sender.
        """
        if self.deliver_to is not None:
            return self.deliver_to
        if self.receiver.is_loopback and not self.sender.is_loopback:
            raise ConfigError(
                f"deliver_to: {self.receiver} is this machine, but the sender at {self.sender} would take it for its "
                "own; give the receiver's address as the sender reaches it",
                field="deliver_to",
                receiver=str(self.receiver),
                sender=str(self.sender),
            )
        return str(self.receiver)

    @property
    def look_up_address(self) -> str:
        """What a question tells the receiver; "" leaves it to the receiver's configuration.

        That is so also where the sender's address would mean another machine to the receiver: only artifacts of
        references need a sender, and what a question asks of is not known here.
        """
        if self.look_up_at is not None:
            return self.look_up_at
        if self.sender.is_loopback and not self.receiver.is_loopback:
            return ""
        return str(self.sender)


def security(
    authority: PathLike | None, certificate: PathLike | None, key: PathLike | None, token: str | None, *, insecure: bool
) -> PeerSecurity:
    """Return how both daemons are reached.

    Raises:
        ConfigError: when the token cannot travel, or a value is none of its type.
    """
    if token is not None:
        _types.check_text("token", token, ConfigError)
    return PeerSecurity(
        authority=_path("authority", authority),
        certificate=_path("certificate", certificate),
        key=_path("key", key),
        token=None if token is None else check_secret(token, "token"),
        insecure=insecure,
    )


def _path(field: str, given: PathLike | None) -> Path | None:
    if given is not None and not isinstance(given, str | os.PathLike):
        raise _types.wrong(field, given, "the path of a file", ConfigError)
    return None if given is None else Path(given).expanduser()


class Guard:
    """Refuses the use of a client that is closed or was inherited by a forked process."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._closed = False

    def close(self) -> None:
        """Refuse everything from now on."""
        self._closed = True

    def check(self) -> None:
        """Check before a call.

        Raises:
            InvalidRequestError: when the client must not be used.
        """
        if self._closed:
            raise InvalidRequestError("client: is closed", field="client")
        # gRPC's threads and sockets stay with the process that made them.
        if os.getpid() != self._process:
            raise InvalidRequestError(
                f"client: belongs to process {self._process}, this is {os.getpid()}; after a fork, make a new client",
                field="client",
                process=self._process,
            )


def check_concurrency(concurrency: int) -> None:
    """Check how many questions may be in flight.

    Raises:
        InvalidRequestError: when it is below 1.
    """
    if isinstance(concurrency, bool) or not isinstance(concurrency, int):
        raise _types.wrong("concurrency", concurrency, "a whole number of at least 1")
    if concurrency < 1:
        raise InvalidRequestError(
            f"concurrency: {concurrency}, must be at least 1", field="concurrency", value=concurrency
        )
