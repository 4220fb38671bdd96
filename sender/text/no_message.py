"""A0, no message: the question alone, the floor that guessing reaches."""

from __future__ import annotations

from collections.abc import Generator

from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.sender.method import NoParameters, TextMaterial
from kvferry.sender.reading import Reading


class NoMessage:
    """Sends nothing of the document; the receiver's prompt has an empty material slot."""

    info = MethodInfo(
        id="A0",
        name="none",
        form="text",
        label="custom",
        aware=False,
        source="kvferry",
        summary="nothing of the document is sent: what guessing alone reaches",
    )
    parameters = NoParameters

    def make(self, reading: Reading, parameters: NoParameters) -> Generator[Progress, None, TextMaterial]:
        """Return no text."""
        yield Progress("method", 1, 1)
        return TextMaterial(None)
