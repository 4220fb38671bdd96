"""A grid: which models read which documents, and by which methods. A TOML file becomes a list of cells.

    [[models]]                      # read by each: the first so many tokens of every document, and what follows them
    name = "smollm2-135m-instruct"  # directory, catalogue name or hub id
    prefix_tokens = 700             # of the whole prefix, chat template and system prompt included
    continuation_tokens = 200

    [[documents]]
    bundled = "ferry-line"          # one of kvferry's own, or file = "path", relative to the grid
    question = "…"                  # what aware methods see, and what the first token is timed with

    [[methods]]
    method = "B3"                   # id or name; "*" is every method of the experiment that takes these parameters
    budget = [64, 128, 256]         # every other key is a parameter; a list stands for one cell a value

Two lists in one entry stand for every pair. An unknown key is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.ablations.harness import toml_files
from kvferry.ablations.harness.settings import Setting, expand
from kvferry.core.digests import digest
from kvferry.core.errors import ConfigError

EVERY = "*"
"""In a setting: every method of the experiment that takes its parameters."""

_BUNDLED = files("kvferry.ablations").joinpath("grids")
_Filled = Annotated[str, Meta(min_length=1)]
_Positive = Annotated[int, Meta(ge=1)]


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model and how much of every document it reads."""

    name: _Filled
    prefix_tokens: _Positive
    continuation_tokens: _Positive


class _DocumentEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    question: _Filled
    bundled: str = ""
    file: str = ""


class _Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: tuple[dict[str, Any], ...]
    documents: tuple[dict[str, Any], ...]
    methods: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Document:
    """A text and a question about it. ``name`` is for people."""

    name: str
    text: str
    question: str


@dataclass(frozen=True)
class Cell:
    """One run: a model reads the start of a document, a method makes the artifact."""

    model: ModelEntry
    document: Document
    setting: Setting

    def shape(self) -> list[Any]:
        """Return what shapes its figures beside the model and the method."""
        return [
            self.model.prefix_tokens,
            self.model.continuation_tokens,
            digest(self.document.text.encode("utf-8")),
            self.document.question,
        ]

    def record_fields(self) -> dict[str, Any]:
        """Return what its record says of it."""
        return {
            "model": self.model.name,
            "document": self.document.name,
            "prefix_tokens": self.model.prefix_tokens,
            "continuation_tokens": self.model.continuation_tokens,
        }

    def describe(self) -> str:
        """Return it in a few words."""
        return f"{self.model.name}, {self.document.name}: {self.setting.words}"


@dataclass(frozen=True)
class Grid:
    """What a file asks for. ``settings`` are expanded: no list is left."""

    models: tuple[ModelEntry, ...]
    documents: tuple[Document, ...]
    settings: tuple[Setting, ...]

    def cells(self, model: ModelEntry) -> list[Cell]:
        """Return the cells of one model, document by document."""
        return [Cell(model, document, setting) for document in self.documents for setting in self.settings]

    def with_models(self, names: Sequence[str]) -> Grid:
        """Return the same grid for other models. One that the grid names keeps its counts, others get the first's."""
        known = {model.name: model for model in self.models}
        return replace(self, models=tuple(known.get(name, _renamed(self.models[0], name)) for name in names))


def load(path: Path) -> Grid:
    """Read a grid.

    Raises:
        ConfigError: when a file cannot be read, or naming the key that is unknown, missing or impossible.
    """
    return _parse(toml_files.read(path, _Tables), path)


def bundled(name: str) -> Grid:
    """Read one of kvferry's own grids."""
    return load(Path(str(_BUNDLED.joinpath(f"{name}.toml"))))


def _parse(tables: _Tables, path: Path) -> Grid:
    toml_files.check_filled(tables, _Tables.__struct_fields__, path)
    models = [toml_files.entry(item, ModelEntry, f"{path}: models[{at}]") for at, item in enumerate(tables.models)]
    documents = [_document(given, path, f"{path}: documents[{at}]") for at, given in enumerate(tables.documents)]
    return Grid(tuple(models), tuple(documents), expand(tables.methods, path))


def _document(given: dict[str, Any], grid: Path, place: str) -> Document:
    entry = toml_files.entry(given, _DocumentEntry, place)
    if bool(entry.bundled) == bool(entry.file):
        raise ConfigError(f"{place}: exactly one of bundled and file is needed", place=place)
    if entry.file:
        path = grid.parent / Path(entry.file).expanduser()
        return Document(path.stem, toml_files.text(path), entry.question)
    folder = _BUNDLED.joinpath("documents")
    known = sorted(item.name.removesuffix(".md") for item in folder.iterdir() if item.name.endswith(".md"))
    if entry.bundled not in known:
        raise ConfigError(f"{place}: bundled = {entry.bundled!r} is not one of {', '.join(known)}", place=place)
    return Document(entry.bundled, folder.joinpath(f"{entry.bundled}.md").read_text("utf-8"), entry.question)


def _renamed(entry: ModelEntry, name: str) -> ModelEntry:
    return msgspec.structs.replace(entry, name=name)
