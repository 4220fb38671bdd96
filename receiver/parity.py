"""The parity probe at the receiver: does the rebuilt cache say what the sender's said?

It catches what no digest can: another kernel, another back end, a wrong rebuild.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np

from kvferry.core import json_records
from kvferry.core.errors import ParityError
from kvferry.core.files import write_atomic
from kvferry.core.ledger import ParityFigures
from kvferry.core.manifest import Parity
from kvferry.core.stored import Stored
from kvferry.engine.backend import runtime_versions
from kvferry.engine.cache import PrefixCache
from kvferry.engine.model import LoadedModel

_FILE = "parity.json"
# Two back ends sum in different orders; what that moves depends on the dtype that the cache is computed in.
FLOOR = {"F32": 1e-4, "F16": 1e-2, "BF16": 5e-2}


class _Note(msgspec.Struct, frozen=True):
    """Figures, and what they were measured on: another MLX or device is another node."""

    figures: ParityFigures
    runtime: tuple[str, str]


@functools.cache
def _runtime() -> tuple[str, str]:
    versions = runtime_versions()
    return versions["mlx"], versions["device"]


def measured(stored: Stored) -> ParityFigures | None:
    """Return what this node found for an artifact before, if anything."""
    try:
        note = json_records.decode((stored.path / _FILE).read_bytes(), _Note)
    except (OSError, msgspec.MsgspecError):
        return None
    return note.figures if note.runtime == _runtime() else None


def check(model: LoadedModel, cache: PrefixCache, stored: Stored) -> ParityFigures | None:
    """Repeat the manifest's probe and remember the figures.

    Raises:
        ParityError: when the divergence is beyond the method's bound, with the figures.
    """
    manifest = stored.manifest
    if manifest.parity is None or manifest.layout is None:
        return None
    bound = manifest.parity.bound + FLOOR[manifest.layout[0].dtype]
    kl, top1 = divergence(model, cache, manifest.parity)
    if not kl <= bound:
        raise ParityError(
            f"parity: the rebuilt cache is {kl:.3g} nats from the sender's, the bound is {bound:.3g} "
            f"(first token {'agrees' if top1 else 'differs'})",
            kl=kl,
            bound=bound,
            top1=int(top1),
        )
    figures = ParityFigures(kl, top1, bound)
    _remember(stored.path / _FILE, figures)
    return figures


def divergence(model: LoadedModel, cache: PrefixCache, parity: Parity) -> tuple[float, bool]:
    """Return the KL divergence in nats from the sender's distribution to ours, and whether the likeliest token agrees.

    The distribution is the sender's highest log-probabilities and, as one outcome, all the rest.
    """
    logits = model.last_logits(parity.suffix, cache.branch(len(parity.suffix))).astype(mx.float32)
    ours = np.array(logits - mx.logsumexp(logits), dtype=np.float64)
    listed = list(parity.ids)
    if not listed or max(listed) >= len(ours):
        return float("inf"), False
    theirs = np.array(parity.log_probabilities, dtype=np.float64)
    p, q = _with_rest(np.exp(theirs)), _with_rest(np.exp(ours[listed]))
    kl = float(np.sum(np.where(p > 0, p * (np.log(np.maximum(p, 1e-300)) - np.log(np.maximum(q, 1e-300))), 0.0)))
    return max(kl, 0.0) if np.isfinite(kl) else float("inf"), int(np.argmax(ours)) == listed[0]


def _with_rest(
    probabilities: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    # The rest is a difference of nearly equal numbers; below float32's resolution it is noise.
    rest = max(1.0 - float(probabilities.sum()), 1e-7)
    return np.append(probabilities, rest)


def _remember(path: Path, figures: ParityFigures) -> None:
    # The note only saves a forward pass next time.
    with contextlib.suppress(OSError):
        write_atomic(path, msgspec.json.encode(_Note(figures, _runtime())))
