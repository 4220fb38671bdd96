"""Parameters that methods of the KV kind share: how much is kept, and how what is kept is packed."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.core.compat import Profile
from kvferry.core.errors import InvalidRequestError
from kvferry.core.manifest import Encoding
from kvferry.engine.packing import choose_group
from kvferry.engine.quantise import Scheme, Width
from kvferry.sender.method import DENSE

Bits = Literal[2, 3, 4, 5, 6, 8]
Group = Literal[32, 64, 128]
Residual = Annotated[int, Meta(ge=32, le=4096)]
Budget = (
    Annotated[int, Meta(ge=1, description="rows from 1")]
    | Annotated[float, Meta(gt=0.0, le=1.0, description="a fraction above 0 up to 1")]
    | Annotated[
        str,
        Meta(
            pattern=r"^[0-9]+(\.[0-9]+)? ?(B|kB|KB|MB|GB|KiB|MiB|GiB)$",
            description="bytes like 200KB (B, KB, MB, GB, KiB, MiB, GiB)",
        ),
    ]
)
"""Rows a KV head, as a whole number; the fraction of rows kept; or bytes of payload, such as "200KB"."""


class WidthParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How wide codes are, and how long groups.

    ``bits`` stands for keys and values; ``key_bits`` and ``value_bits`` for one of them. None leaves a tensor dense. A
    ``group`` of None is chosen by the head dimension.
    """

    bits: Bits | None = None
    key_bits: Bits | None = None
    value_bits: Bits | None = None
    group: Group | None = None
    key_group: Group | None = None
    value_group: Group | None = None


class PackingParameters(WidthParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How K and V are packed.

    ``quantiser`` "affine" packs every row by itself, "kivi" packs keys by channel and keeps the last ``residual`` rows
    dense.
    """

    quantiser: Literal["affine", "kivi"] = "affine"
    residual: Residual = 128


class SelectionParameters(PackingParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many rows are kept, and how they are packed."""

    budget: Budget = 0.25


def head_dims(profile: Profile) -> tuple[int, int]:
    """Return what must divide into groups in every layer: the head dimension of keys, and that of values."""
    keys, values = ([getattr(layer, name) for layer in profile.layers] for name in ("key_dim", "value_dim"))
    return math.gcd(*keys), math.gcd(*values)


def scheme(parameters: PackingParameters, key_dim: int, value_dim: int) -> Scheme | None:
    """Return how a cache with these head dimensions is packed; None when it stays dense.

    Raises:
        InvalidRequestError: naming the parameter that does not fit.
    """
    if parameters.quantiser == "kivi":
        return kivi(parameters, parameters.residual, value_dim)
    return affine(parameters, key_dim, value_dim)


def affine(parameters: WidthParameters, key_dim: int, value_dim: int) -> Scheme | None:
    """Return the scheme that packs every row by itself; None when no bits are given.

    Raises:
        InvalidRequestError: naming the group that does not fit.
    """
    key_bits, value_bits = _bits(parameters)
    if key_bits is None and value_bits is None:
        for name in ("group", "key_group", "value_group"):
            if getattr(parameters, name) is not None:
                raise InvalidRequestError(
                    f"{name}: {getattr(parameters, name)}, but no bits are given, so nothing is packed in groups",
                    field=name,
                    value=getattr(parameters, name),
                )
        return None
    keys, values = (
        None if bits is None else Width(bits, choose_group(name, dim, bits, wanted or parameters.group))
        for name, dim, bits, wanted in (
            ("key_group", key_dim, key_bits, parameters.key_group),
            ("value_group", value_dim, value_bits, parameters.value_group),
        )
    )
    return Scheme(keys, values)


def kivi(parameters: WidthParameters, residual: int, value_dim: int) -> Scheme:
    """Return KIVI's scheme: keys by channel in blocks of ``residual`` rows, values by token but for the last ones.

    Raises:
        InvalidRequestError: naming the parameter that does not fit.
    """
    key_bits, value_bits = _bits(parameters)
    if key_bits is None or value_bits is None:
        raise InvalidRequestError(
            f"bits: the quantiser kivi packs keys and values; key_bits is {key_bits}, value_bits {value_bits}",
            field="bits",
        )
    key_group = parameters.key_group or parameters.group or 32
    if residual % key_group:
        raise InvalidRequestError(
            f"residual: {residual} is no multiple of the key group {key_group}",
            field="residual",
            value=residual,
            group=key_group,
        )
    value_group = choose_group("value_group", value_dim, 2, parameters.value_group or parameters.group)
    return Scheme(Width(key_bits, key_group, "channel"), Width(value_bits, value_group), "minmax", residual)


def _bits(parameters: WidthParameters) -> tuple[int | None, int | None]:
    return parameters.key_bits or parameters.bits, parameters.value_bits or parameters.bits


def encoding(packing: Scheme | None) -> Encoding:
    """Return the manifest's description of a scheme."""
    if packing is None:
        return DENSE
    keys, values = packing.keys, packing.values
    return Encoding(
        key_bits=keys.bits if keys else None,
        value_bits=values.bits if values else None,
        key_group=keys.group if keys else None,
        value_group=values.group if values else None,
        key_axis=keys.axis if keys else None,
        entropy=None,
        zstd=None,
    )
