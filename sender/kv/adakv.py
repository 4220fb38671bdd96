"""AdaKV: SnapKV's scores; heads of a layer whose attention is spread keep more rows than heads that look at few."""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated

from msgspec import Meta

from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.sender.kv.head_budgets import head_budgets, rows_by_head
from kvferry.sender.kv.selecting import Kept, Subject
from kvferry.sender.kv.window_method import WindowMethod
from kvferry.sender.kv.window_scores import Scored, WindowScoreParameters, WindowTokens, score_at_end


class AdaKVParameters(WindowScoreParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``window_tokens`` last tokens of the prefix look at the others; their rows are always kept, within the budget.

    ``alpha``: what part of an even share every head has for sure.
    """

    window_tokens: WindowTokens = 32
    alpha: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.2


def adakv_rows(scored: Scored, count: int, alpha: float) -> Kept:
    """Return the rows that every head keeps: ``count`` on average over a layer's heads."""
    return [
        rows_by_head(layer, head_budgets(layer, count, alpha, scored.protected), scored.protected)
        for layer in scored.layers
    ]


class AdaKV(WindowMethod):
    """Removes rows for real: heads of unequal length are stored, sent and attended without padding.

    Rounding, which moves the total in the official code, is balanced so that a layer keeps exactly what its budget
    says.
    """

    info = MethodInfo(
        id="adakv",
        name="adakv",
        form="kv",
        label="faithful",
        aware=False,
        source="AdaKV, arXiv 2407.11550, FFY0/AdaKV adaptive_snapkv snapkv_utils.py",
        summary="the rows that the prefix's last tokens look at most; heads of a layer share its budget by need",
    )
    parameters = AdaKVParameters
    ragged = True

    def score(self, subject: Subject, given: AdaKVParameters) -> Generator[Progress, None, Scored]:
        """Run the prefix's last tokens again and score every row by their attention."""
        return score_at_end(subject, given.window_tokens, given)

    def rows(self, scored: Scored, count: int, given: AdaKVParameters) -> Kept:
        """The best ones, as many as each head's budget says."""
        return adakv_rows(scored, count, given.alpha)
