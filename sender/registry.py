"""Every method that the sender knows. A new method is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from kvferry.core import allowed
from kvferry.core.errors import InvalidRequestError, UnknownMethodError
from kvferry.core.manifest import Scalar
from kvferry.sender.kv.adakv import AdaKV
from kvferry.sender.kv.chunkkv import ChunkKV
from kvferry.sender.kv.expected_attention import ExpectedAttention
from kvferry.sender.kv.expected_attention_adakv import ExpectedAttentionAdaKV
from kvferry.sender.kv.h2o import H2O
from kvferry.sender.kv.keydiff import KeyDiff
from kvferry.sender.kv.kivi import Kivi
from kvferry.sender.kv.l2norm import L2Norm
from kvferry.sender.kv.native import NativeCache
from kvferry.sender.kv.packed import Packed
from kvferry.sender.kv.pyramidkv import PyramidKV, PyramidKVAware
from kvferry.sender.kv.qfilters import QFilters
from kvferry.sender.kv.qfilters_svd import QFiltersSvd
from kvferry.sender.kv.random_rows import RandomRows
from kvferry.sender.kv.selected_packed import SelectedPacked
from kvferry.sender.kv.serialised import SerialisedCache
from kvferry.sender.kv.sink_recent import SinkRecent
from kvferry.sender.kv.snapkv import SnapKV, SnapKVAware
from kvferry.sender.kv.streaming_llm import StreamingLLM
from kvferry.sender.kv.tova import Tova
from kvferry.sender.method import Method
from kvferry.sender.text.evidence import StructuredEvidence, StructuredEvidenceAware
from kvferry.sender.text.extractive import Extractive, ExtractiveAware
from kvferry.sender.text.full_text import FullText
from kvferry.sender.text.head_tail import HeadTail
from kvferry.sender.text.llmlingua2 import LLMLingua2
from kvferry.sender.text.no_message import NoMessage
from kvferry.sender.text.references import EvidenceReferences
from kvferry.sender.text.summary import Summary, SummaryAware
from kvferry.sender.text.zstd_text import ZstdText

Checked = TypeVar("Checked", bound=msgspec.Struct)

METHODS: tuple[Method[Any], ...] = (
    NoMessage(),
    FullText(),
    HeadTail(),
    Extractive(),
    ExtractiveAware(),
    Summary(),
    SummaryAware(),
    StructuredEvidence(),
    StructuredEvidenceAware(),
    EvidenceReferences(),
    ZstdText(),
    LLMLingua2(),
    NativeCache(),
    SerialisedCache(),
    Packed(),
    Kivi(),
    SinkRecent(),
    RandomRows(),
    SnapKV(),
    SnapKVAware(),
    PyramidKV(),
    PyramidKVAware(),
    StreamingLLM(),
    H2O(),
    Tova(),
    L2Norm(),
    KeyDiff(),
    ChunkKV(),
    AdaKV(),
    ExpectedAttention(),
    QFilters(),
    QFiltersSvd(),
    ExpectedAttentionAdaKV(),
    SelectedPacked(lambda name: find(name)),  # noqa: PLW0108  (it is defined below)
)


FALLBACK_METHOD: Method[Any] = FullText()
"""What is sent instead of a refused cache, when the request allows it."""


def find(name: str) -> Method[Any]:
    """Return a method by its id or name; case does not matter.

    Raises:
        UnknownMethodError: naming what was asked for and what there is.
    """
    wanted = name.casefold()
    for method in METHODS:
        if wanted in (method.info.id.casefold(), method.info.name.casefold()):
            return method
    known = ", ".join(f"{method.info.id} ({method.info.name})" for method in METHODS)
    raise UnknownMethodError(f"method: {name!r} is not one of {known}", field="method", value=name)


def check_parameters(method: Method[Any], given: Mapping[str, Scalar]) -> msgspec.Struct:
    """Return a method's parameters, defaults filled in.

    Raises:
        InvalidRequestError: naming the parameter and its allowed range.
    """
    parameters: msgspec.Struct = parameters_of(method.parameters, method.info.id, given)
    return parameters


def parameters_of(kind: type[Checked], method: str, given: Mapping[str, Scalar]) -> Checked:
    """Return parameters of a kind, defaults filled in; ``method`` is what has them, for the message.

    Raises:
        InvalidRequestError: naming the parameter and its allowed range.
    """
    known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in given.items():
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise InvalidRequestError(f"{name}: method {method} has no such parameter; it takes {listed}", field=name)
        try:
            msgspec.convert(value, known[name])
        except msgspec.ValidationError as error:
            wanted = allowed.in_words(known[name])
            reason = f", must be {wanted}" if wanted else f": {error}"
            raise InvalidRequestError(f"{name}: {value!r}{reason}", field=name, value=value) from error
    return msgspec.convert(dict(given), kind)
