"""How many rows: SnapKV, PyramidKV, AdaKV and H2O, integers throughout.

T is the length of the prompt with its window of W rows; T - W rows are scored. Where the window is a probe that is not
part of the prefix, T is the prefix and the probe together, and the prefix keeps the scored rows alone.
"""

import numpy as np

PYRAMID_GOLDEN = [  # capacity, W, L; keep[0], keep[L-1], mean rows (window rows included) of a long prompt
    (128, 8, 28, 234, 18, 134.0),
    (512, 8, 28, 983, 38, 518.5),
    (64, 32, 28, 63, 9, 68.0),
    (64, 8, 28, 110, 2, 64.0),
    (1024, 32, 32, 1935, 75, 1037.0),
    (2048, 8, 32, 3978, 103, 2048.5),
]


def snapkv_scored(length, capacity, window):
    """SnapKV: scored rows kept beside the window: everything if T < capacity, else capacity - W."""
    return max(length - window, 0) if length < capacity else capacity - window


def kvpress_count(length, removed):
    """Rows that a kvpress scorer keeps: max(1, int(T * (1 - r)))."""
    return max(1, int(length * (1 - removed)))


def pyramid_scored(length, capacity, window, layers, beta=20):
    """PyramidKV: scored rows kept in each layer, the bottom one first; each has its W window rows as well.

    One layer, on which the rule divides by zero, gets the uniform C.
    """
    C = capacity - window
    if length < capacity:
        return [max(length - window, 0)] * layers
    if length < 2 * C or layers == 1:
        return [C] * layers
    lo = C // beta
    hi = 2 * C - lo
    if hi >= length - window:
        hi = length - window
        lo = 2 * C - hi
    step = (hi - lo) // (layers - 1)
    return [hi - layer * step for layer in range(layers)]


def pyramid_rows(length, capacity, window, layers, beta=20):
    """PyramidKV: all rows that each layer keeps, window included."""
    return [scored + min(window, length) for scored in pyramid_scored(length, capacity, window, layers, beta)]


def adakv_counts(scores, head_rows, *, ties="head"):
    """AdaKV: c_h, how many of a layer's top Hk * Bh scores [Hk, n] fall in head h; Bh = ``head_rows``.

    Equal scores of two heads: "head" prefers the lower head, "row" the lower row. Within a head always the lower row.
    """
    scores = np.asarray(scores, dtype=np.float64)
    order = {"head": lambda at: at, "row": lambda at: (at[1], at[0])}[ties]
    ranking = sorted(np.ndindex(*scores.shape), key=lambda at: (-scores[at], order(at)))
    winners = ranking[: len(scores) * head_rows]
    return [sum(1 for head, _ in winners if head == h) for h in range(len(scores))]


def adakv_caps(scores, capacity, window, alpha, *, ties="head"):
    """AdaKV: scored rows of each head, round(c_h * (1 - alpha) + int(alpha * Bh)), Bh = capacity - W.

    Rounds half to even. The total may differ from Hk * Bh: it is not re-balanced here. Everything if T < capacity.
    """
    scores = np.asarray(scores, dtype=np.float64)
    Bh = capacity - window
    if scores.shape[1] < Bh:
        return [scores.shape[1]] * len(scores)
    floor = int(alpha * Bh)
    return [round(count * (1 - alpha) + floor) for count in adakv_counts(scores, Bh, ties=ties)]


def adakv_safe_counts(scores, head_rows, alpha, *, ties="head"):
    """AdaKV as kvpress has it: rows kept of each head; the total is exactly Hk * ``head_rows``.

    Each head's own top int(alpha * head_rows) rows, one at least if alpha > 0, are safe; the best of the rest, over all
    heads, fill up.
    """
    scores = np.array(scores, dtype=np.float64)
    safe = max(1, int(alpha * head_rows)) if alpha > 0 else 0
    for h in range(len(scores)):
        for t in sorted(range(scores.shape[1]), key=lambda t: (-scores[h, t], t))[:safe]:
            scores[h, t] = np.inf
    return adakv_counts(scores, head_rows, ties=ties)


def h2o_mask_budgets(length, heavy=0.1, recent=0.1):
    """H2O (b), ``utils_hh``: (heavy, recent) rows, int(ratio * T), fixed at prefill."""
    return int(heavy * length), int(recent * length)
