"""Which methods fit both ends, before anything is read, and whether what was made is of any use to the receiver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.core.compat import Profile, Reason, ReasonCode, context_reasons
from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.core.stored import Stored
from kvferry.core.wire import NodeInfo
from kvferry.sender.auto.candidates import Candidate
from kvferry.sender.auto.estimates import Text, prompt_tokens
from kvferry.sender.kv import capabilities
from kvferry.sender.kv.packing import PackingMethod
from kvferry.sender.kv.selecting import SelectingMethod


@dataclass(frozen=True)
class Ends:
    """What runs at the sender and at the receiver, and the document that is to get from one to the other."""

    ours: Profile
    theirs: NodeInfo
    text: Text

    def misfit(self, candidate: Candidate) -> str:
        """Return why a candidate cannot be used, as far as either end can tell beforehand; "" when it may."""
        reasons = list(self._differences()) if candidate.form == "kv" else []
        reasons += self._overflow(prompt_tokens(candidate, self.text))
        if reasons:
            return "; ".join(map(str, reasons))
        if candidate.form == "text":
            return ""
        tokens, limit = self.text.prefix_tokens, self.ours.context_length
        if tokens >= limit:
            return f"the document makes {tokens} tokens, and the sender's model takes {limit}"
        return _unable(candidate, self.ours) if candidate.form == "kv" else ""

    def useless(self, stored: Stored) -> str:
        """Return why a text or evidence that was made is of no use; "" when it is, and for a cache."""
        manifest = stored.manifest
        outcome = manifest.method.outcome
        if manifest.form == "evidence" and not outcome.get("confirmed"):
            facts = outcome.get("facts", 0)
            return f"the document confirms none of the {facts} facts that the sender's model wrote"
        # What a method was expected to make at most may have been too little.
        tokens = outcome.get("tokens")
        reasons = self._overflow(self.text.around_tokens + tokens) if isinstance(tokens, int) else ()
        return "; ".join(map(str, reasons))

    def _differences(self) -> Iterator[Reason]:
        """Compare what the receiver says of itself; the rest is judged at Offer."""
        model, tokenizer = self.ours.model, self.ours.tokenizer
        theirs, template = self.theirs, tokenizer.chat_template.hex()
        for code, name, artifact, receiver in (
            (ReasonCode.WEIGHTS_MISMATCH, "model.weights", model.weights.hex(), theirs.weights),
            (ReasonCode.TOKENIZER_MISMATCH, "tokenizer.vocab", tokenizer.vocab.hex(), theirs.tokenizer),
            (ReasonCode.CHAT_TEMPLATE_MISMATCH, "tokenizer.chat_template", template, theirs.chat_template),
            (ReasonCode.DTYPE_UNSUPPORTED, "layout[0].dtype", self.ours.layers[0].dtype, theirs.dtype),
        ):
            if artifact != receiver:
                yield Reason(code, name, artifact, receiver)

    def _overflow(self, tokens: int) -> Iterator[Reason]:
        # Another tokenizer may make fewer tokens of the same text.
        if self.ours.tokenizer.vocab.hex() == self.theirs.tokenizer:
            yield from context_reasons(tokens, self.theirs.context_length, self.text.question_tokens)


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
