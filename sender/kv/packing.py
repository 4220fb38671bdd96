"""What methods that keep every row, but pack them, have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, ClassVar

from kvferry.core.compat import Profile
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.quantise import Scheme, quantise
from kvferry.sender.kv import capabilities, parameters
from kvferry.sender.kv.parameters import WidthParameters
from kvferry.sender.method import KvMaterial
from kvferry.sender.reading import Reading


class PackingMethod(ABC):
    """A method that packs every row. A subclass gives ``info``, ``parameters`` and ``scheme``."""

    info: ClassVar[MethodInfo]
    parameters: ClassVar[type[WidthParameters]]

    @abstractmethod
    def scheme(self, given: Any, key_dim: int, value_dim: int) -> Scheme | None:
        """Return how a cache with these head dimensions is packed.

        Raises:
            InvalidRequestError: naming the parameter that does not fit.
        """

    def plan(self, profile: Profile, given: Any) -> Scheme | None:
        """Return how every row is packed. What cannot be is refused here, before the document is read.

        Raises:
            InvalidRequestError: naming the parameter that does not fit.
            ModelError: when the model cannot attend such a cache.
        """
        packing = self.scheme(given, *parameters.head_dims(profile))
        capabilities.check(self.info.name, "every", packing, profile)
        return packing

    def make(self, reading: Reading, given: Any) -> Generator[Progress, None, KvMaterial]:
        """Read and pack."""
        packing = self.plan(reading.model.profile, given)
        cache = yield from reading.prefill()
        yield Progress("method", 0, 1)
        packed = cache if packing is None else quantise(cache, packing)
        yield Progress("method", 1, 1)
        return KvMaterial(packed, parameters.encoding(packing))
