"""Which model something was measured on."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.core.compat import Profile
from kvferry.core.digests import DIGEST_BYTES, digest
from kvferry.core.errors import InvalidRequestError, ModelError

Hex = Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * DIGEST_BYTES}}}$")]
_Text = Annotated[str, Meta(max_length=1024)]
_Positive = Annotated[int, Meta(ge=1, le=2**20)]


class Binding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model and the layout of its heads. ``id`` and ``revision`` are for people; everything else must be equal.

    ``adapter`` is "" without one. ``rope`` is the digest of every layer's rotation as the manifest describes it.
    """

    id: _Text
    revision: _Text
    weights: Hex
    config: Hex
    adapter: Annotated[str, Meta(pattern=f"^([0-9a-f]{{{2 * DIGEST_BYTES}}})?$")]
    tokenizer: Hex
    rope: Hex
    layers: _Positive
    kv_heads: _Positive
    head_dim: _Positive


def describe(profile: Profile) -> Binding:
    """Describe a loaded model.

    Raises:
        ModelError: when its caches cannot be carried, or its layers differ in heads or in width.
    """
    if profile.unsupported:
        raise ModelError(f"model: {profile.model.id}: its cache cannot be sent: {profile.unsupported}")
    shapes = {(layer.kv_heads, layer.key_dim) for layer in profile.layers}
    if len(shapes) != 1:
        raise ModelError(f"model: {profile.model.id}: its layers have {len(shapes)} head layouts, one is needed")
    kv_heads, head_dim = shapes.pop()
    model = profile.model
    return Binding(
        id=model.id,
        revision=model.revision,
        weights=model.weights.hex(),
        config=model.config.hex(),
        adapter=model.adapter.hex() if model.adapter else "",
        tokenizer=profile.tokenizer.vocab.hex(),
        rope=digest(msgspec.msgpack.encode(profile.rope)).hex(),
        layers=len(profile.layers),
        kv_heads=kv_heads,
        head_dim=head_dim,
    )


def difference(found: Binding, expected: Binding) -> tuple[str, str | int, str | int] | None:
    """Return the first field in which two models differ, with both values; None when they are the same."""
    for name in ("layers", "kv_heads", "head_dim", "weights", "config", "adapter", "tokenizer", "rope"):
        held, wanted = getattr(found, name), getattr(expected, name)
        if held != wanted:
            return name, held, wanted
    return None


def check_bound(found: Binding, expected: Binding, what: str) -> None:
    """Refuse what was measured on another model.

    Raises:
        InvalidRequestError: naming the field and both values.
    """
    differing = difference(found, expected)
    if differing is not None:
        name, held, wanted = differing
        raise InvalidRequestError(
            f"{what}: {name} {short(held)} of {found.id}, but the model {expected.id} has "
            f"{short(wanted)}; calibrate this model",
            field=name,
            value=held,
            expected=wanted,
        )


def short(value: str | int) -> str:
    """Return a value for an error message: of a digest the first digits."""
    text = str(value)
    return f"{text[:12]}…" if len(text) == 2 * DIGEST_BYTES else text or "none"
