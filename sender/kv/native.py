"""B0, native cache: the receiver reads the text once itself and branches from that cache for every question."""

from __future__ import annotations

from collections.abc import Generator

from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.sender.method import NoParameters, TextMaterial
from kvferry.sender.reading import Reading


class NativeCache:
    """Text crosses; no cache does. The reference for every carried cache: nothing was encoded or moved."""

    info = MethodInfo(
        id="B0",
        name="native",
        form="text",
        label="custom",
        aware=False,
        source="kvferry",
        summary="the receiver reads the text once and keeps its own cache for later questions",
    )
    parameters = NoParameters

    def make(self, reading: Reading, parameters: NoParameters) -> Generator[Progress, None, TextMaterial]:
        """Return the document, to be read once."""
        yield Progress("method", 1, 1)
        return TextMaterial(reading.text, retain=True)
