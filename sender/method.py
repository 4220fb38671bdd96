"""What a method is: a description, its parameters, and a rule that turns a reading into material."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from kvferry.core import container
from kvferry.core.evidence import Evidence, References
from kvferry.core.manifest import Encoding, Scalar
from kvferry.core.progress import Progress
from kvferry.core.spans import Span
from kvferry.core.wire import MethodInfo
from kvferry.engine.cache import PrefixCache
from kvferry.engine.model import LoadedModel
from kvferry.sender.reading import Reading

Parameters_contra = TypeVar("Parameters_contra", bound=msgspec.Struct, contravariant=True)
DENSE = Encoding(None, None, None, None, None, None, None)


class NoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For methods without parameters."""


@dataclass(frozen=True)
class TextMaterial:
    """Text to send.

    Attributes:
        text: the document, or what is sent in its place; None sends no material at all.
        zstd: a compression level.
        retain: ask the receiver to read the text once and branch from that cache for every question.
        kind: the name of the section that holds the text, which says what it is; see ``kvferry.core.container``.
        spans: which passages of a text other than the document are the document's; the rest is generated.
        outcome: what became of the rule on this document; beside the parameters in the manifest as ``outcome.NAME``.
    """

    text: str | None
    zstd: int | None = None
    retain: bool = False
    kind: str = container.TEXT
    spans: tuple[Span, ...] = ()
    outcome: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class KvMaterial:
    """A cache to send.

    Attributes:
        cache: what the receiver shall rebuild.
        encoding: how K and V are stored.
        bound: mean KL in nats, on the probe, between the cache here and the same cache rebuilt there.
        calibration: digests of the calibrations that shaped it.
    """

    cache: PrefixCache
    encoding: Encoding = DENSE
    bound: float = 0.0
    calibration: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class EvidenceMaterial:
    """Facts to send, or only where they stand.

    Attributes:
        message: the facts, or references to them.
        outcome: as that of ``TextMaterial``.
    """

    message: Evidence | References
    outcome: Mapping[str, Scalar] = field(default_factory=dict)


Material = TextMaterial | EvidenceMaterial | KvMaterial


class Method(Protocol, Generic[Parameters_contra]):
    """A method. ``parameters`` is a frozen msgspec Struct: its fields, types and limits are the method's interface."""

    @property
    def info(self) -> MethodInfo:
        """Identity, label and source."""

    @property
    def parameters(self) -> type[Any]:
        """The Struct that requests are checked against."""

    def make(self, reading: Reading, parameters: Parameters_contra) -> Generator[Progress, None, Material]:
        """Apply the rule. Yields progress; closing the generator stops the work."""


@runtime_checkable
class Shaped(Protocol[Parameters_contra]):
    """A method that something shapes beside document, question, parameters and model."""

    def shaped_by(self, model: LoadedModel, parameters: Parameters_contra) -> Sequence[str]:
        """Return what identifies that: under one name it may change."""
