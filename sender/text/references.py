"""A6, references: what the document's facts are about and where they stand, without the facts themselves.

The receiver ranks them by the question and has the sender send the passages around the best of them when it answers.
"""

from __future__ import annotations

from collections.abc import Generator

from kvferry.core import evidence
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.sender.method import EvidenceMaterial
from kvferry.sender.reading import Reading
from kvferry.sender.text.evidence import EvidenceParameters, find_evidence


class EvidenceReferences:
    """A6: the message of A5 without values, and without facts that have no place."""

    info = MethodInfo(
        id="A6",
        name="references",
        form="references",
        label="custom",
        aware=False,
        source="kvferry",
        summary="where the document's facts stand; the receiver looks up what a question needs",
    )
    parameters = EvidenceParameters

    def make(self, reading: Reading, parameters: EvidenceParameters) -> Generator[Progress, None, EvidenceMaterial]:
        """Find facts without looking at the question, and keep their places."""
        found = yield from find_evidence(reading, None, parameters)
        message = evidence.references(found.evidence)
        return EvidenceMaterial(message, found.outcome | {"references": len(message.references)})
