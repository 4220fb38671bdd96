"""How far a candidate cache is from the reference, judged token by token on the true continuation of a document.

KL, its 99th percentile, flips and the change of the continuation's likelihood belong together: a likelihood alone can
improve while the distribution is somewhere else. The tiers are those of mlx-quant-fidelity 0.10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvferry.core.errors import InvalidRequestError, ModelError

Logits = np.ndarray[tuple[int, int], np.dtype[Any]]
Column = np.ndarray[tuple[int], np.dtype[np.float64]]
Tier = Literal["good", "marginal", "poor"]

P99 = 0.99
# Float64 copies of a large vocabulary are many times the logits themselves, so a few positions are taken at a time.
_BLOCK = 32


@dataclass(frozen=True)
class Fidelity:
    """A candidate against the reference, over the same positions.

    Attributes:
        positions: how many positions were compared.
        kl_mean: mean of KL(reference || candidate), in nats, over the full vocabulary.
        kl_p99: its 99th percentile: the smallest observed value that at least 99 % of the rank order lies at or below
            (numpy's "higher"), never one between two positions.
        flip_rate: share of the positions whose most likely token differs. Ties go to the lower id on either side.
        delta_nll: how much less likely the true tokens are under the candidate, mean in nats; negative is more likely.
    """

    positions: int
    kl_mean: float
    kl_p99: float
    flip_rate: float
    delta_nll: float

    @property
    def tier(self) -> Tier:
        """The first tier whose three limits all hold."""
        if self.kl_mean <= 0.01 and self.kl_p99 <= 0.10 and self.flip_rate <= 0.01:  # noqa: PLR2004  (named nowhere else)
            return "good"
        if self.kl_mean <= 0.10 and self.kl_p99 <= 1.0 and self.flip_rate <= 0.05:  # noqa: PLR2004
            return "marginal"
        return "poor"


def compare(reference: Logits, candidate: Logits, truth: Sequence[int]) -> Fidelity:
    """Compare two teacher-forced runs over the same tokens.

    Args:
        reference: logits [N, V] of the reference, float32 or float64. Computed on in float64.
        candidate: logits [N, V].
        truth: the N tokens that really came, one for each row of logits.

    Raises:
        InvalidRequestError: when shapes differ, nothing is to be compared, or a token is not in the vocabulary.
        ModelError: when a logit is not finite.
    """
    _check(reference, candidate, truth)
    blocks = [
        _positions(reference[start : start + _BLOCK], candidate[start : start + _BLOCK], truth[start : start + _BLOCK])
        for start in range(0, len(truth), _BLOCK)
    ]
    divergence, flips, change = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return Fidelity(
        positions=len(truth),
        kl_mean=float(divergence.mean()),
        kl_p99=float(np.quantile(divergence, P99, method="higher")),
        flip_rate=float(flips.mean()),
        delta_nll=float(change.mean()),
    )


def _positions(reference: Logits, candidate: Logits, truth: Sequence[int]) -> tuple[Column, Column, Column]:
    """Return KL, flip (0 or 1) and the change of the true token's surprise, each [N]."""
    ours, theirs = _log_softmax(reference), _log_softmax(candidate)
    # Below zero is rounding: the divergence itself never is.
    divergence = np.maximum(np.sum(np.exp(ours) * (ours - theirs), axis=1), 0.0)
    flips = (reference.argmax(axis=1) != candidate.argmax(axis=1)).astype(np.float64)
    rows = np.arange(len(truth))
    return divergence, flips, ours[rows, list(truth)] - theirs[rows, list(truth)]


def _log_softmax(logits: Logits) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _check(reference: Logits, candidate: Logits, truth: Sequence[int]) -> None:
    if reference.shape != candidate.shape or reference.ndim != 2:  # noqa: PLR2004  (a matrix)
        raise InvalidRequestError(
            f"candidate: logits of shape {candidate.shape}, the reference has {reference.shape}; both must be [N, V]",
            field="candidate",
        )
    count, vocabulary = reference.shape
    if count != len(truth) or count == 0:
        raise InvalidRequestError(
            f"truth: {len(truth)} tokens for {count} rows of logits; at least one is needed, and as many",
            field="truth",
            value=len(truth),
            expected=count,
        )
    outside = [token for token in truth if not 0 <= token < vocabulary]
    if outside:
        raise InvalidRequestError(
            f"truth: token {outside[0]}, the vocabulary has {vocabulary}", field="truth", value=outside[0]
        )
    for name, logits in (("reference", reference), ("candidate", candidate)):
        rows = np.flatnonzero(~np.isfinite(logits).all(axis=1))
        if rows.size:
            raise ModelError(f"{name}: logits that are not finite, first at position {rows[0]}", field=name)
