"""Scores from attention: SnapKV, H2O, TOVA, Expected Attention.

Plain loops in float64. H query heads, Hk KV heads, G = H/Hk: query head h reads KV head h // G. Queries and keys are
those after RoPE, except where a name says ``plain``.
"""

import math

import numpy as np


def softmax(logits):
    """exp(x) / sum of exp(x), over the last axis of a vector."""
    top = max(logits)
    powers = np.array([math.exp(x - top) for x in logits])
    return powers / sum(powers)


def causal_attention(queries, keys):
    """Weights [H, n, S] of the last n rows' queries [H, n, D] on all keys [Hk, S, D].

    softmax(q.k / sqrt(D)); query i sees the first S - n + i + 1 rows, the others get 0.
    """
    queries, keys = np.asarray(queries, dtype=np.float64), np.asarray(keys, dtype=np.float64)
    H, n, D = queries.shape
    Hk, S, _ = keys.shape
    weights = np.zeros((H, n, S))
    for h in range(H):
        for i in range(n):
            seen = S - n + i + 1
            logits = keys[h // (H // Hk), :seen] @ queries[h, i] / math.sqrt(D)
            weights[h, i, :seen] = softmax(logits)
    return weights


def pool(scores, kernel, kind):
    """1-D pooling of [T], stride 1, odd kernel: "avg" pads zeros that count in the divisor, "max" pads -inf."""
    if kernel % 2 == 0:
        raise ValueError(f"kernel {kernel} is even")
    half = kernel // 2
    pooled = []
    for t in range(len(scores)):
        inside = [float(scores[s]) for s in range(t - half, t + half + 1) if 0 <= s < len(scores)]
        pooled.append({"avg": sum(inside) / kernel, "max": max(inside)}[kind])
    return np.array(pooled)


def reduce_groups(scores, kv_heads, group):
    """Scores [H, T] to [Hk, T]: "mean" or "max" over the G query heads of a KV head; "none" leaves [H, T]."""
    if group == "none":
        return np.asarray(scores)
    reduce = {"mean": np.mean, "max": np.max, "sum": np.sum}[group]
    G = len(scores) // kv_heads
    return np.array([reduce(scores[k * G : (k + 1) * G], axis=0) for k in range(kv_heads)])


def snapkv_scores(
    queries, prefix_keys, window_keys, *, kernel=7, pooling="max", over="mean", group="mean", order="group-pool"
):
    """SnapKV and B5: scores of the prefix rows, [Hk, T], or [H, T] if ``group`` is "none".

    Window queries [H, W, D], prefix keys [Hk, T, D], window keys [Hk, W, D]. A = softmax over [prefix + window], causal
    in the window; drop the window's columns; ``over`` = "mean" or "sum" over the window queries; then the group
    reduction ("mean" or "max") and the pooling, in the ``order`` "group-pool" or "pool-group".

    Of a prompt that is its own window, the last W of its keys are the window keys. Defaults: B5.
    """
    keys = np.concatenate([np.asarray(prefix_keys), np.asarray(window_keys)], axis=1)
    T = np.asarray(prefix_keys).shape[1]
    weights = causal_attention(queries, keys)[:, :, :T]
    votes = {"mean": weights.mean(axis=1), "sum": weights.sum(axis=1)}[over]
    if order == "group-pool":
        return np.array([pool(row, kernel, pooling) for row in reduce_groups(votes, len(keys), group)])
    if order == "pool-group":
        return reduce_groups(np.array([pool(row, kernel, pooling) for row in votes]), len(keys), group)
    raise ValueError(order)


def best(scores, candidates, count):
    """The ``count`` best candidate indices, by score descending, index ascending; returned in ascending order."""
    return sorted(sorted(candidates, key=lambda t: (-float(scores[t]), t))[:count])


def column_sums(weights, kv_heads):
    """H2O: S [Hk, S]: the sum over all queries of the weights [H, n, S], summed over the group."""
    return reduce_groups(np.asarray(weights, dtype=np.float64).sum(axis=1), kv_heads, "sum")


def h2o_scores(queries, keys):
    """H2O after a prefill: column sums of all causal attention, queries [H, T, D], keys [Hk, T, D] to [Hk, T]."""
    return column_sums(causal_attention(queries, keys), len(keys))


def normalised_h2o_scores(sums):
    """Not H2O but kvpress ObservedAttention: S[t] / (T - t), the number of queries that saw row t."""
    sums = np.asarray(sums, dtype=np.float64)
    T = sums.shape[-1]
    return np.array([[row[t] / (T - t) for t in range(T)] for row in sums])


def h2o_rows(scores, heavy, recent, coming=0):
    """H2O (a), one head: if length > heavy + recent, the top ``heavy`` of all but the last ``recent``, plus those.

    ``coming`` is for the renumbering variant, which makes room for that many rows beforehand: recent is then smaller.
    """
    length = len(scores)
    if length + coming <= heavy + recent:
        return np.arange(length, dtype=np.int32)
    edge = length - recent + coming
    return np.array([*best(scores, range(edge), heavy), *range(edge, length)], dtype=np.int32)


def h2o_stream(queries, keys, heavy, recent, prefill):
    """H2O (a) with evictions: rows 0..prefill-1 at once, then one row at a time, each followed by an eviction.

    A row attends to what is held and itself. Sums never decay and move along with their rows. Returns for each KV head
    (positions held, ascending, and their sums). Queries [H, T, D], keys [Hk, T, D].
    """
    queries, keys = np.asarray(queries, dtype=np.float64), np.asarray(keys, dtype=np.float64)
    Hk, T, _ = keys.shape
    G = len(queries) // Hk
    outcome = []
    for k in range(Hk):
        held, sums = [], {}
        for rows in [range(prefill), *([t] for t in range(prefill, T))]:
            held = held + list(rows)
            group = queries[k * G : (k + 1) * G, list(rows)]
            seen = column_sums(causal_attention(group, keys[k : k + 1, held]), 1)[0]
            for t, weight in zip(held, seen, strict=True):
                sums[t] = sums.get(t, 0.0) + weight
            held = [held[i] for i in h2o_rows([sums[t] for t in held], heavy, recent)]
        outcome.append((np.array(held, dtype=np.int32), np.array([sums[t] for t in held])))
    return outcome


def tova_scores(last_query, keys):
    """TOVA: w [S], the mean over ALL query heads of the last row's weights.

    Query [H, D]; keys [Hk, S, D], that of the last row included.
    """
    return causal_attention(np.asarray(last_query)[:, None, :], keys)[:, 0].mean(axis=0)


def tova_rows(scores, size, *, force_last=False):
    """TOVA: if rows > size, the top ``size``, for all KV heads alike.

    ``force_last`` is kvpress: the last row survives.
    """
    length = len(scores)
    if length <= size:
        return np.arange(length, dtype=np.int32)
    if force_last:
        return np.array([*best(scores, range(length - 1), size - 1), length - 1], dtype=np.int32)
    return np.array(best(scores, range(length), size), dtype=np.int32)


def tova_stream(queries, keys, size, prefill):
    """TOVA with evictions: rows 0..prefill-1 at once, then one row at a time; the positions held in the end."""
    queries, keys = np.asarray(queries, dtype=np.float64), np.asarray(keys, dtype=np.float64)
    held = list(range(prefill - 1))
    for t in range(prefill - 1, keys.shape[1]):
        held = [*held, t]
        held = [held[i] for i in tova_rows(tova_scores(queries[:, t], keys[:, held]), size)]
    return np.array(held, dtype=np.int32)


def rope_matrix(position, dim, base=10000.0, *, traditional=False, dims=None):
    """The [D, D] matrix R with R x = RoPE of x at the position; pairs as in ``selector_oracles.rotate``."""
    d = dim if dims is None else dims
    R = np.eye(dim)
    for i in range(d // 2):
        angle = position * base ** (-2 * i / d)
        a, b = (2 * i, 2 * i + 1) if traditional else (i, i + d // 2)
        R[a, a] = R[b, b] = math.cos(angle)
        R[a, b], R[b, a] = -math.sin(angle), math.sin(angle)
    return R


def average_rope(length, dim, n_future=512, base=10000.0, *, traditional=False, dims=None):
    """Expected Attention: the entrywise mean of R over the positions T..T+n_future-1. Not orthogonal."""
    positions = range(length, length + n_future)
    return sum(rope_matrix(p, dim, base, traditional=traditional, dims=dims) for p in positions) / n_future


def query_statistics(plain_queries, n_sink=4):
    """Expected Attention, one head: mu [D] and Sigma [D, D] (divided by N) of plain queries [T, D], rows >= n_sink."""
    rows = np.asarray(plain_queries, dtype=np.float64)[n_sink:]
    if len(rows) == 0:
        raise ValueError("no row after the sinks")
    mu = sum(rows) / len(rows)
    return mu, sum(np.outer(q - mu, q - mu) for q in rows) / len(rows)


def expected_attention_scores(
    plain_queries,
    keys,
    values,
    *,
    n_future=512,
    n_sink=4,
    eps=0.0,
    covariance=True,
    value_norm=True,
    base=10000.0,
    traditional=False,
    dims=None,
):
    """Expected Attention: scores [Hk, T - n_sink] of the rows after the sinks (which are always kept).

    mu' = Rbar mu, Sigma' = Rbar Sigma Rbar'; z = mu'.k / sqrt(D) + k' Sigma' k / (2D); a = softmax over those rows,
    mean over G; score = (a + eps) * ||v||. Plain (pre-RoPE) queries [H, T, D], post-RoPE keys and values [Hk, T, D].
    """
    keys, values = np.asarray(keys, dtype=np.float64), np.asarray(values, dtype=np.float64)
    H, T, D = np.shape(plain_queries)
    Hk = len(keys)
    Rbar = average_rope(T, D, n_future, base, traditional=traditional, dims=dims)
    weights = np.empty((H, T - n_sink))
    for h in range(H):
        mu, Sigma = query_statistics(plain_queries[h], n_sink)
        mu, Sigma = Rbar @ mu, Rbar @ Sigma @ Rbar.T
        logits = []
        for k in keys[h // (H // Hk), n_sink:]:
            second = k @ Sigma @ k / (2 * D) if covariance else 0.0
            logits.append(mu @ k / math.sqrt(D) + second)
        weights[h] = softmax(logits)
    scores = reduce_groups(weights, Hk, "mean")
    if value_norm:
        for k in range(Hk):
            for t in range(T - n_sink):
                scores[k, t] = (scores[k, t] + eps) * math.sqrt(values[k, n_sink + t] @ values[k, n_sink + t])
    return scores
