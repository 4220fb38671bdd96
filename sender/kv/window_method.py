"""Methods that rank rows by a window's attention. Who looks is decided here, which rows stay is up to them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from typing import Any

from kvferry.core.progress import Progress
from kvferry.sender.kv import probes
from kvferry.sender.kv.selecting import Keep, Kept, SelectingMethod, Subject
from kvferry.sender.kv.window_scores import Scored, score_behind, score_blind


class WindowMethod(SelectingMethod):
    """A subclass gives ``info``, ``parameters`` and ``rows``.

    A blind one looks with the window that its parameters name. An aware one looks with the question's own tokens, the
    same that the receiver runs behind what is left.
    """

    @abstractmethod
    def rows(self, scored: Scored, count: int, given: Any) -> Kept:
        """Return the rows that a budget of ``count`` rows a KV head keeps."""

    def score(self, subject: Subject, given: Any) -> Generator[Progress, None, Scored]:
        """Run the window and score every row by its attention."""
        if self.info.aware:
            return score_behind(subject, probes.question_ids(subject, self.info.id), given)
        return score_blind(subject, given)

    def observes(self, given: Any) -> bool:
        """By attention."""
        return True

    def rank(self, subject: Subject, given: Any) -> Generator[Progress, None, Keep]:
        """Score once."""
        scored = yield from self.score(subject, given)
        return lambda count: self.rows(scored, count, given)
