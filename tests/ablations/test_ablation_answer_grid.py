"""Which answers a grid asks for, and what makes two of them the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvferry.ablations.answers import grid as grids
from kvferry.ablations.answers.grid import AnswerCell, AnswerGrid
from kvferry.ablations.answers.questions import Examined, Question
from kvferry.ablations.harness.provenance import Provenance
from kvferry.ablations.harness.runner import cell_id
from kvferry.ablations.harness.settings import Setting, checked
from kvferry.core.errors import ConfigError, InvalidRequestError

MODEL = '[[models]]\nname = "m"\n'
METHODS = '[[methods]]\nmethod = "A0"\n[[methods]]\nmethod = "A3"\nbudget = [0.25, 64]\n'
WHO, WHAT = (Question(f"{word}?", ("Ada",), "Ada", "name") for word in ("Who", "What"))
FIRST, SECOND = Examined("one", "Ada.", (WHO, WHAT)), Examined("two", "It is Ada.", (WHO,))
ORIGIN = Provenance("abc", "a processor", 2, "cpu", "Linux", {"kvferry": "1"})
CELL = AnswerCell("m", FIRST, Setting("A3", (("budget", 64),)), WHO, 48)


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], AnswerGrid]:
    def write(content: str) -> AnswerGrid:
        (tmp_path / "grid.toml").write_text(content, "utf-8")
        return grids.load(tmp_path / "grid.toml")

    return write


def test_cells_go_document_by_document_and_setting_by_setting(load: Callable[..., AnswerGrid]) -> None:
    grid = load("max_tokens = 9\n" + MODEL + METHODS)
    assert grid == AnswerGrid(
        ("m",), (Setting("A0"), Setting("A3", (("budget", 0.25),)), Setting("A3", (("budget", 64),))), 9
    )
    cells = grid.cells("n", (FIRST, SECOND))
    assert [(cell.document.name, cell.setting.words, cell.question.question) for cell in cells] == [
        (document.name, setting.words, question.question)
        for document in (FIRST, SECOND)
        for setting in grid.settings
        for question in document.questions
    ]
    assert {(cell.model, cell.max_tokens) for cell in cells} == {("n", 9)}
    assert cells[1].describe() == "n, one: A0, question 2 of 2"
    assert load(MODEL + METHODS).max_tokens == 48


def test_other_methods_take_the_grids_settings_or_their_defaults(load: Callable[..., AnswerGrid]) -> None:
    grid = load(MODEL + METHODS)
    assert grid.with_methods(["a3", "B1", "B1"]).settings == (*grid.settings[1:], Setting("B1"))
    assert grid.with_methods(["extractive"]).settings == grid.settings[1:]
    assert grid.with_models(["x", "y"]).models == ("x", "y")


def test_documents_are_chosen_by_name() -> None:
    assert grids.choose((FIRST, SECOND), ()) == (FIRST, SECOND)
    assert grids.choose((FIRST, SECOND), ("two", "two")) == (SECOND,)
    with pytest.raises(InvalidRequestError, match=r"^document: 'three' is not one of one, two$"):
        grids.choose((FIRST, SECOND), ("two", "three"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (MODEL + "prefix_tokens = 3\n" + METHODS, r"`prefix_tokens`.*models\[0\]"),
        (MODEL, r"`methods`"),
        ("models = []\n" + METHODS, r"models: at least one is needed"),
        ("max_tokens = 0\n" + MODEL + METHODS, r">= 1.*max_tokens"),
        (MODEL + "[[methods]]\nbudget = 3\n", r"methods\[0\]: method = None"),
        (MODEL + METHODS + "sinks = []\n", r"methods\[1\]: sinks = \[\]"),
    ],
)
def test_a_wrong_grid_is_refused_and_the_key_is_named(
    load: Callable[..., AnswerGrid], content: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(content)


def test_everything_that_shapes_an_answer_shapes_its_cell() -> None:
    others = [
        cell_id(CELL, ["weights"], ORIGIN),
        cell_id(CELL, ["others"], ORIGIN),
        cell_id(CELL, ["weights"], msgspec.structs.replace(ORIGIN, commit="abd")),
        cell_id(replace(CELL, question=WHAT), ["weights"], ORIGIN),
        cell_id(replace(CELL, document=replace(FIRST, text="Ada!")), ["weights"], ORIGIN),
        cell_id(replace(CELL, setting=Setting("A3", (("budget", 65),))), ["weights"], ORIGIN),
        cell_id(replace(CELL, max_tokens=47), ["weights"], ORIGIN),
    ]
    assert len(set(others)) == len(others)
    renamed = replace(CELL, model="elsewhere", document=replace(FIRST, name="other"))
    assert cell_id(renamed, ["weights"], ORIGIN) == others[0]


def test_how_an_answer_is_judged_does_not_shape_it() -> None:
    """So that a better list of accepted answers needs no new run."""
    judged = msgspec.structs.replace(WHO, answers=("Ida",), kind="code", quote="Ada")
    assert cell_id(replace(CELL, question=judged), ["w"], ORIGIN) == cell_id(CELL, ["w"], ORIGIN)


def test_a_sample_has_other_questions_of_every_document() -> None:
    """Questions are written kind by kind: the first of every document are of few kinds."""
    documents = tuple(
        Examined(str(name), "", tuple(msgspec.structs.replace(WHO, question=f"{at}?") for at in range(4)))
        for name in range(5)
    )

    def taken(sample: int | None, *names: str) -> list[list[str]]:
        chosen = grids.choose(documents, names, sample)
        return [[asked.question for asked in document.questions] for document in chosen]

    assert taken(1) == [["0?"], ["1?"], ["2?"], ["3?"], ["0?"]]
    assert taken(2) == [["0?", "1?"], ["1?", "2?"], ["2?", "3?"], ["3?", "0?"], ["0?", "1?"]]
    assert taken(2, "3") == [["3?", "0?"]]
    assert [len(asked) for asked in taken(9)] == [4] * 5
    assert taken(None, "1") == [["0?", "1?", "2?", "3?"]]


class TestOwnGrid:
    def test_gives_methods_of_the_registry_and_parameters_that_they_take(self) -> None:
        grid = grids.bundled()
        for setting in grid.settings:
            checked(setting)
        assert len(set(grid.settings)) == len(grid.settings)

    def test_has_the_floor_the_ceiling_and_a_blind_twin_for_every_aware_setting(self) -> None:
        settings = grids.bundled().settings
        assert {"A0", "A1"} <= {setting.method for setting in settings}
        aware = [setting for setting in settings if setting.method.endswith("-aware")]
        assert aware
        for setting in aware:
            assert replace(setting, method=setting.method.removesuffix("-aware")) in settings

    def test_asks_small_models_for_short_answers(self) -> None:
        grid = grids.bundled()
        assert grid.models == ("smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct")
        assert grid.max_tokens == 32
