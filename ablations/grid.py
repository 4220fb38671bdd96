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

import itertools
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgpack
import msgspec
from msgspec import Meta

from kvferry.ablations.provenance import Provenance
from kvferry.core.digests import digest
from kvferry.core.errors import ConfigError
from kvferry.core.manifest import Model, Scalar

METHOD = "method"
EVERY = "*"
_BUNDLED = files("kvferry.ablations").joinpath("grids")
_Entry = TypeVar("_Entry", bound=msgspec.Struct)
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
class Setting:
    """A method, or ``EVERY``, and the parameters that the grid gives it; the others keep their defaults."""

    method: str
    parameters: tuple[tuple[str, Scalar], ...] = ()


@dataclass(frozen=True)
class Cell:
    """One run: a model reads the start of a document, a method makes the artifact."""

    model: ModelEntry
    document: Document
    setting: Setting


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


def cell_id(cell: Cell, model: Model, provenance: Provenance) -> str:
    """Return the digest of everything that shapes a cell's figures, in hexadecimal."""
    parts = [
        cell.setting.method,
        sorted(cell.setting.parameters),
        msgspec.to_builtins(model, builtin_types=(bytes,)),
        cell.model.prefix_tokens,
        cell.model.continuation_tokens,
        digest(cell.document.text.encode("utf-8")),
        cell.document.question,
        msgspec.to_builtins(provenance),
    ]
    return digest(msgpack.packb(parts)).hex()


def load(path: Path) -> Grid:
    """Read a grid.

    Raises:
        ConfigError: when a file cannot be read, or naming the key that is unknown, missing or impossible.
    """
    return _parse(_read(path), path)


def bundled(name: str) -> Grid:
    """Read one of kvferry's own grids."""
    return load(Path(str(_BUNDLED.joinpath(f"{name}.toml"))))


def _parse(content: str, path: Path) -> Grid:
    try:
        tables = msgspec.convert(tomllib.loads(content), _Tables)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}", path=str(path)) from error
    for name in _Tables.__struct_fields__:
        if not getattr(tables, name):
            raise ConfigError(f"{path}: {name}: at least one is needed", path=str(path), field=name)
    models = [_entry(ModelEntry, given, f"{path}: models[{at}]") for at, given in enumerate(tables.models)]
    documents = [_document(given, path, f"{path}: documents[{at}]") for at, given in enumerate(tables.documents)]
    settings = [
        setting for at, given in enumerate(tables.methods) for setting in _expand(given, f"{path}: methods[{at}]")
    ]
    return Grid(tuple(models), tuple(documents), tuple(settings))


def _entry(kind: type[_Entry], given: dict[str, Any], place: str) -> _Entry:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {error}", place=place) from error


def _document(given: dict[str, Any], grid: Path, place: str) -> Document:
    entry = _entry(_DocumentEntry, given, place)
    if bool(entry.bundled) == bool(entry.file):
        raise ConfigError(f"{place}: exactly one of bundled and file is needed", place=place)
    if entry.file:
        path = grid.parent / Path(entry.file).expanduser()
        return Document(path.stem, _read(path), entry.question)
    folder = _BUNDLED.joinpath("documents")
    known = sorted(item.name.removesuffix(".md") for item in folder.iterdir() if item.name.endswith(".md"))
    if entry.bundled not in known:
        raise ConfigError(f"{place}: bundled = {entry.bundled!r} is not one of {', '.join(known)}", place=place)
    return Document(entry.bundled, folder.joinpath(f"{entry.bundled}.md").read_text("utf-8"), entry.question)


def _expand(given: dict[str, Any], place: str) -> Iterator[Setting]:
    method = given.get(METHOD)
    if not isinstance(method, str) or not method:
        raise ConfigError(f"{place}: {METHOD} = {method!r}: the id or name of a method is needed", place=place)
    names = [name for name in given if name != METHOD]
    choices = [_choices(given[name], f"{place}: {name}") for name in names]
    for values in itertools.product(*choices):
        yield Setting(method, tuple(zip(names, values, strict=True)))


def _choices(value: Any, place: str) -> list[Scalar]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(item, str | int | float) for item in values):
        raise ConfigError(f"{place} = {value!r}: a text, a number, a truth value or a list of them is needed")
    return values


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: {reason}", path=str(path)) from error


def _renamed(entry: ModelEntry, name: str) -> ModelEntry:
    return msgspec.structs.replace(entry, name=name)
