"""What goes together: a selection, a quantiser and a model. Asked before the document is read.

A selection is "every" row, "level" when the heads of a layer keep equally many rows, or "ragged" when they need not.
"""

from __future__ import annotations

from typing import Literal

from kvferry.core.compat import Profile
from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.engine.cache import PrefixCache
from kvferry.engine.quantise import Scheme

Selection = Literal["every", "level", "ragged"]
Quantiser = Literal["dense", "affine", "kivi"]

REFUSED: dict[tuple[Selection, Quantiser], str] = {
    ("ragged", "kivi"): "it packs blocks of rows across heads, and this method gives heads different numbers of rows",
}
"""Why a pair cannot be. Every other one can."""

MLX_LM_ATTENDS: frozenset[tuple[Selection, Quantiser]] = frozenset({("every", "dense"), ("level", "dense")})
"""Pairs whose caches mlx-lm's own attention reads. For others a model must take attention of ours."""


def check(method: str, selection: Selection, packing: Scheme | None, profile: Profile) -> None:
    """Refuse what cannot be.

    Args:
        method: what chooses the rows, by name.
        selection: what it may leave.
        packing: how they are packed; None leaves them dense.
        profile: of the model that they are for.

    Raises:
        InvalidRequestError: when selection and quantiser do not go together.
        ModelError: when the model cannot attend such a cache.
    """
    quantiser: Quantiser = "dense" if packing is None else "kivi" if packing.residual else "affine"
    why = REFUSED.get((selection, quantiser))
    if why is not None:
        raise InvalidRequestError(
            f"quantiser: {quantiser} does not go with method {method}: {why}",
            field="quantiser",
            value=quantiser,
            method=method,
        )
    if profile.attention and (selection, quantiser) not in MLX_LM_ATTENDS:
        raise ModelError(
            f"model: {profile.model.id} cannot attend what method {method} makes, {selection} rows, {quantiser}: "
            f"{profile.attention}",
            field="model",
            method=method,
        )


def check_queries(method: str, profile: Profile) -> None:
    """Refuse to rank rows by queries that cannot be seen, or that are seen in another attention than the model's.

    Raises:
        ModelError: naming the model and the method.
    """
    if profile.attention:
        raise ModelError(
            f"model: {profile.model.id} does not show the queries that method {method} ranks rows by: "
            f"{profile.attention}",
            field="model",
            method=method,
        )


def check_rows(method: str, made: PrefixCache, profile: Profile) -> None:
    """Refuse layers that keep different numbers of rows where the model's mask is made from the first for all of them.

    How many a method keeps in each is known only once it has chosen.

    Raises:
        ModelError: naming the model and the method.
    """
    counts = made.row_counts
    if profile.attention and min(counts) != max(counts):
        raise ModelError(
            f"model: {profile.model.id} cannot attend what method {method} makes, from {min(counts)} to {max(counts)} "
            f"rows a layer: {profile.attention}",
            field="model",
            method=method,
        )
