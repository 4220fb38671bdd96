"""The parity group of a manifest: is it a probe that a receiver can repeat?"""

from __future__ import annotations

import math

from kvferry.core import limits
from kvferry.core.errors import ManifestError
from kvferry.core.manifest import Parity

# Log-probabilities are float32 results: those of a certain token may be a little above 0.
_TOLERANCE = 1e-3


def check(parity: Parity) -> None:
    """Check a probe before anything is run for it.

    Raises:
        ManifestError: naming the field, its value and what is allowed.
    """
    _check_count("suffix", len(parity.suffix), limits.MAX_PROBE_TOKENS)
    _check_count("ids", len(parity.ids), limits.MAX_PROBE_OUTCOMES)
    given = parity.log_probabilities
    if len(parity.ids) != len(given):
        raise ManifestError(
            f"parity.log_probabilities: {len(given)} for {len(parity.ids)} ids",
            field="parity.log_probabilities",
            value=len(given),
            expected=len(parity.ids),
        )
    if len(set(parity.ids)) != len(parity.ids):
        raise ManifestError("parity.ids: one of them appears twice", field="parity.ids")
    if list(given) != sorted(given, reverse=True):
        raise ManifestError("parity.log_probabilities: not in descending order", field="parity.log_probabilities")
    # The first is the highest, so no exponential overflows.
    mass = math.fsum(map(math.exp, given)) if given[0] <= _TOLERANCE else math.inf
    if mass > 1 + _TOLERANCE:
        raise ManifestError(
            f"parity.log_probabilities: their probabilities add up to {mass:.6g}",
            field="parity.log_probabilities",
            value=mass,
            limit=1,
        )


def _check_count(name: str, count: int, limit: int) -> None:
    if not 1 <= count <= limit:
        raise ManifestError(
            f"parity.{name}: {count} entries, there are 1 to {limit}", field=f"parity.{name}", value=count, limit=limit
        )
