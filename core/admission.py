"""How many calls may run at once, in all and for each token; and a log of refusals that nobody can flood."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from kvferry.core.errors import AuthenticationError, BusyError
from kvferry.core.logs import logger
from kvferry.core.tokens import Token, TokenFile

RETRY_AFTER_MS = 500
LINES_PER_WINDOW = 100
_WINDOW_SECONDS = 10.0


class Admission:
    """Whom a daemon lets in and how much of it at once, by whichever of its doors. Thread-safe.

    Attributes:
        limits: of the calls that run.
        refusals: the log of those that were turned away.
    """

    def __init__(self, tokens: TokenFile | None, max_calls: int) -> None:
        """Prepare.

        Args:
            tokens: who may call; None lets everybody in.
            max_calls: most calls at a time.
        """
        self._tokens = tokens
        self.limits = CallLimits(max_calls)
        self.refusals = RefusalLog()

    @property
    def asks_for_tokens(self) -> bool:
        """Whether a call must show a token."""
        return self._tokens is not None

    def authenticate(self, secret: str) -> Token | None:
        """Return the token that a secret stands for, "" standing for no secret; None where none is asked for.

        Raises:
            AuthenticationError: when it is not one that is accepted.
        """
        if self._tokens is None:
            return None
        if not secret:
            raise AuthenticationError("token: this daemon asks for one, and the call shows none", field="token")
        return self._tokens.authenticate(secret)


class CallLimits:
    """Counts running calls. Thread-safe."""

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._lock = threading.Lock()
        self._running = 0
        self._by_token: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def running(self, caller: Token | None) -> Iterator[None]:
        """Count a call for the length of the block.

        Raises:
            BusyError: when the daemon or the token has as many calls as it may have.
        """
        with self._lock:
            self._check(caller)
            self._running += 1
            if caller is not None:
                self._by_token[caller.name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if caller is not None:
                    self._leave(caller.name)

    def _check(self, caller: Token | None) -> None:
        # The token first: a caller who has used up its own share shall not blame the daemon.
        if caller is not None and caller.max_calls is not None and self._by_token[caller.name] >= caller.max_calls:
            raise _busy(f"token {caller.name}", "token.max_calls", self._by_token[caller.name], caller.max_calls)
        if self._running >= self._max_calls:
            raise _busy("this daemon", "max_calls", self._running, self._max_calls)

    def _leave(self, name: str) -> None:
        self._by_token[name] -= 1
        if not self._by_token[name]:
            # Names of tokens that are gone must not pile up.
            del self._by_token[name]


class RefusalLog:
    """One line a refusal, up to a rate; what is left out is counted in the next line. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = logger("access")
        self._clock = clock
        self._lock = threading.Lock()
        self._window_start = clock()
        self._lines = 0
        self._left_out = 0

    def refused(self, reason: str, *, method: str, peer: str) -> None:
        """Write a line, unless there were too many just now."""
        with self._lock:
            now = self._clock()
            if now - self._window_start >= _WINDOW_SECONDS:
                self._window_start, self._lines = now, 0
            if self._lines >= LINES_PER_WINDOW:
                self._left_out += 1
                return
            self._lines += 1
            more = {"left_out": self._left_out} if self._left_out else {}
            self._left_out = 0
        self._log.warning("refused", reason=reason, method=method, peer=peer, **more)


def _busy(who: str, limit_name: str, current: int, limit: int) -> BusyError:
    return BusyError(
        f"{limit_name}: {who} has {current} calls running, the limit is {limit}; try again in {RETRY_AFTER_MS} ms",
        field=limit_name,
        value=current,
        limit=limit,
        retry_after_ms=RETRY_AFTER_MS,
    )
