"""B1, serialised reuse: the dense cache of the sender, bit for bit."""

from __future__ import annotations

from collections.abc import Generator

from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.sender.method import KvMaterial, NoParameters
from kvferry.sender.reading import Reading


class SerialisedCache:
    """Sends every row of every layer in the model's own dtype. Exact on the same checkpoint and back end."""

    info = MethodInfo(
        id="B1",
        name="serialised",
        form="kv",
        label="custom",
        aware=False,
        source="kvferry",
        summary="the sender's dense cache, bit for bit; the receiver reads only the question",
    )
    parameters = NoParameters

    def make(self, reading: Reading, parameters: NoParameters) -> Generator[Progress, None, KvMaterial]:
        """Return the dense cache."""
        cache = yield from reading.prefill()
        yield Progress("method", 1, 1)
        return KvMaterial(cache)
