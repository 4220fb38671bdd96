"""One document being read: its text, its token ids, and its cache once the model has read it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cached_property
from typing import Any, TypeVar

from kvferry.core.container import ids_to_bytes
from kvferry.core.digests import digest
from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.core.manifest import Document, Prefix
from kvferry.core.progress import Progress, Stopwatch, relay
from kvferry.engine.cache import PrefixCache
from kvferry.engine.content import ContentEncoder
from kvferry.engine.model import LoadedModel
from kvferry.engine.residency import Residency

Read = TypeVar("Read")


def asked(question: str | None, method: str) -> str:
    """Return the question, for a method that works on it.

    Raises:
        InvalidRequestError: when there is none.
    """
    if not question:
        raise InvalidRequestError(f"question: method {method} needs the question", field="question", method=method)
    return question


class Reading:
    """What a method works on. Use from the worker thread.

    Attributes:
        model: the sender's.
        text: the document.
        system: the system prompt.
        question: the question; only aware methods may look at it.
        counter: encodes as the receiver's prompt does. Budgets count with it; the model's own where nothing else is
            said.
        prefill_tokens: read by ``prefill`` and ``read``; 0 when the cache was at hand.
    """

    def __init__(self, model: LoadedModel, residency: Residency, text: str, system: str, question: str | None) -> None:
        self.model = model
        self._residency = residency
        self.text = text
        self.system = system
        self.question = question
        self.counter: ContentEncoder = model.prompt.content
        self.prefill_tokens = 0
        self._watch = Stopwatch()

    @property
    def prefill_ms(self) -> float:
        """How long that took."""
        return self._watch.ms

    @cached_property
    def document(self) -> Document:
        """The manifest's description of the text."""
        encoded = self.text.encode("utf-8")
        return Document(digest(encoded), len(encoded), len(self.text))

    @cached_property
    def ids(self) -> list[int]:
        """The prefix's token ids under the sender's model."""
        return self.model.prompt.prefix(self.text, self.system)

    @cached_property
    def tokens(self) -> int:
        """How many tokens of the model's own prompt the text takes."""
        return self.model.prompt.content.count(self.text)

    @property
    def counts_own(self) -> bool:
        """Whether the receiver's tokens are the model's own."""
        return self.counter is self.model.prompt.content

    @property
    def receiver_tokens(self) -> int:
        """How many tokens of the receiver's prompt it takes."""
        return self.tokens if self.counts_own else self.counter.count(self.text)

    @cached_property
    def prefix(self) -> Prefix:
        """The manifest's description of the ids."""
        return Prefix(len(self.ids), digest(ids_to_bytes(self.ids)))

    def check_length(self) -> None:
        """Refuse, before it is encoded, a text that certainly does not fit the context of the sender's model.

        For methods whose model reads all of it. Others may work on a text of any length.

        Raises:
            ContextOverflowError: naming its characters and the limit.
        """
        self.model.check_length(self.text)

    def prefill(self) -> Generator[Progress, None, PrefixCache]:
        """Return the dense cache of the prefix, read now or kept from before.

        Raises:
            ModelError: when this model's caches cannot be carried.
            ContextOverflowError: when the document does not fit the context.
        """
        problem = self.model.profile.unsupported
        if problem:
            raise ModelError(f"model: {self.model.profile.model.id}: its cache cannot be sent: {problem}")
        self.check_length()
        yield Progress("tokenise", 0, len(self.text))
        return (yield from self._kept(self.ids, self.prefix.ids))

    def read(self, ids: Sequence[int]) -> Generator[Progress, None, PrefixCache | list[Any]]:
        """Return what the model makes of a prompt of a method's own, read now or kept from before.

        Returns:
            For ``LoadedModel.answer``: a cache, or what ``LoadedModel.read`` makes where caches cannot be kept.

        Raises:
            ContextOverflowError: when the prompt does not fit the context.
        """
        if self.model.profile.unsupported:
            yield Progress("prefill", 0, len(ids))
            return (yield from self._counted(self.model.read(ids), len(ids)))
        return (yield from self._kept(ids, digest(ids_to_bytes(ids))))

    def _kept(self, ids: Sequence[int], key: bytes) -> Generator[Progress, None, PrefixCache]:
        total = len(ids)
        yield Progress("prefill", 0, total)
        held = self._residency.get(key)
        if held is not None:
            yield Progress("prefill", total, total)
            return held
        cache = yield from self._counted(self.model.prefill(ids), total)
        self._residency.put(key, cache)
        return cache

    def asked(self, method: str) -> str:
        """Return the question; see ``asked``."""
        return asked(self.question, method)

    def _counted(self, steps: Generator[int, None, Read], total: int) -> Generator[Progress, None, Read]:
        timed = self._watch.timing(steps)
        made = yield from relay(timed, lambda done: Progress("prefill", done, total))
        self.prefill_tokens += total
        return made
