"""B6, PyramidKV: scores as in B5; lower layers keep more rows than upper ones.

The rule speaks of a prompt whose last W rows are its window, kept in every layer. With ``window`` "prompt" that is how
it runs here, and the budget is PyramidKV's capacity. A probe behind the prefix, the question or an instruction, leaves
no row in it: W is 0 then, T is the prefix, and the whole budget goes to rows that are scored. So at one budget the
blind and the aware method keep the same numbers of rows, however long the question is.

The rule's integers miss the capacity by a few rows, and by more when it is not much larger than the number of layers:
what is reported is what is kept.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from kvferry.core.wire import MethodInfo
from kvferry.engine.selection import check_room, top_rows
from kvferry.sender.kv.selecting import Kept
from kvferry.sender.kv.window_method import WindowMethod
from kvferry.sender.kv.window_scores import BlindWindowParameters, Scored, WindowScoreParameters

_SOURCE = "PyramidKV, arXiv 2406.02069, Zefan-Cai/KVCache-Factory pyramidkv_utils.py"
Beta = Annotated[int, Meta(ge=1, le=1024)]


class PyramidKVParameters(BlindWindowParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``beta``: the last layer has a ``beta``-th of the mean number of scored rows. 1 gives all layers the same."""

    beta: Beta = 20


class PyramidKVAwareParameters(WindowScoreParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``beta``: as for B6."""

    beta: Beta = 20


def pyramid_budgets(tokens: int, capacity: int, window: int, layers: int, beta: int = 20) -> list[int]:
    """Return how many rows each layer keeps, window rows included, the bottom layer first.

    At least one: the rule alone would leave upper layers without any when there is no window and little capacity. One
    layer, where the rule divides by zero, gets the capacity.

    Args:
        tokens: T, rows of the prefix, the window's among them.
        capacity: rows a layer, window included.
        window: W, rows that every layer keeps in any case.
        layers: L.
        beta: see ``PyramidKVParameters``.

    Raises:
        InvalidRequestError: when the capacity does not hold the window, although rows are dropped.
    """
    check_room(capacity, tokens, 0, window)
    if tokens <= capacity:
        return [tokens] * layers
    scored = capacity - window
    if tokens < 2 * scored or layers == 1:
        return [capacity] * layers
    least = scored // beta
    most = 2 * scored - least
    if most >= tokens - window:
        most = tokens - window
        least = 2 * scored - most
    step = (most - least) // (layers - 1)
    return [max(most - layer * step + window, 1) for layer in range(layers)]


def pyramid_rows(scored: Scored, capacity: int, beta: int) -> Kept:
    """Return the rows that every layer keeps, the same number for all its heads."""
    tokens, window = scored.protected.size, int(scored.protected.sum())
    budgets = pyramid_budgets(tokens, capacity, window, len(scored.layers), beta)
    return [top_rows(layer, count, scored.protected) for layer, count in zip(scored.layers, budgets, strict=True)]


class PyramidKV(WindowMethod):
    """Does not know the question."""

    info = MethodInfo(
        id="B6",
        name="pyramidkv",
        form="kv",
        label="adapted",
        aware=False,
        source=_SOURCE,
        summary="the rows that a generic instruction looks at most; more of them in lower layers",
    )
    parameters: ClassVar[type[WindowScoreParameters]] = PyramidKVParameters

    def rows(self, scored: Scored, count: int, given: PyramidKVParameters | PyramidKVAwareParameters) -> Kept:
        """The best ones, as many as each layer's budget says."""
        return pyramid_rows(scored, count, given.beta)


class PyramidKVAware(PyramidKV):
    """Looks with the question."""

    info = MethodInfo(
        id="B6-aware",
        name="pyramidkv-aware",
        form="kv",
        label="adapted",
        aware=True,
        source=_SOURCE,
        summary="the rows that the question looks at most; more of them in lower layers",
    )
    parameters = PyramidKVAwareParameters
