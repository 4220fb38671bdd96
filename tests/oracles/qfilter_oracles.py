"""Q-Filters: calibration, scores, and the cache that evicts as rows come in.

Float64, NumPy's SVD. Queries and keys are those after RoPE (and after their norm, where a model has one).
"""

import numpy as np


def vote(left, rule):
    """The sign s of a first left singular vector u1 [N].

    "majority" (official): +1 if more than half of u1 > 0, else -1. "sum" (paper): sgn(sum of u1). Where the answer
    would hang on the sign that a solver happens to return (no majority on either side, sum 0), there is none.
    """
    left = [float(u) for u in left]
    if rule == "majority":
        above, below = sum(u > 0 for u in left), sum(u < 0 for u in left)
        if max(above, below) * 2 <= len(left):
            raise ValueError("no majority")
        return 1 if above * 2 > len(left) else -1
    if rule == "sum":
        total = sum(left)
        if abs(total) < 1e-12 * sum(abs(u) for u in left):
            raise ValueError("the sum is 0")
        return 1 if total > 0 else -1
    raise ValueError(rule)


def direction(queries, rule="majority"):
    """One query head: s * v1 [D], v1 the first right singular vector of queries [N, D]. Not centred."""
    left, _, right = np.linalg.svd(np.asarray(queries, dtype=np.float64), full_matrices=False)
    return vote(left[:, 0], rule) * right[0]


def stored_filters(queries, kv_heads, rule="majority"):
    """Queries [H, N, D] to filters [Hk, D] as stored: -(plain mean of s * v1 over the G heads), not normalised."""
    G = len(queries) // kv_heads
    means = [sum(direction(queries[h], rule) for h in range(k * G, (k + 1) * G)) / G for k in range(kv_heads)]
    return -np.array(means)


def scores(keys, stored):
    """Score [..., T] of keys [..., T, D]: -(k . stored filter [..., D]); the largest are kept."""
    keys, stored = np.asarray(keys, dtype=np.float64), np.asarray(stored, dtype=np.float64)
    found = np.empty(keys.shape[:-1])
    for at in np.ndindex(*found.shape):
        found[at] = -(keys[at] @ stored[at[:-1]])
    return found


def rows(row_scores, max_length, window=0, sinks=0, length=None, held=None):
    """One head: sinks and the last ``window`` rows always; of the rest the top max_length - window - sinks; ascending.

    Scores [T] are by position. ``held`` are the positions to choose from, all by default, of ``length`` seen.
    """
    if sinks + window >= max_length:
        raise ValueError(f"{sinks} sinks and a window of {window} leave nothing of {max_length}")
    length = len(row_scores) if length is None else length
    held = list(range(length)) if held is None else held
    if len(held) < max_length:
        return np.array(held, dtype=np.int32)
    safe = [t for t in held if t < sinks or t >= length - window]
    contest = sorted((t for t in held if t not in safe), key=lambda t: (-float(row_scores[t]), t))
    return np.array(sorted(safe + contest[: max_length - window - sinks]), dtype=np.int32)


def stream(row_scores, chunks, max_length, window=0, sinks=0):
    """One head: the same rows, evicted after each chunk of the lengths ``chunks``. No row ever comes back."""
    held, seen = [], 0
    for chunk in chunks:
        held = [*held, *range(seen, seen + chunk)]
        seen += chunk
        held = list(rows(row_scores, max_length, window, sinks, length=seen, held=held))
    return np.array(held, dtype=np.int32)


def fallback_axis(keys, chunks=None, warmup=128, *, centre=False):
    """Key-SVD fallback, one head: the first right singular vector [D], its sign undetermined, of the warm-up keys.

    Those are the first ``warmup`` of keys [T, D]; or, if they come in chunks, all that were there after the chunk that
    crossed the threshold. None before that. ``centre`` subtracts their mean, as the published page does.
    """
    keys = np.asarray(keys, dtype=np.float64)
    if len(keys) < warmup:
        return None
    observed = warmup
    if chunks is not None:
        totals = [sum(chunks[: n + 1]) for n in range(len(chunks))]
        observed = next((total for total in totals if total >= warmup), None)
        if observed is None:
            return None
    seen = keys[:observed]
    if centre:
        seen = seen - seen.mean(axis=0)
    return np.linalg.svd(seen, full_matrices=False)[2][0]
