"""TOVA: the rows that the last token looks at most, on average over all heads; one set for all KV heads of a layer."""

from __future__ import annotations

from collections.abc import Generator

import mlx.core as mx
import numpy as np

from kvferry.core.progress import Progress, passing_on
from kvferry.core.wire import MethodInfo
from kvferry.engine.selection import Scores, protect, same_for_every_head, to_scores, top_rows
from kvferry.sender.kv import probes
from kvferry.sender.kv.parameters import SelectionParameters
from kvferry.sender.kv.selecting import Keep, Kept, SelectingMethod, Subject
from kvferry.sender.kv.window_scores import Array, check_finite


class TovaParameters(SelectionParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``force_last``: the last row survives, as in NVIDIA/kvpress. In the paper's code it competes like any other."""

    force_last: bool = False


def tova_scores(query: Array, keys: Array) -> Scores:
    """Return the attention of the last token to every row, [T], its own included: the mean over all query heads.

    Args:
        query: [H, D], fp32, after rotation.
        keys: [Hk, T, D].

    Raises:
        ModelError: when a key or a score is not finite.
    """
    check_finite("tova", keys)
    scaled = query.reshape(len(keys), -1, query.shape[1]) * np.float32(query.shape[1] ** -0.5)
    # What overflows ends as NaN, which is refused below.
    with np.errstate(over="ignore", invalid="ignore"):
        logits = scaled @ keys.swapaxes(1, 2)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        shares = weights / weights.sum(axis=-1, keepdims=True)
    return to_scores("tova", mx.array(shares.mean(axis=(0, 1))))


class Tova(SelectingMethod):
    """Keeps what TOVA keeps after the prefix was read at once. No row is protected, not even the first or the last.

    Adapted in that the receiver drops no row while it answers; TOVA drops one with every token.
    """

    info = MethodInfo(
        id="tova",
        name="tova",
        form="kv",
        label="adapted",
        aware=False,
        source="TOVA, arXiv 2401.06104, schwartz-lab-NLP/TOVA tova_cache.py",
        summary="the rows that the last token looks at most, the same for all heads; drops none while answering",
    )
    parameters = TovaParameters

    def observes(self, given: TovaParameters) -> bool:
        """By attention."""
        return True

    def rank(self, subject: Subject, given: TovaParameters) -> Generator[Progress, None, Keep]:
        """Run the last token once more and score every row by its attention."""
        yield Progress("method", 0, 1)
        scores = yield from _scores(subject)
        protected = protect(subject.rows, recent=int(given.force_last))

        def keep(count: int) -> Kept:
            chosen = [top_rows(layer[None], count, protected)[0] for layer in scores]
            return [
                same_for_every_head(rows, layer.kv_heads) for rows, layer in zip(chosen, subject.layers, strict=True)
            ]

        return keep


def _scores(subject: Subject) -> Generator[Progress, None, list[Scores]]:
    if subject.rows == 1:
        return [np.ones(1, dtype=np.float32) for _ in subject.layers]
    scores = []
    windows = yield from passing_on(probes.at_end(subject, 1), Progress("method", 0, 1))
    for layer, seen in zip(subject.layers, windows, strict=True):
        keys = np.array(layer.keys[0].astype(mx.float32))
        scores.append(tova_scores(np.array(seen.queries[:, 0]), keys))
    return scores
