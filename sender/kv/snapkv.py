"""B5, SnapKV's rule: the rows that a window of queries looks at most, with their neighbours, per KV head.

Adapted in three ways. The window is a probe behind the prefix, where SnapKV takes the prompt's last rows (blind, with
``window`` "prompt", it is those). Query heads of a KV head are reduced to one score, before the pooling by default,
where SnapKV repeats K and V for every query head and lets each choose. And the default reductions are the mean and a
maximum over 7 rows; SnapKV sums, which ranks alike, and has used both 7 with the maximum and 5 with the average.
"""

from __future__ import annotations

from typing import ClassVar

from kvferry.core.wire import MethodInfo
from kvferry.engine.selection import top_rows
from kvferry.sender.kv.selecting import Kept
from kvferry.sender.kv.window_method import WindowMethod
from kvferry.sender.kv.window_scores import BlindWindowParameters, Scored, WindowScoreParameters

_SOURCE = "SnapKV, arXiv 2404.14469, FasterDecoding/SnapKV snapkv_utils.py"


def best_rows(scored: Scored, count: int) -> Kept:
    """Return the same number of rows for every head: the protected ones, and the best of the others."""
    return [top_rows(layer, count, scored.protected) for layer in scored.layers]


class SnapKV(WindowMethod):
    """Does not know the question. A probe that is no part of the prefix is not sent."""

    info = MethodInfo(
        id="B5",
        name="snapkv",
        form="kv",
        label="adapted",
        aware=False,
        source=_SOURCE,
        summary="the rows that a generic instruction looks at most, and their neighbours, per KV head",
    )
    parameters: ClassVar[type[WindowScoreParameters]] = BlindWindowParameters

    def rows(self, scored: Scored, count: int, given: WindowScoreParameters) -> Kept:
        """The best ones."""
        return best_rows(scored, count)


class SnapKVAware(SnapKV):
    """Looks with the question."""

    info = MethodInfo(
        id="B5-aware",
        name="snapkv-aware",
        form="kv",
        label="adapted",
        aware=True,
        source=_SOURCE,
        summary="the rows that the question looks at most, and their neighbours, per KV head",
    )
    parameters = WindowScoreParameters
