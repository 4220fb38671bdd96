"""Expected Attention with AdaKV's budgets: heads whose expected attention is concentrated give rows to the others."""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated

from msgspec import Meta

from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.selection import protect
from kvferry.sender.kv.expected_attention import ExpectedAttentionParameters, expected_scores
from kvferry.sender.kv.head_budgets import head_budgets, rows_by_head
from kvferry.sender.kv.selecting import Keep, Kept, SelectingMethod, Subject


class ExpectedAttentionAdaKVParameters(
    ExpectedAttentionParameters, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """``alpha``: the part of the budget that every head has for sure. ``epsilon`` is that of kvpress's leaderboard."""

    alpha: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.2
    epsilon: Annotated[float, Meta(ge=0.0, le=1.0)] = 1e-2


class ExpectedAttentionAdaKV(SelectingMethod):
    """Scores as Expected Attention, budgets as AdaKV: heads of a layer keep different numbers of rows.

    Adapted: kvpress, whose entry this is, gives the guaranteed rows to every head and the rest to the best scores of a
    layer; here budgets follow AdaKV's own code.
    """

    info = MethodInfo(
        id="expected-attention-adakv",
        name="expected-attention-adakv",
        form="kv",
        label="adapted",
        aware=False,
        source="Expected Attention, arXiv 2510.00636, NVIDIA/kvpress; AdaKV, arXiv 2407.11550, FFY0/AdaKV",
        summary="expected attention, with AdaKV's budgets for the heads of a layer",
    )
    parameters = ExpectedAttentionAdaKVParameters
    ragged = True

    def rank(self, subject: Subject, given: ExpectedAttentionAdaKVParameters) -> Generator[Progress, None, Keep]:
        """Read the prefix again and score every row."""
        scores = yield from expected_scores(subject, given)
        protected = protect(subject.rows, sinks=given.sinks)

        def keep(count: int) -> Kept:
            return [
                rows_by_head(layer, head_budgets(layer, count, given.alpha, protected), protected) for layer in scores
            ]

        return keep
