"""Documents and questions about them, with the answers that count and the passage that each stands in.

A set is a folder: a TOML file a document, the text beside it.

    document = "contract.md"        # beside this file, UTF-8

    [[questions]]
    question = "…"                  # in the document's language
    answers = ["…", "…"]            # short; the best of them counts, see kvferry.ablations.report.scoring
    quote = "…"                     # a passage of the document that is there once and holds an answer
    kind = "number"                 # what makes it easy or hard, one of KINDS

Everything is checked when a set is read; an unknown key is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from kvferry.ablations.harness import toml_files
from kvferry.ablations.report import scoring
from kvferry.core.errors import ConfigError

Kind = Literal["name", "number", "date", "code", "negation", "near-duplicate", "paraphrase", "reason"]
"""What is asked for (name, number, date or time, code, reason), or what makes it hard.

"negation": what is not, or must not be; "near-duplicate": something much like it has another value; "paraphrase": the
question shares no word with the passage that matters.
"""
KINDS: tuple[str, ...] = get_args(Kind)
_Filled = Annotated[str, Meta(min_length=1)]


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question, see the module."""

    question: _Filled
    answers: Annotated[tuple[_Filled, ...], Meta(min_length=1)]
    quote: _Filled
    kind: Kind


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    document: _Filled
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Examined:
    """A document and what is asked about it. ``name`` is the name of its file without the suffix."""

    name: str
    text: str
    questions: tuple[Question, ...]

    def span(self, question: Question) -> tuple[int, int]:
        """Return where a question's passage stands: code points, end exclusive."""
        start = self.text.index(question.quote)
        return start, start + len(question.quote)


def load(folder: Path) -> tuple[Examined, ...]:
    """Read a set, document by document in the order of their names.

    Raises:
        ConfigError: when a file cannot be read, or naming the file and the key that is wrong, and its value.
    """
    found = tuple(_examined(path) for path in sorted(folder.glob("*.toml")))
    if not found:
        raise ConfigError(f"{folder}: there is no TOML file of questions in it", path=str(folder))
    return found


def bundled() -> tuple[Examined, ...]:
    """Read kvferry's own set."""
    return load(Path(str(files("kvferry.ablations").joinpath("grids", "questions"))))


def _examined(path: Path) -> Examined:
    file = toml_files.read(path, _File)
    toml_files.check_filled(file, ("questions",), path)
    beside = path.parent / file.document
    if beside.parent != path.parent:
        raise ConfigError(f"{path}: document = {file.document!r}: it lies beside {path.name}", path=str(path))
    text = toml_files.text(beside)
    seen: set[str] = set()
    for number, question in enumerate(file.questions):
        place = f"{path}: questions[{number}]"
        if question.question in seen:
            raise ConfigError(f"{place}.question = {question.question!r}: it is asked twice", place=place)
        seen.add(question.question)
        _check(question, file.document, text, place)
    return Examined(beside.stem, text, file.questions)


def _check(question: Question, document: str, text: str, place: str) -> None:
    count = text.count(question.quote)
    if count != 1:
        raise ConfigError(
            f"{place}.quote = {question.quote!r}: it is in {document} {count} times instead of once", place=place
        )
    for answer in question.answers:
        if not scoring.tokens(answer):
            raise ConfigError(f"{place}.answers = {answer!r}: it has no letter and no digit", place=place)
    if not any(scoring.contains(question.quote, answer) for answer in question.answers):
        raise ConfigError(
            f"{place}.answers = {list(question.answers)!r}: none is in the quote {question.quote!r}", place=place
        )
