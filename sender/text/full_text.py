"""A1, full text: the whole document, read by the receiver for every question."""

from __future__ import annotations

from collections.abc import Generator

from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.sender.method import NoParameters, TextMaterial
from kvferry.sender.reading import Reading


class FullText:
    """Sends the text as it is: the reference for answers, and what every other method is measured against."""

    info = MethodInfo(
        id="A1",
        name="full",
        form="text",
        label="custom",
        aware=False,
        source="kvferry",
        summary="the whole text; the receiver reads it again for every question",
    )
    parameters = NoParameters

    def make(self, reading: Reading, parameters: NoParameters) -> Generator[Progress, None, TextMaterial]:
        """Return the document."""
        yield Progress("method", 1, 1)
        return TextMaterial(reading.text)
