"""L2Norm: the rows whose keys have the lowest norms, which attention tends to look at most."""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated

import mlx.core as mx
from msgspec import Meta

from kvferry.core.errors import InvalidRequestError
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.selection import to_scores, top_rows
from kvferry.sender.kv.parameters import SelectionParameters
from kvferry.sender.kv.selecting import Keep, Kept, SelectingMethod, Subject

SkipLayers = (
    Annotated[int, Meta(ge=0)]
    | Annotated[str, Meta(pattern=r"^([0-9]+,)+[0-9]*$", max_length=4096, description="layers like 0,1,5 or 3,")]
)


class L2NormParameters(SelectionParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where nothing is dropped, so that the budget holds for the other layers only.

    ``skip_layers``: how many of the first layers keep every row, or which ones, as "0,1,5" ("3," names one alone).
    ``prune_after``: a shorter prefix keeps every row. The paper's code says 2048; here a budget holds at any length.
    """

    skip_layers: SkipLayers = 0
    prune_after: Annotated[int, Meta(ge=0)] = 0


def norm_scores(keys: mx.array) -> mx.array:
    """Return the negated norm of every key, [..., T] for keys [..., T, D], in fp32: bf16 norms tie."""
    plain = keys.astype(mx.float32)
    return -mx.sqrt(mx.sum(plain * plain, axis=-1))


def skipped_layers(given: int | str, layers: int) -> frozenset[int]:
    """Return the layers that keep every row.

    Args:
        given: how many of the first ones, or their numbers with commas.
        layers: how many the model has.

    Raises:
        InvalidRequestError: when the model has no such layer.
    """
    named = range(given) if isinstance(given, int) else [int(part) for part in given.split(",") if part]
    if max(named, default=-1) >= layers:
        raise InvalidRequestError(
            f"skip_layers: {given!r} speaks of layer {max(named)}, the model has 0 to {layers - 1}",
            field="skip_layers",
            value=given,
            layers=layers,
        )
    return frozenset(named)


class L2Norm(SelectingMethod):
    """Keeps the rows with the lowest key norms. Rotation does not change a norm, so positions do not matter."""

    info = MethodInfo(
        id="l2norm",
        name="l2norm",
        form="kv",
        label="adapted",
        aware=False,
        source="L2Norm, arXiv 2406.11430, alessiodevoto/l2compress",
        summary="the rows whose keys have the lowest norms, per KV head",
    )
    parameters = L2NormParameters

    def rank(self, subject: Subject, given: L2NormParameters) -> Generator[Progress, None, Keep]:
        """Measure every key."""
        yield Progress("method", 0, 1)
        skipped = skipped_layers(given.skip_layers, len(subject.layers))
        scores = [to_scores("l2norm", norm_scores(layer.keys[0])) for layer in subject.layers]
        everywhere = subject.rows < given.prune_after

        def keep(count: int) -> Kept:
            return [
                top_rows(layer, subject.rows if everywhere or index in skipped else count)
                for index, layer in enumerate(scores)
            ]

        return keep
