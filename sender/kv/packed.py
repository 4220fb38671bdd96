"""B2, packed: every row, codes of a few bits, attended as they are."""

from __future__ import annotations

from kvferry.core.wire import MethodInfo
from kvferry.engine.quantise import Scheme
from kvferry.sender.kv import parameters
from kvferry.sender.kv.packing import PackingMethod
from kvferry.sender.kv.parameters import Bits, WidthParameters


class PackedParameters(WidthParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """As of ``WidthParameters``, but both are packed: what has no bits of its own has ``bits``."""

    bits: Bits = 8


class Packed(PackingMethod):
    """Packs K and V by ``mx.quantize`` along the head dimension. The receiver never expands them."""

    info = MethodInfo(
        id="B2",
        name="packed",
        form="kv",
        label="custom",
        aware=False,
        source="mx.quantize, affine groups along the head dimension",
        summary="every row, packed to 8 bits or fewer; keys and values with bits and groups of their own",
    )
    parameters = PackedParameters

    def scheme(self, given: PackedParameters, key_dim: int, value_dim: int) -> Scheme | None:
        """Every row by itself."""
        return parameters.affine(given, key_dim, value_dim)
