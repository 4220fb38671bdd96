"""Question sets: what is refused, and that kvferry's own is what it says it is."""

from __future__ import annotations

import tomllib
import unicodedata
from collections import Counter
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import regex

from kvferry.ablations.answers import questions
from kvferry.ablations.answers.questions import KINDS, Examined, Question
from kvferry.ablations.report.scoring import contains
from kvferry.core.errors import ConfigError

TEXT = "Pier 3 is shut. Pier 5 is open. Pier 5 is wide.\r\nThe key hangs in the hut."
QUESTION = 'question = "Which pier is shut?"\nanswers = ["pier 3", "3"]\nquote = "Pier 3 is shut"\nkind = "negation"\n'
ENTRY = f"[[questions]]\n{QUESTION}"
HEAD = 'document = "pier.txt"\n'
OWN = Path(str(files("kvferry.ablations").joinpath("grids", "questions")))
Entry = tuple[str, str, dict[str, Any]]
UNSPACED = ("chinese", "japanese")


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], tuple[Examined, ...]]:
    """Return a function that writes questions beside a document and loads the set."""

    def write(content: str) -> tuple[Examined, ...]:
        (tmp_path / "pier.txt").write_bytes(TEXT.encode())
        (tmp_path / "pier.toml").write_text(content, "utf-8")
        return questions.load(tmp_path)

    return write


@pytest.fixture(scope="module")
def own() -> tuple[Examined, ...]:
    return questions.bundled()


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    """Name, text and question of everything in kvferry's own set."""
    found = []
    for path in sorted(OWN.glob("*.toml")):
        file = tomllib.loads(path.read_text("utf-8"))
        text = (OWN / file["document"]).read_bytes().decode("utf-8")
        found += [(path.stem, text, entry) for entry in file["questions"]]
    return found


def test_a_set_is_read_as_it_is_written(load: Callable[..., tuple[Examined, ...]], tmp_path: Path) -> None:
    (tmp_path / "another.toml").write_text(HEAD + ENTRY, "utf-8")
    second = '[[questions]]\nquestion = "Where is the key?"\nanswers = ["hut"]\nquote = "in the hut"\nkind = "name"\n'
    another, found = load(HEAD + ENTRY + second)
    assert (another.name, found.name, found.text) == ("pier", "pier", TEXT)
    assert found.questions == (
        Question("Which pier is shut?", ("pier 3", "3"), "Pier 3 is shut", "negation"),
        Question("Where is the key?", ("hut",), "in the hut", "name"),
    )
    start, end = found.span(found.questions[1])
    assert TEXT[start:end] == "in the hut"
    assert start == len("Pier 3 is shut. Pier 5 is open. Pier 5 is wide.\r\nThe key hangs ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            HEAD + ENTRY.replace("Pier 3 is shut", "Pier 5 is"),
            r"questions\[0\].quote = 'Pier 5 is': .*pier.txt 2 times",
        ),
        (HEAD + ENTRY.replace("Pier 3 is shut", "Pier 4"), r"questions\[0\].quote = 'Pier 4': .*pier.txt 0 times"),
        (
            HEAD + ENTRY.replace('"pier 3", "3"', '"pier 5", "hut"'),
            r"questions\[0\].answers = \['pier 5', 'hut'\]: none is in the quote 'Pier 3 is shut'",
        ),
        (HEAD + ENTRY.replace('"3"', '"…"'), r"questions\[0\].answers = '…': it has no letter and no digit"),
        (HEAD + ENTRY + ENTRY, r"questions\[1\].question = 'Which pier is shut\?': it is asked twice"),
        (HEAD + ENTRY + "answer = 3\n", r"`answer`.*questions\[0\]"),
        (HEAD + ENTRY.replace('"negation"', '"riddle"'), r"'riddle'.*kind"),
        (HEAD + ENTRY.replace('["pier 3", "3"]', "[]"), r"length >= 1.*answers"),
        (HEAD + ENTRY.replace('"Which pier is shut?"', '""'), r"length >= 1.*question"),
        (HEAD + ENTRY.replace("kind", "sort"), r"`(kind|sort)`"),
        (HEAD, r"`questions`"),
        (HEAD + "questions = []\n", r"questions: at least one is needed"),
        (ENTRY, r"`document`"),
        (HEAD.replace("pier.txt", "../pier.txt") + ENTRY, r"document = '../pier.txt': it lies beside pier.toml"),
        (HEAD.replace("pier.txt", "none.txt") + ENTRY, r"none.txt: No such file"),
        (HEAD + "[[questions]\n", r"pier.toml: "),
    ],
)
def test_a_wrong_set_is_refused_and_the_place_is_named(
    load: Callable[..., tuple[Examined, ...]], content: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(content)


def test_a_folder_without_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no TOML file of questions in it"):
        questions.load(tmp_path)


class TestOwnSet:
    """Read with a TOML parser and nothing of ours, where that can be."""

    def test_every_quote_is_in_its_document_once_and_holds_an_answer(self, entries: list[Entry]) -> None:
        assert len(entries) >= 60
        for name, text, entry in entries:
            assert text.count(entry["quote"]) == 1, (name, entry["quote"])
            assert any(contains(entry["quote"], answer) for answer in entry["answers"]), (name, entry["question"])

    def test_nothing_is_asked_about_development_data(self, own: tuple[Examined, ...]) -> None:
        known = [
            (OWN.parent / "documents" / name).read_text("utf-8") for name in ("ferry-line.md", "station-manual.md")
        ]
        assert not {document.text for document in own} & set(known)

    def test_documents_are_of_many_kinds_and_neither_short_nor_long(self, own: tuple[Examined, ...]) -> None:
        names = {document.name for document in own}
        assert names >= {"contract", "service", "chapter", "table", "code", "chinese", "japanese", "arabic", "emoji"}
        assert len(names) == len(own) >= 10
        for document in own:
            words = len(document.text) / 1.6 if document.name in UNSPACED else len(document.text.split())
            assert 240 <= words <= 700, document.name
            assert 5 <= len(document.questions) <= 8, document.name

    def test_every_kind_is_asked_several_times_and_of_several_documents(self, own: tuple[Examined, ...]) -> None:
        counted = Counter(question.kind for document in own for question in document.questions)
        spread = {
            kind: {doc.name for doc in own for question in doc.questions if question.kind == kind} for kind in KINDS
        }
        assert set(counted) == set(KINDS)
        assert min(counted.values()) >= 5
        assert min(map(len, spread.values())) >= 5

    def test_there_are_no_control_characters(self, entries: list[Entry]) -> None:
        for name, text, entry in entries:
            strings = (text, entry["question"], entry["quote"], *entry["answers"])
            odd = {
                char for string in strings for char in string if unicodedata.category(char) in ("Cc", "Co", "Cs", "Cn")
            }
            assert odd <= {"\n"}, (name, odd)

    def test_questions_are_in_the_language_of_their_document(self, own: tuple[Examined, ...]) -> None:
        scripts = {"chinese": r"\p{Han}", "japanese": r"[\p{Hiragana}\p{Han}]", "arabic": r"\p{Arabic}"}
        for document in own:
            letters = regex.compile(scripts.get(document.name, r"\p{Latin}"))
            for question in document.questions:
                share = len(letters.findall(question.question)) / len(regex.findall(r"\p{L}", question.question))
                assert share > 0.6, question.question

    def test_a_paraphrase_shares_no_word_with_its_passage(self, own: tuple[Examined, ...]) -> None:
        for document in own:
            for question in document.questions:
                if question.kind == "paraphrase":
                    asked, told = (
                        set(regex.findall(r"\p{L}{4,}", text.lower())) for text in (question.question, question.quote)
                    )
                    assert not asked & told, question.question
                    assert not any(contains(question.question, answer) for answer in question.answers)

    def test_an_answer_is_not_given_away_by_its_question(self, own: tuple[Examined, ...]) -> None:
        for document in own:
            for question in document.questions:
                assert not any(contains(question.question, answer) for answer in question.answers), question.question
                assert max(map(len, question.answers)) < 60
