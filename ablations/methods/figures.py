"""What comparing a method with the dense cache gives."""

from __future__ import annotations

import msgspec

TURNS = 3
"""How often a first token is timed."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished cell found.

    Attributes:
        artifact: id of the artifact that was made, in hexadecimal: what exactly was judged, calibrations included.
        name, label, aware: of the method.
        dtype: of the rows that the model computes with.
        prefix_tokens: that were read; the grid's number, or a few less where no token ended there.
        positions, kl_mean, kl_p99, flip_rate, delta_nll, tier: see ``kvferry.ablations.fidelity``.
        rows_min, rows_mean, rows_max: kept rows of a KV head of a layer in the rebuilt cache.
        payload_bytes, manifest_bytes: the artifact as it crosses, less the messages around it.
        dense_bf16_bytes: the yardstick.
        ratio: the yardstick over payload and manifest.
        resident_bytes: the rebuilt cache in memory.
        prefill_ms: reading the prefix, once for all methods.
        method_ms: the method's rule, without the prefill.
        encode_ms: writing the artifact, its parity probe (one forward of a short question) included.
        reconstruct_ms: from verified bytes to a cache.
        first_token_ms: a question on a branch of the rebuilt cache, median of ``TURNS``.
        dense_first_token_ms: the same question on the dense cache, in alternation.
    """

    artifact: str
    name: str
    label: str
    aware: bool
    dtype: str
    prefix_tokens: int
    positions: int
    kl_mean: float
    kl_p99: float
    flip_rate: float
    delta_nll: float
    tier: str
    rows_min: int
    rows_mean: float
    rows_max: int
    payload_bytes: int
    manifest_bytes: int
    dense_bf16_bytes: int
    ratio: float
    resident_bytes: int
    prefill_ms: float
    method_ms: float
    encode_ms: float
    reconstruct_ms: float
    first_token_ms: float
    dense_first_token_ms: float
