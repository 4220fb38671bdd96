"""Which rows to keep: the contract of every selector, and the methods that need no attention.

Plain loops in float64. T rows, Hk KV heads, D head dimension; keys are what lies in a cache, after RoPE.
"""

import math

import numpy as np


def keep(scores, count, protected=None):
    """Row indices [count], ascending: all protected ones, then by score descending, index ascending.

    ``count`` is everything that is kept, protected rows included. Those take no part in the contest, whatever they
    score.
    """
    scores = [float(score) for score in scores]
    if not all(math.isfinite(score) for score in scores):
        raise ValueError("a score is not finite")
    rows = range(len(scores))
    safe = [t for t in rows if protected is not None and protected[t]]
    if count < 1 or count < len(safe):
        raise ValueError(f"{count} rows cannot hold {len(safe)} protected ones")
    contest = sorted((t for t in rows if t not in set(safe)), key=lambda t: (-scores[t], t))
    return np.array(sorted(safe + contest[: count - len(safe)]), dtype=np.int32)


def protect(length, sinks=0, recent=0):
    """Bool [T]: the first ``sinks`` and the last ``recent`` rows."""
    return np.array([t < sinks or t >= length - recent for t in range(length)], dtype=bool)


def sink_recent_rows(length, budget, sinks=4):
    """B3: rows 0..sinks-1 and the last budget - sinks; everything if it fits."""
    if budget < sinks:
        raise ValueError(f"{budget} rows cannot hold {sinks} sinks")
    return np.array([t for t in range(length) if t < sinks or t >= length - (budget - sinks)], dtype=np.int32)


def streaming_llm_rows(length, sinks=4, recent=512):
    """StreamingLLM: if T > sinks + recent, [0, sinks) and the last ``recent``; else everything."""
    if length <= sinks + recent:
        return np.arange(length, dtype=np.int32)
    return np.array([*range(sinks), *range(length - recent, length)], dtype=np.int32)


def rotate(plain, positions, base=10000.0, *, traditional=False, dims=None, inverse=False):
    """RoPE of ``plain`` [..., T, D] at ``positions`` [T] or [..., T].

    Pair i = 0..d/2-1 turns by the angle position * base^(-2i/d). Pairs are (i, i + d/2), or (2i, 2i + 1) if
    ``traditional``. Only the first ``dims`` = d dimensions take part (all by default).
    """
    plain = np.asarray(plain, dtype=np.float64)
    d = plain.shape[-1] if dims is None else dims
    positions = np.broadcast_to(positions, plain.shape[:-1])
    rotated = plain.copy()
    for at in np.ndindex(*plain.shape[:-1]):
        for i in range(d // 2):
            angle = float(positions[at]) * base ** (-2 * i / d)
            if inverse:
                angle = -angle
            a, b = (2 * i, 2 * i + 1) if traditional else (i, i + d // 2)
            x, y = plain[at][a], plain[at][b]
            rotated[at][a] = x * math.cos(angle) - y * math.sin(angle)
            rotated[at][b] = x * math.sin(angle) + y * math.cos(angle)
    return rotated


def renumbered_keys(plain, rows, base=10000.0, *, traditional=False, dims=None):
    """StreamingLLM and H2O streaming: un-rotated keys [..., T, D], row rows[n] rotated at its cache index n."""
    kept = np.asarray(plain)[..., np.asarray(rows), :]
    return rotate(kept, np.arange(len(rows)), base, traditional=traditional, dims=dims)


def l2norm_scores(keys):
    """L2Norm: score = -||k||, so that the lowest norm is kept. Keys [..., T, D] to [..., T]."""
    keys = np.asarray(keys, dtype=np.float64)
    scores = np.empty(keys.shape[:-1])
    for at in np.ndindex(*scores.shape):
        scores[at] = -math.sqrt(sum(x * x for x in keys[at]))
    return scores


def l2norm_count(length, ratio, prune_after=2048):
    """L2Norm: rows kept = ceil(ratio * T); everything while T < prune_after."""
    return length if length < prune_after else math.ceil(ratio * length)


def keydiff_scores(keys):
    """KeyDiff in one shot, one head: score = -cos(k, anchor), anchor = mean of k/||k||. Keys [T, D] to [T].

    A zero key has no direction: it counts as zero in the mean, and its cosine, as that with a zero anchor, is 0.
    """
    keys = np.asarray(keys, dtype=np.float64)
    directions = []
    for key in keys:
        norm = math.sqrt(sum(x * x for x in key))
        directions.append(key / norm if norm > 0 else key)
    anchor = sum(directions) / len(keys)
    length = math.sqrt(sum(x * x for x in anchor))
    return np.array([-(direction @ anchor) / length if length > 0 else 0.0 for direction in directions])


def keydiff_blockwise_rows(keys, count, block=128, first=None):
    """KeyDiff in blocks, one head: add a block, score what is held by the anchor of what is held, keep ``count``.

    ``first`` is the size of the first block; kvpress takes ``count``, the paper ``block`` (the default).
    """
    keys = np.asarray(keys, dtype=np.float64)
    held, start, step = [], 0, block if first is None else first
    while start < len(keys):
        held = held + list(range(start, min(start + step, len(keys))))
        start, step = start + step, block
        if len(held) > count:
            scores = keydiff_scores(keys[held])
            held = [held[i] for i in keep(scores, count)]
    return np.array(held, dtype=np.int32)


def chunkkv_chunk_scores(scores, chunk=20):
    """ChunkKV: scores [Hk, T] summed over the heads, then the mean of every chunk; the last may be a partial one."""
    scores = np.asarray(scores, dtype=np.float64)
    total = [sum(float(x) for x in scores[:, t]) for t in range(scores.shape[1])]
    chunks = [total[start : start + chunk] for start in range(0, len(total), chunk)]
    return np.array([sum(part) / len(part) for part in chunks])


def chunkkv_count(length, removed, chunk=20):
    """ChunkKV: chunks kept = max(1, int(n_chunks * (1 - r))), the partial one counted among them."""
    return max(1, int(math.ceil(length / chunk) * (1 - removed)))


def chunkkv_rows(scores, chunks_kept, chunk=20):
    """ChunkKV: the rows of the best ``chunks_kept`` chunks, one set for all heads; needs one complete chunk."""
    length = np.asarray(scores).shape[1]
    if length < chunk:
        raise ValueError("no complete chunk: the plain scorer decides")
    best = keep(chunkkv_chunk_scores(scores, chunk), chunks_kept)
    return np.array([t for t in range(length) if t // chunk in best], dtype=np.int32)
