"""Naming an artifact: by what a send returned, by a list entry, or by its id in full or in part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from kvferry.client import _types
from kvferry.client._values import Artifact, SendResult
from kvferry.core.digests import DIGEST_BYTES
from kvferry.core.errors import InvalidRequestError, NotFoundError

ArtifactReference: TypeAlias = SendResult | Artifact | str

SHORTEST_PREFIX = 8
_WHOLE = 2 * DIGEST_BYTES
_DIGITS = re.compile(rf"[0-9a-f]{{{SHORTEST_PREFIX},{_WHOLE}}}")
_SHOWN = 4


def digits(reference: ArtifactReference) -> str:
    """Return an artifact's id, or the beginning of it that was given, in lower case.

    Raises:
        InvalidRequestError: when a str is not 8 to 64 hexadecimal digits.
    """
    if isinstance(reference, SendResult | Artifact):
        return reference.artifact_id
    if not isinstance(reference, str):
        raise _types.wrong("artifact", reference, "an artifact's id, or what send or artifacts returned")
    given = reference.strip().lower()
    if not _DIGITS.fullmatch(given):
        raise InvalidRequestError(
            f"artifact: {reference!r} is not an artifact id: {_WHOLE} hexadecimal digits, or at least the first "
            f"{SHORTEST_PREFIX} of them",
            field="artifact",
            value=reference,
        )
    return given


def is_whole(given: str) -> bool:
    """Whether ``given`` is a whole id."""
    return len(given) == _WHOLE


def match(given: str, known: Sequence[str], where: str) -> str:
    """Return the one id that begins with ``given``.

    Args:
        given: what ``digits`` returned.
        known: ids to choose from.
        where: whose they are, for the message.

    Raises:
        NotFoundError: when there is none.
        InvalidRequestError: when there are several.
    """
    found = sorted({artifact_id for artifact_id in known if artifact_id.startswith(given)})
    if not found:
        raise NotFoundError(f"artifact {given}: not held by {where}", artifact=given)
    if len(found) > 1:
        listed = ", ".join(artifact_id[: len(given) + 8] + "…" for artifact_id in found[:_SHOWN])
        raise InvalidRequestError(
            f"artifact: {given} begins {len(found)} ids at {where}: {listed}", field="artifact", value=given
        )
    return found[0]
