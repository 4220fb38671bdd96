"""KIVI: keys packed by channel, values by token, the last rows dense. arXiv 2402.02750."""

from __future__ import annotations

from kvferry.core.wire import MethodInfo
from kvferry.engine.quantise import Scheme
from kvferry.sender.kv import parameters
from kvferry.sender.kv.packing import PackingMethod
from kvferry.sender.kv.parameters import Bits, Residual, WidthParameters


class KiviParameters(WidthParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``group`` counts rows for keys and dimensions for values, 32 by default.

    ``residual`` is R: keys are packed in whole blocks of R rows, values but for the last R rows. The authors advise 4
    bits for models whose query heads share KV heads.
    """

    bits: Bits = 2
    residual: Residual = 128


class Kivi(PackingMethod):
    """What KIVI's cache holds after the prompt. Adapted: later rows stay dense, where KIVI packs them as they come."""

    info = MethodInfo(
        id="kivi",
        name="kivi",
        form="kv",
        label="adapted",
        aware=False,
        source="KIVI, arXiv 2402.02750; jy-yuan/KIVI models/llama_kivi.py",
        summary="keys packed by channel, values by token, the last rows dense; rows of the answer stay dense",
    )
    parameters = KiviParameters

    def scheme(self, given: KiviParameters, key_dim: int, value_dim: int) -> Scheme:
        """Groups of keys lie along the rows, so that one wide channel costs the others nothing."""
        return parameters.kivi(given, given.residual, value_dim)
