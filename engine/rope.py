"""Rotary embeddings: what a layer really does, proven on the live model instead of read from its configuration.

The probe records what goes into every layer's rotary module while the model reads random tokens in two chunks,
then rotates the *cached* keys back with the parameters that were read from the module, and compares. A wrong base,
pairing, scaling or offset shows as a large error; a strip-and-reapply round trip would not notice it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from kvferry.core.digests import digest
from kvferry.core.manifest import Rope
from kvferry.engine.tensors import scalar

PROBE_TOKENS = 40
NO_ROTATION = Rope("none", 0, traditional=False, base=None, scale=1.0, freqs=None, mscale=1.0)
_ATTRIBUTES = ("rope", "rotary_emb")
_SCALED_BY = {"YarnRoPE": "mscale", "SuScaledRoPE": "_scale"}
_EXPLICIT = ("Llama3RoPE", "YarnRoPE", "SuScaledRoPE", "ProportionalRoPE")
# Relative errors: storage rounding of the cache's dtype, with a margin; a wrong theta reads above 1.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-2, mx.bfloat16: 1e-1}


@dataclass(frozen=True)
class Rotation:
    """A layer's rotation with the arrays that the wire form only names by digest."""

    rope: Rope
    freqs: mx.array | None

    def unrotate(self, keys: mx.array, offset: int) -> mx.array:
        """Return keys [B, Hk, N, D] before rotation, in fp32, for rows at positions offset..offset+N-1."""
        turned = self._turn(keys, offset, forward=False)
        return self._scaled(turned, 1.0 / self.rope.mscale)

    def unrotate_at(self, keys: mx.array, positions: mx.array) -> mx.array:
        """Return rows [Hk, R, D] before rotation, in fp32, for rows at ``positions``, int32 [Hk, R]."""
        return self._scaled(self._turn_rows(keys, positions, forward=False), 1.0 / self.rope.mscale)

    def rotate_at(self, plain: mx.array, positions: mx.array) -> mx.array:
        """Return rows [Hk, R, D] as the model would cache them at ``positions``, int32 [Hk, R], in fp32."""
        return self._turn_rows(self._scaled(plain, self.rope.mscale), positions, forward=True)

    def shift(self, keys: mx.array, change: mx.array) -> mx.array:
        """Return rotated rows [Hk, R, D] moved by ``change`` positions each, int32 [Hk, R], in their own dtype."""
        return self._turn_rows(keys, change, forward=True).astype(keys.dtype)

    def _turn_rows(self, rows: mx.array, positions: mx.array, *, forward: bool) -> mx.array:
        # A position a row: rows stand on the batch axis, where the kernel takes an array of offsets.
        heads, count, width = rows.shape
        flat = self._turn(rows.reshape(heads * count, 1, 1, width), positions.reshape(-1), forward=forward)
        return flat.reshape(heads, count, width)

    def _turn(self, rows: mx.array, offset: int | mx.array, *, forward: bool) -> mx.array:
        """Rotate [B, Hk, N, D] in fp32 without magnitudes."""
        plain = rows.astype(mx.float32)
        if self.rope.kind == "none":
            return plain
        sign = 1.0 if forward else -1.0
        return mx.fast.rope(
            plain,
            self.rope.dims,
            traditional=self.rope.traditional,
            base=self.rope.base,
            scale=self.rope.scale if self.freqs is not None else sign * self.rope.scale,
            offset=offset,
            freqs=sign * self.freqs if self.freqs is not None else None,
        )

    def _scaled(self, rows: mx.array, factor: float) -> mx.array:
        if self.rope.kind == "none" or factor == 1.0:
            return rows
        return mx.concatenate([rows[..., : self.rope.dims] * factor, rows[..., self.rope.dims :]], axis=-1)


@dataclass(frozen=True)
class Probe:
    """What the probe found: a rotation a layer, the largest relative error, and why carrying is impossible if it is."""

    rotations: tuple[Rotation, ...]
    error: float
    unsupported: str


class _Recorder(nn.Module):
    """Stands in a rotary module's place and keeps what it was given."""

    def __init__(self, inner: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner
        self.calls: list[tuple[mx.array, mx.array]] = []

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        before = x + 0
        after: mx.array = self.inner(x, *args, **kwargs)
        self.calls.append((before, after))
        return after


def _find_rotary(layer: Any) -> tuple[Any, str] | None:
    for _, module in layer.named_modules():
        for name in _ATTRIBUTES:
            if callable(getattr(module, name, None)):
                return module, name
    return None


def describe(module: Any) -> Rotation | None:
    """Read a rotary module's parameters. Return None for a class whose rotation is not fixed or not known."""
    kind = type(module).__name__
    if isinstance(module, nn.RoPE):
        rope = Rope(
            "rope", int(module.dims), bool(module.traditional), float(module.base), float(module.scale), None, 1.0
        )
        return Rotation(rope, None)
    if kind in _EXPLICIT:
        freqs = module._freqs.astype(mx.float32)  # noqa: SLF001  (mlx-lm has no public name for it)
        mscale = float(getattr(module, _SCALED_BY[kind])) if kind in _SCALED_BY else 1.0
        dims = int(getattr(module, "dims", 0) or module.dim)
        traditional = bool(getattr(module, "traditional", False))
        return Rotation(Rope("rope", dims, traditional, None, 1.0, digest(np.array(freqs).tobytes()), mscale), freqs)
    return None


def probe(model: Any, vocabulary: int) -> tuple[Probe, list[Any]]:
    """Run the probe on a loaded model.

    Returns:
        The findings, and the cache that the probe filled (its geometry is the model's own).
    """
    layers = list(model.layers)
    places = [_find_rotary(layer) for layer in layers]
    recorders: list[_Recorder | None] = []
    try:
        for place in places:
            recorder = _Recorder(getattr(*place)) if place else None
            recorders.append(recorder)
            if place and recorder:
                setattr(place[0], place[1], recorder)
        cache = _read_probe_tokens(model, vocabulary)
    finally:
        for place, recorder in zip(places, recorders, strict=False):
            if place and recorder:
                setattr(place[0], place[1], recorder.inner)
    return _judge(recorders, cache), cache


def _read_probe_tokens(model: Any, vocabulary: int) -> list[Any]:
    cache: list[Any] = make_prompt_cache(model)
    # A fixed walk over the vocabulary: no randomness to seed, and no token twice in a row.
    ids = mx.array([(7 + 13 * step) % vocabulary for step in range(PROBE_TOKENS)])
    half = PROBE_TOKENS // 2
    for part in (ids[:half], ids[half:]):
        mx.eval(model(part[None], cache=cache))
    return cache


def _judge(recorders: list[_Recorder | None], cache: list[Any]) -> Probe:
    rotations: list[Rotation] = []
    worst = 0.0
    unsupported = ""
    if len(recorders) != len(cache):
        unsupported = f"{len(cache)} caches for {len(recorders)} layers"
    for index, (recorder, layer_cache) in enumerate(zip(recorders, cache, strict=False)):
        rotation, error, problem = _judge_layer(recorder, layer_cache)
        rotations.append(rotation)
        worst = max(worst, error)
        unsupported = unsupported or (f"layer {index}: {problem}" if problem else "")
    return Probe(tuple(rotations), worst, unsupported)


def _judge_layer(recorder: _Recorder | None, cache: Any) -> tuple[Rotation, float, str]:
    unknown = Rotation(NO_ROTATION, None)
    if type(cache).__name__ != "KVCache":
        return unknown, 0.0, f"cache class {type(cache).__name__}, only KVCache can be carried"
    if recorder is None or not recorder.calls:
        return unknown, 0.0, "no rotary module was called, so positions cannot be proven"
    identity = all(bool(mx.array_equal(before, after)) for before, after in recorder.calls)
    rotation = unknown if identity else describe(recorder.inner)
    if rotation is None:
        return unknown, 0.0, f"rotary module {type(recorder.inner).__name__} is not one whose rotation is fixed"
    keys, _ = cache.keys_and_values()
    error = _relative_error(rotation, keys, [before for before, _ in recorder.calls])
    tolerance = TOLERANCE.get(keys.dtype, 0.0)
    # Not "error > tolerance": a model that computes NaN must fail as well.
    if not error <= tolerance:
        return rotation, error, f"rotary probe error {error:.2g} above {tolerance:.2g}"
    return rotation, error, ""


def _relative_error(rotation: Rotation, keys: mx.array, recorded: list[mx.array]) -> float:
    """Compare the un-rotated cache with what was recorded. Queries pass the same module; keys are the closer half."""
    plain = rotation.unrotate(keys, 0)
    half = PROBE_TOKENS // 2
    scale = scalar(mx.max(mx.abs(plain))) or 1.0
    errors = []
    for start in (0, half):
        window = plain[:, :, start : start + half]
        candidates = recorded[: len(recorded) // 2] if start == 0 else recorded[len(recorded) // 2 :]
        distances = [
            scalar(mx.max(mx.abs(window - item.astype(mx.float32))))
            for item in candidates
            if item.shape == window.shape
        ]
        errors.append(min(distances, default=float("inf")) / scale)
    return max(errors)
