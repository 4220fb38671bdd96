"""Which methods a quality bound allows, and which of them fit both ends, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.core.choice import Quality
from kvferry.core.compat import Profile, Reason, ReasonCode
from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.core.manifest import Scalar
from kvferry.core.wire import NodeInfo
from kvferry.sender import registry
from kvferry.sender.kv import capabilities
from kvferry.sender.kv.packing import PackingMethod
from kvferry.sender.kv.selecting import SelectingMethod
from kvferry.sender.method import Method

FORMS = ("kv", "evidence", "text")
"""In the order in which a choice gives way."""

_Named = tuple[str, Mapping[str, Scalar]]
# The answers of the full context. Where two are equally quick, the first one is taken.
_EXACT: tuple[_Named, ...] = (("B1", {}), ("A7", {}), ("A1", {}))
# Packed as wide as loses next to nothing; docs/results.md has the figures.
_NEAR: tuple[_Named, ...] = (("B2", {"bits": 8}), ("B2", {"key_bits": 8, "value_bits": 4}))
# A part of the document: a quarter of the rows, facts, or a quarter of the text.
_REDUCED: tuple[_Named, ...] = (
    ("B9", {"budget": 0.25, "bits": 8}),
    ("B5", {"budget": 0.25}),
    ("A5", {}),
    ("A3", {"budget": 0.25}),
)
ALLOWED: Mapping[Quality, tuple[_Named, ...]] = {
    "exact": _EXACT,
    "near": _EXACT + _NEAR,
    "reduced": _EXACT + _NEAR + _REDUCED,
}
"""Methods and parameters by bound. None looks at the question: what is sent shall answer others as well."""


@dataclass(frozen=True)
class Candidate:
    """A method with its parameters. ``written`` has those that were given."""

    method: Method[Any]
    parameters: msgspec.Struct
    written: str = ""

    @property
    def id(self) -> str:
        """The method's."""
        return self.method.info.id

    @property
    def form(self) -> str:
        """What would cross."""
        return self.method.info.form


def allowed(quality: Quality) -> list[Candidate]:
    """Return what a quality bound allows, in order."""
    return [_candidate(name, given) for name, given in ALLOWED[quality]]


def _candidate(name: str, given: Mapping[str, Scalar]) -> Candidate:
    method = registry.find(name)
    written = " ".join(f"{key}={value}" for key, value in given.items())
    return Candidate(method, registry.check_parameters(method, given), written)


def misfit(candidate: Candidate, ours: Profile, theirs: NodeInfo, tokens: int) -> str:
    """Return why a candidate cannot be used, as far as either end can tell beforehand; "" when it may.

    Args:
        candidate: what is looked at.
        ours: what runs here.
        theirs: what runs at the receiver.
        tokens: of the prefix with the whole document.
    """
    reasons = list(_receiver_reasons(candidate, ours, theirs, tokens))
    if reasons:
        return "; ".join(map(str, reasons))
    if candidate.form == "text":
        return ""
    if tokens >= ours.context_length:
        return f"the document makes {tokens} tokens, and the sender's model takes {ours.context_length}"
    return _unable(candidate, ours) if candidate.form == "kv" else ""


def _receiver_reasons(candidate: Candidate, ours: Profile, theirs: NodeInfo, tokens: int) -> list[Reason]:
    """Compare what the receiver says of itself; the rest is judged at Offer."""
    model, tokenizer = ours.model, ours.tokenizer
    same_tokens = tokenizer.vocab.hex() == theirs.tokenizer
    compared = [
        (ReasonCode.WEIGHTS_MISMATCH, "model.weights", model.weights.hex(), theirs.weights),
        (ReasonCode.TOKENIZER_MISMATCH, "tokenizer.vocab", tokenizer.vocab.hex(), theirs.tokenizer),
        (
            ReasonCode.CHAT_TEMPLATE_MISMATCH,
            "tokenizer.chat_template",
            tokenizer.chat_template.hex(),
            theirs.chat_template,
        ),
        (ReasonCode.DTYPE_UNSUPPORTED, "layout[0].dtype", ours.layers[0].dtype, theirs.dtype),
    ]
    reasons = [Reason(*item) for item in compared if candidate.form == "kv" and item[2] != item[3]]
    whole = candidate.form == "kv" or candidate.id in {"A1", "A7"}
    # Another tokenizer may make fewer tokens of the same text.
    if whole and same_tokens and tokens >= theirs.context_length:
        context = f"context of {theirs.context_length}"
        reasons.append(Reason(ReasonCode.TOO_LARGE, "prefix.tokens", str(tokens), context))
    return reasons


def _unable(candidate: Candidate, ours: Profile) -> str:
    """Return why the sender's own model cannot do it; "" when it can."""
    if ours.unsupported:
        return f"the cache of {ours.model.id} cannot be sent: {ours.unsupported}"
    method, given = candidate.method, candidate.parameters
    try:
        if isinstance(method, PackingMethod | SelectingMethod):
            method.plan(ours, given)
        if isinstance(method, SelectingMethod) and method.observes(given):
            capabilities.check_queries(method.info.name, ours)
    except (InvalidRequestError, ModelError) as error:
        return error.message
    return ""
