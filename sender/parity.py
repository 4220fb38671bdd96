"""The parity probe: what the sender's model says right after a fixed suffix on the artifact's own cache."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kvferry.core.manifest import Parity
from kvferry.engine.cache import PrefixCache
from kvferry.engine.model import LoadedModel

PROBE_QUESTION = "What is this document about?"
TOP = 32


def measure(model: LoadedModel, cache: PrefixCache, bound: float) -> Parity:
    """Run the suffix on a branch and keep the highest log-probabilities.

    Args:
        model: the sender's model.
        cache: the cache as the receiver will rebuild it.
        bound: mean KL in nats that the method promises to stay within.
    """
    suffix = model.prompt.fresh(PROBE_QUESTION)
    logits = model.last_logits(suffix, cache.branch(len(suffix))).astype(mx.float32)
    log_probabilities = logits - mx.logsumexp(logits)
    count = min(TOP, log_probabilities.shape[0])
    plain = np.array(log_probabilities)
    order = np.argsort(-plain, kind="stable")[:count]
    return Parity(tuple(suffix), tuple(int(item) for item in order), tuple(float(item) for item in plain[order]), bound)
