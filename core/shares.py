"""A fraction of a count, as it is written."""

from __future__ import annotations

import math
from fractions import Fraction


def share(fraction: float, whole: int) -> int:
    """Return how many of ``whole`` a fraction is, rounded down: 0.29 of 100 is 29, whichever float is next to 0.29."""
    return math.floor(Fraction(str(fraction)) * whole)
