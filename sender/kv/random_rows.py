"""B4, random rows: the control that every rule has to beat."""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated

import numpy as np
from msgspec import Meta

from kvferry.core.container import ids_to_bytes
from kvferry.core.digests import digest
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.selection import Positions
from kvferry.sender.kv.parameters import SelectionParameters
from kvferry.sender.kv.selecting import Keep, Kept, SelectingMethod, Subject

_KEY_BYTES = 16
_PURPOSE = b"kvferry random rows 1"


class RandomParameters(SelectionParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``seed`` tells one draw from another; the same seed gives the same rows everywhere."""

    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


def draw_key(prefix: bytes, seed: int, layer: int, head: int) -> int:
    """Return the 128-bit key of one head's draws.

    Args:
        prefix: digest of the prefix's token ids.
        seed: of the request.
        layer: its number.
        head: the KV head's number.
    """
    numbers = seed.to_bytes(8, "little") + layer.to_bytes(4, "little") + head.to_bytes(4, "little")
    return int.from_bytes(digest(_PURPOSE + prefix + numbers)[:_KEY_BYTES], "little")


def random_order(key: int, rows: int) -> Positions:
    """Return 0..rows-1 in a random order: by independent uniform draws in [0, 1), the smallest first."""
    # Philox's words are a function of its key alone; numpy may change how its generators turn words into floats.
    draws = (np.random.Philox(key=key).random_raw(rows) >> np.uint64(11)) * 2.0**-53
    return np.argsort(draws, kind="stable").astype(np.int32)


class RandomRows(SelectingMethod):
    """Keeps rows drawn uniformly without replacement, for every layer and KV head on its own."""

    info = MethodInfo(
        id="B4",
        name="random",
        form="kv",
        label="custom",
        aware=False,
        source="kvferry",
        summary="rows drawn at random, the same for the same document and seed",
    )
    parameters = RandomParameters

    def rank(self, subject: Subject, given: RandomParameters) -> Generator[Progress, None, Keep]:
        """Draw."""
        yield Progress("method", 0, 1)
        prefix = digest(ids_to_bytes(subject.ids))
        orders = [
            [random_order(draw_key(prefix, given.seed, index, head), subject.rows) for head in range(layer.kv_heads)]
            for index, layer in enumerate(subject.layers)
        ]

        def keep(count: int) -> Kept:
            return [[np.sort(order[:count]) for order in heads] for heads in orders]

        return keep
