"""Which models answer from which methods' messages. A TOML file and a set of questions become a list of cells.

    max_tokens = 48                 # of an answer

    [[models]]
    name = "smollm2-135m-instruct"  # directory, catalogue name or hub id; sender and receiver have the same

    [[methods]]
    method = "A3"                   # id or name; every other key is a parameter, see kvferry.ablations.harness.settings
    budget = [0.25, 0.1]

An unknown key is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.ablations.answers.questions import Examined, Question
from kvferry.ablations.harness import toml_files
from kvferry.ablations.harness.settings import Setting, expand
from kvferry.core.digests import digest
from kvferry.core.errors import InvalidRequestError, UnknownMethodError
from kvferry.sender import registry

MAX_TOKENS = 48


class _Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]


class _Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: tuple[_Model, ...]
    methods: tuple[dict[str, Any], ...]
    max_tokens: Annotated[int, Meta(ge=1)] = MAX_TOKENS


@dataclass(frozen=True)
class AnswerCell:
    """One answer: a model is asked a question about a document that it knows from a method's message."""

    model: str
    document: Examined
    setting: Setting
    question: Question
    max_tokens: int

    def shape(self) -> list[Any]:
        """Return what shapes its figures beside the model and the method."""
        return [
            digest(self.document.text.encode("utf-8")),
            self.question.question,
            self.max_tokens,
        ]

    def record_fields(self) -> dict[str, Any]:
        """Return what its record says of it."""
        return {"model": self.model, "document": self.document.name, "question": self.question.question}

    def describe(self) -> str:
        """Return it in a few words."""
        asked = self.document.questions
        number = f"question {asked.index(self.question) + 1} of {len(asked)}"
        return f"{self.model}, {self.document.name}: {self.setting.words}, {number}"


@dataclass(frozen=True)
class AnswerGrid:
    """What a file asks for. ``settings`` are expanded: no list is left."""

    models: tuple[str, ...]
    settings: tuple[Setting, ...]
    max_tokens: int = MAX_TOKENS

    def cells(self, model: str, documents: Sequence[Examined]) -> list[AnswerCell]:
        """Return the cells of one model: document by document, and in it setting by setting."""
        return [
            AnswerCell(model, document, setting, question, self.max_tokens)
            for document in documents
            for setting in self.settings
            for question in document.questions
        ]

    def with_models(self, names: Sequence[str]) -> AnswerGrid:
        """Return the same grid for other models."""
        return replace(self, models=tuple(names))

    def with_methods(self, names: Sequence[str]) -> AnswerGrid:
        """Return the grid's settings of some methods; one that the grid does not name comes with its defaults."""
        settings: list[Setting] = []
        for name in dict.fromkeys(names):
            given = [setting for setting in self.settings if _identity(setting.method) == _identity(name)]
            settings += given or [Setting(name)]
        return replace(self, settings=tuple(settings))


def _identity(method: str) -> str:
    """Return the id behind an id or a name, and what is neither as it is."""
    with contextlib.suppress(UnknownMethodError):
        return registry.find(method).info.id
    return method


def load(path: Path) -> AnswerGrid:
    """Read a grid.

    Raises:
        ConfigError: when the file cannot be read, or naming the key that is unknown, missing or impossible.
    """
    tables = toml_files.read(path, _Tables)
    toml_files.check_filled(tables, ("models", "methods"), path)
    return AnswerGrid(tuple(model.name for model in tables.models), expand(tables.methods, path), tables.max_tokens)


def bundled() -> AnswerGrid:
    """Read kvferry's own grid."""
    return load(Path(str(files("kvferry.ablations").joinpath("grids", "answers.toml"))))


def choose(documents: Sequence[Examined], names: Sequence[str], sample: int | None = None) -> tuple[Examined, ...]:
    """Return the documents of these names, all of them where no name is given.

    Args:
        documents: those that there are.
        names: of those to return.
        sample: most questions of each; None for all. Every document's begin one later than those of the one before it,
            so that a sample has questions of every kind and place. A larger one holds the smaller.

    Raises:
        InvalidRequestError: naming the document that is not there, and those that are.
    """
    known = {document.name: _sample(document, at, sample) for at, document in enumerate(documents)}
    for name in names:
        if name not in known:
            raise InvalidRequestError(f"document: {name!r} is not one of {', '.join(known)}", field="document")
    return tuple(known[name] for name in dict.fromkeys(names)) if names else tuple(known.values())


def _sample(document: Examined, number: int, most: int | None) -> Examined:
    if most is None:
        return document
    begin = number % len(document.questions)
    turned = document.questions[begin:] + document.questions[:begin]
    return replace(document, questions=turned[:most])
