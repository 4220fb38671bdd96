"""H2O: heavy hitters, the rows that drew most attention while the prefix was read, and the recent rows.

The official code has three variants. (a) ``utils_real_drop`` drops rows: all but the ``recent`` last ones compete for
the rest of the budget. (b) ``utils_hh`` masks them: both parts are rounded down, and the next token counts as one of
the recent rows. (c) ``utils_lm_eval`` looks at queries that are yet to come, which is no policy that a cache can have.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated, Any, Literal

import mlx.core as mx
import numpy as np
from msgspec import Meta

from kvferry.core.errors import InvalidRequestError
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.attention import causal_softmax, grouped
from kvferry.engine.observe import replay
from kvferry.engine.selection import Positions, Scores, check_room, same_for_every_head, to_scores, top_rows
from kvferry.sender.kv.parameters import SelectionParameters
from kvferry.sender.kv.selecting import Keep, Kept, SelectingMethod, Subject

Sums = np.ndarray[Any, np.dtype[np.float64]]
_WEIGHTS_AT_ONCE = 2**23
"""Attention weights held at a time, so that memory does not grow with the square of the prefix."""


class H2OParameters(SelectionParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``recent`` last rows, as a number or as a part of the budget; the rest of it goes to heavy hitters.

    ``variant`` is a folder of the official code without its "utils_". ``renumber`` moves kept rows to 0..R-1, as the
    official streaming classes do.
    """

    recent: Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0.0, le=1.0)] = 0.5
    variant: Literal["real_drop", "hh", "lm_eval"] = "real_drop"
    renumber: bool = False

    def __post_init__(self) -> None:
        if self.variant == "lm_eval":
            raise InvalidRequestError(
                "variant: lm_eval sums the attention of queries that are yet to come, so no cache can follow it; "
                "real_drop or hh",
                field="variant",
                value="lm_eval",
            )


def attention_columns(queries: mx.array, keys: mx.array) -> Sums:
    """Return how much attention every row got, [Hk, S]: the sum over queries and over a KV head's query heads.

    Args:
        queries: [H, N, D] of the last N of the rows, fp32, after rotation.
        keys: [Hk, S, D].
    """
    heads, tokens, width = queries.shape
    kv_heads, rows, _ = keys.shape
    step = max(_WEIGHTS_AT_ONCE // (heads * rows), 1)
    sums = np.zeros((kv_heads, rows))
    for start in range(0, tokens, step):
        part = queries[:, start : start + step]
        count = part.shape[1]
        seen = rows - tokens + start + count
        logits = grouped(part[None], kv_heads) @ keys[None, :, :seen].swapaxes(-1, -2) * width**-0.5
        sums[:, :seen] += np.array(mx.sum(causal_softmax(logits, count)[0], axis=1))
    return sums


def h2o_rows(scores: Scores, heavy: int, recent: int, coming: int = 0) -> list[Positions]:
    """Return the rows that every head keeps.

    Args:
        scores: [Hk, T], attention sums.
        heavy: heavy hitters, chosen among all but the last ``recent`` rows.
        recent: last rows that are kept.
        coming: how many of the recent rows are still to come, so that as many of those here go.
    """
    heads, rows = scores.shape
    if rows <= heavy + recent:
        return same_for_every_head(np.arange(rows, dtype=np.int32), heads)
    edge = rows - recent
    last = np.arange(edge + coming, rows, dtype=np.int32)
    if not heavy:
        return same_for_every_head(last, heads)
    return [np.concatenate([head, last]) for head in top_rows(scores[:, :edge], heavy)]


class H2O(SelectingMethod):
    """Keeps heavy hitters and recent rows. Sums never decay and are not divided by how many queries saw a row.

    Adapted: sums go over the query heads of a KV head, where the official code has one query head a KV head, and the
    receiver drops no row while it answers. Reads the prefix a second time.
    """

    info = MethodInfo(
        id="h2o",
        name="h2o",
        form="kv",
        label="adapted",
        aware=False,
        source="H2O, arXiv 2306.14048, FMInference/H2O h2o_hf",
        summary="the rows with most attention so far and the recent ones; reads twice, drops none while answering",
    )
    parameters = H2OParameters

    def renumbers(self, given: H2OParameters) -> bool:
        """As asked."""
        return given.renumber

    def observes(self, given: H2OParameters) -> bool:
        """By attention."""
        return True

    def rank(self, subject: Subject, given: H2OParameters) -> Generator[Progress, None, Keep]:
        """Read the prefix again and sum the attention that every row gets."""
        total = subject.rows
        sums = [np.zeros((layer.kv_heads, total)) for layer in subject.layers]

        def see(layer: int, _start: int, queries: mx.array, keys: mx.array) -> None:
            sums[layer][:, : keys.shape[1]] += attention_columns(queries, keys)

        for done in replay(subject.model.model, subject.ids, subject.model.prefill_chunk, see):
            yield Progress("method", done, total)
        scores = [to_scores("h2o", mx.array(layer.astype(np.float32))) for layer in sums]

        def keep(count: int) -> Kept:
            heavy, recent, coming = _split(min(count, total), total, given)
            return [h2o_rows(layer, heavy, recent, coming) for layer in scores]

        return keep


def _split(count: int, rows: int, given: H2OParameters) -> tuple[int, int, int]:
    """Return how many heavy and recent rows a budget has, and how many of the recent ones are still to come."""
    if count >= rows:
        return count, 0, 0
    recent = int(count * given.recent) if isinstance(given.recent, float) else given.recent
    check_room(count, rows, 0, recent)
    if given.variant == "real_drop":
        return count - recent, recent, 0
    heavy = int(count * (1 - given.recent)) if isinstance(given.recent, float) else count - recent
    coming = min(recent, 1)
    if heavy + recent - coming < 1:
        raise InvalidRequestError(
            f"budget: {count} rows, of which variant hh keeps none: {heavy} heavy and {recent} recent ones, the next "
            "token's among them",
            field="budget",
            value=count,
        )
    return heavy, recent, coming
