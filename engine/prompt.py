"""The prompt of every method: one layout, one boundary.

    <template><system><template><label><material> | <template><question><template>
    ------------------ prefix ------------------- | ---------- fresh -------------

Every piece is encoded on its own and the ids are joined, so where the material ends never depends on the question:
prefix ids + fresh ids are the ids of the whole prompt, for every method and every document. What a method sends in
place of the document stands in the document's place, under a label that says what it is; nothing else differs.

The prompts that methods give the sender's own model stand here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError

from kvferry.core import container
from kvferry.core.digests import digest
from kvferry.core.errors import ContextOverflowError, ModelError
from kvferry.core.evidence import Evidence
from kvferry.engine.content import ContentEncoder

PROMPT_VERSION = 3
"""Changes whenever a receiver's model is given something else: layout, labels, default system prompt, lines of facts.

What a method asks the sender's own model is no part of it; see ``instructions``.
"""

DEFAULT_SYSTEM = (
    "You answer questions about a document. Use only what the document says. "
    "Answer briefly and copy names, codes, numbers and dates exactly."
)
LABELS: Mapping[str, str] = MappingProxyType(
    {
        container.TEXT: "Document",
        container.ENDS: "Beginning and end of the document",
        container.EXCERPTS: "Excerpts from the document",
        container.SUMMARY: "Summary of the document",
        container.COMPRESSED: "Compressed text of the document",
        container.EVIDENCE: "Facts from the document",
    }
)
"""What the receiver's model is told about its material, by the name of the section that holds it."""

SUMMARY_SYSTEM = "You summarise a document for a reader who cannot see it. Use only what the document says."
# Short on purpose: the smallest models repeat a long instruction instead of following it.
SUMMARY_BLIND = (
    "Summarise the document. Copy names, codes, numbers, dates and negations exactly, and keep everything concrete."
)
SUMMARY_AWARE = (
    "Summarise what the document says about the question. Copy names, codes, numbers, dates and negations exactly."
    "\n\nQuestion: "
)
"""The question follows."""

EVIDENCE_SYSTEM = "You list the facts of a document for a reader who cannot see it. Use only what the document says."
_EVIDENCE_BLIND = "List the facts of the document: names, codes, numbers, dates and negations."
_EVIDENCE_AWARE = "List the facts of the document that answer the question."
_EVIDENCE_FIELDS = (
    "Write JSON. For each fact give the entity, the attribute, the value, and a quote from the document that holds the "
    "value."
)
# Only where nothing else keeps a model to the form: the smallest ones copy such words in place of facts.
_EVIDENCE_FORM = (
    'The JSON is an object with the lists "facts", "notes" and "unknowns". Each fact has "entity", "attribute", '
    '"value" and "quote". Quotes are copied exactly.'
)
LOOKING_INSTRUCTION = (
    "\n\nRead the document above with care. You will be asked about its names, numbers, dates, places and codes, "
    "and about what follows from what. Note each of these facts exactly as it is written."
)
"""What blind KV methods look with, in place of a question that is not known yet."""
UNCONFIRMED = " (not confirmed)"
"""Behind a fact whose quote is not the document's, or does not hold its value."""

_BEFORE_DOCUMENT = "Document:\n"
_BEFORE_TASK = "\n\n"
_BEFORE_QUESTION = "\n\nQuestion: "
_SYSTEM_MARK, _DOCUMENT_MARK, _QUESTION_MARK = "\ue0001\ue000", "\ue0002\ue000", "\ue0003\ue000"


def instructions() -> bytes:
    """Return the digest of everything that methods ask the sender's own model: in other words, another one."""
    asked = (
        SUMMARY_SYSTEM,
        SUMMARY_BLIND,
        SUMMARY_AWARE,
        EVIDENCE_SYSTEM,
        _EVIDENCE_BLIND,
        _EVIDENCE_AWARE,
        _EVIDENCE_FIELDS,
        _EVIDENCE_FORM,
        LOOKING_INSTRUCTION,
    )
    return digest("\0".join(asked).encode("utf-8"))


def evidence_task(question: str | None, *, with_form: bool) -> str:
    """Return what the sender's model is asked for evidence.

    Args:
        question: what the facts are for, or None for every concrete fact.
        with_form: describe the JSON to be written, for a model that nothing else keeps to it.
    """
    parts = [_EVIDENCE_BLIND if question is None else _EVIDENCE_AWARE, _EVIDENCE_FIELDS]
    task = " ".join([*parts, _EVIDENCE_FORM] if with_form else parts)
    return task if question is None else f"{task}{_BEFORE_QUESTION}{question}"


def evidence_text(evidence: Evidence) -> str:
    """Return the material that a reader's model sees of evidence: one line a fact, a note and an unknown."""
    facts = (
        f"{_line(fact.entity)} - {_line(fact.attribute)}: {_line(fact.value)}{'' if fact.confirmed else UNCONFIRMED}"
        for fact in evidence.facts
    )
    notes = (f"Note: {_line(note)}" for note in evidence.notes)
    unknowns = (f"The document does not say: {_line(unknown)}" for unknown in evidence.unknowns)
    return "\n".join([*facts, *notes, *unknowns])


def _line(text: str) -> str:
    """Return a text on one line: what a model wrote in a value must not look like a fact of its own."""
    return " ".join(text.split())


@dataclass(frozen=True)
class _Frame:
    """The chat template's own text around label and material, question and answer."""

    opening: str
    before_label: str
    before_question: str
    closing: str


class PromptBuilder:
    """Makes prefix and question ids for one model.

    Attributes:
        content: encodes what goes into the prompt's places.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Build from an mlx-lm tokenizer.

        Raises:
            ModelError: when the model has no chat template, or one that reorders, drops or changes what it is given.
        """
        if not tokenizer.has_chat_template:
            raise ModelError("chat template: the model has none; kvferry needs an instruction-tuned model")
        self._structure = tokenizer.backend_tokenizer
        self.content = ContentEncoder.of(tokenizer)
        self._frame = _split(_render(tokenizer))

    def prefix(self, material: str, system: str = DEFAULT_SYSTEM, kind: str = container.TEXT) -> list[int]:
        """Return the ids of everything up to the material's last token.

        Args:
            material: the document, or what is sent in its place.
            system: the system prompt.
            kind: what the material is, a key of ``LABELS``.
        """
        return (
            self._encode_structure(self._frame.opening)
            + self.content.encode(system)
            + self._encode_structure(f"{self._frame.before_label}{LABELS[kind]}:\n")
            + self.content.encode(material)
        )

    def fresh(self, question: str) -> list[int]:
        """Return the ids of everything after the material: the question and the header of the answer."""
        return self._turn_end(self._frame.before_question, question)

    def task(self, instruction: str) -> list[int]:
        """Return the ids of everything after the document, for a task instead of a question."""
        return self._turn_end(_BEFORE_TASK, instruction)

    def check_length(self, context_length: int, *contents: str) -> None:
        """Refuse, before they are encoded, contents that certainly leave no room in a context: encoding takes its time.

        What passes may still not fit.

        Raises:
            ContextOverflowError: naming their characters and the limit.
        """
        least = sum(map(self.content.least, contents))
        # One token of an answer at least.
        if least + 1 > context_length:
            raise ContextOverflowError(
                f"context: {sum(map(len, contents))} characters are {least} tokens at least, the model takes "
                f"{context_length}",
                value=least,
                limit=context_length,
            )

    def _turn_end(self, before: str, content: str) -> list[int]:
        return (
            self._encode_structure(before) + self.content.encode(content) + self._encode_structure(self._frame.closing)
        )

    def _encode_structure(self, text: str) -> list[int]:
        return list(self._structure.encode(text, add_special_tokens=False).ids) if text else []


def _render(tokenizer: Any) -> str:
    user = f"{_BEFORE_DOCUMENT}{_DOCUMENT_MARK}{_BEFORE_QUESTION}{_QUESTION_MARK}"
    with_system = [{"role": "system", "content": _SYSTEM_MARK}, {"role": "user", "content": user}]
    try:
        return _apply(tokenizer, with_system)
    except TemplateError:
        # Templates without a system role raise; the system prompt then opens the user's turn.
        without_system = [{"role": "user", "content": f"{_SYSTEM_MARK}\n\n{user}"}]
    try:
        return _apply(tokenizer, without_system)
    except TemplateError as error:
        raise ModelError(f"chat template: it cannot be rendered: {error}") from error


def _apply(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    text: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return text


def _split(rendered: str) -> _Frame:
    marks = (_SYSTEM_MARK, _DOCUMENT_MARK, _QUESTION_MARK)
    if any(rendered.count(mark) != 1 for mark in marks):
        raise ModelError("chat template: it drops or repeats the system prompt or the user's turn")
    places = [rendered.index(mark) for mark in marks]
    if places != sorted(places):
        raise ModelError("chat template: it puts the user's turn before the system prompt")
    opening, rest = rendered.split(_SYSTEM_MARK)
    before_document, rest = rest.split(_DOCUMENT_MARK)
    before_question, closing = rest.split(_QUESTION_MARK)
    if not before_document.endswith(_BEFORE_DOCUMENT) or before_question != _BEFORE_QUESTION:
        raise ModelError("chat template: it changes the text of the user's turn")
    return _Frame(opening, before_document.removesuffix(_BEFORE_DOCUMENT), before_question, closing)
