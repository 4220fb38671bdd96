"""Grids: what a file expands to, what is refused, and what makes two cells the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.ablations.harness.provenance import Provenance
from kvferry.ablations.harness.runner import cell_id
from kvferry.ablations.harness.settings import Setting
from kvferry.ablations.methods import grid as grids
from kvferry.ablations.methods.grid import Cell, Document, Grid, ModelEntry
from kvferry.ablations.methods.planning import plan
from kvferry.core.digests import digest
from kvferry.core.errors import ConfigError
from kvferry.core.manifest import Model

MODEL = '[[models]]\nname = "m"\nprefix_tokens = 7\ncontinuation_tokens = 2\n'
DOCUMENT = '[[documents]]\nbundled = "ferry-line"\nquestion = "Why?"\n'
METHOD = '[[methods]]\nmethod = "B1"\n'
CHECKPOINT = Model("m", "", "llama", digest(b"weights"), digest(b"config"), None, None)
ORIGIN = Provenance("abc", "a processor", 2, "cpu", "Linux", {"kvferry": "1"})
CELL = Cell(ModelEntry("m", 7, 2), Document("d", "some text", "Why?"), Setting("B3", (("budget", 64), ("sinks", 4))))


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Grid]:
    """Return a function that writes a grid and loads it."""

    def write(*parts: str) -> Grid:
        path = tmp_path / "grid.toml"
        path.write_text("\n".join(parts), "utf-8")
        return grids.load(path)

    return write


def test_lists_stand_for_every_combination_in_the_order_of_the_file(load: Callable[..., Grid]) -> None:
    entry = '[[methods]]\nmethod = "B9"\nbudget = [64, 0.5]\nbits = [8, 4]\npooling = "max"\n'
    grid = load(MODEL, DOCUMENT, METHOD, entry)
    assert grid.settings == (
        Setting("B1"),
        Setting("B9", (("budget", 64), ("bits", 8), ("pooling", "max"))),
        Setting("B9", (("budget", 64), ("bits", 4), ("pooling", "max"))),
        Setting("B9", (("budget", 0.5), ("bits", 8), ("pooling", "max"))),
        Setting("B9", (("budget", 0.5), ("bits", 4), ("pooling", "max"))),
    )


def test_cells_go_document_by_document(load: Callable[..., Grid], tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("Own words, ünd more.", "utf-8")
    own = '[[documents]]\nfile = "own.txt"\nquestion = "What?"\n'
    grid = load(MODEL, DOCUMENT, own, METHOD, '[[methods]]\nmethod = "B0"\n')
    cells = grid.cells(grid.models[0])
    assert [(cell.document.name, cell.setting.method) for cell in cells] == [
        ("ferry-line", "B1"),
        ("ferry-line", "B0"),
        ("own", "B1"),
        ("own", "B0"),
    ]
    assert cells[2].document == Document("own", "Own words, ünd more.", "What?")
    assert cells[0].document.text.startswith("# Running a small ferry line\n")


def test_other_models_take_the_grids_counts(load: Callable[..., Grid]) -> None:
    second = MODEL.replace('"m"', '"n"').replace("7", "9")
    grid = load(MODEL, second, DOCUMENT, METHOD).with_models(["n", "elsewhere"])
    assert grid.models == (ModelEntry("n", 9, 2), ModelEntry("elsewhere", 7, 2))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((MODEL + "prefix = 3\n", DOCUMENT, METHOD), r"models\[0\]: .*`prefix`"),
        ((MODEL, DOCUMENT + 'text = "x"\n', METHOD), r"documents\[0\]: .*`text`"),
        (("surprise = 1\n" + MODEL, DOCUMENT, METHOD), r"`surprise`"),
        ((MODEL.replace("prefix_tokens = 7\n", ""), DOCUMENT, METHOD), r"models\[0\]: .*`prefix_tokens`"),
        ((MODEL.replace("7", "0"), DOCUMENT, METHOD), r"models\[0\]: .*>= 1.*prefix_tokens"),
        ((MODEL.replace("7", '"7"'), DOCUMENT, METHOD), r"models\[0\]: .*prefix_tokens"),
        ((MODEL.replace('"m"', '""'), DOCUMENT, METHOD), r"models\[0\]: .*name"),
        ((MODEL, METHOD), r"`documents`"),
        (("documents = []", MODEL, METHOD), r"documents: at least one"),
        ((MODEL, DOCUMENT.replace("ferry-line", "novel"), METHOD), r"'novel' is not one of ferry-line, station-manual"),
        ((MODEL, DOCUMENT.replace("ferry-line", "../methods"), METHOD), r"'../methods' is not one of"),
        ((MODEL, DOCUMENT + 'file = "a"\n', METHOD), r"documents\[0\]: exactly one of bundled and file"),
        ((MODEL, '[[documents]]\nquestion = "a"\n', METHOD), r"documents\[0\]: exactly one of bundled and file"),
        ((MODEL, '[[documents]]\nfile = "none.md"\nquestion = "a"\n', METHOD), r"none.md: No such file"),
        ((MODEL, DOCUMENT, "[[methods]]\nbudget = 3\n"), r"methods\[0\]: method = None"),
        ((MODEL, DOCUMENT, "[[methods]]\nmethod = 3\n"), r"methods\[0\]: method = 3"),
        ((MODEL, DOCUMENT, METHOD + "budget = []\n"), r"methods\[0\]: budget = \[\]"),
        ((MODEL, DOCUMENT, METHOD + "budget = [[1]]\n"), r"methods\[0\]: budget = \[\[1\]\]"),
        ((MODEL, DOCUMENT, METHOD + "budget = {a = 1}\n"), r"methods\[0\]: budget = "),
        ((MODEL, DOCUMENT, METHOD + "day = 2025-01-01\n"), r"methods\[0\]: day = "),
        ((MODEL, DOCUMENT, "[[methods]\n"), r"grid.toml: "),
    ],
)
def test_a_wrong_grid_is_refused_and_the_key_is_named(
    load: Callable[..., Grid], parts: tuple[str, ...], message: str
) -> None:
    if "documents = []" in parts:
        parts = tuple(part for part in parts if part != DOCUMENT)
    with pytest.raises(ConfigError, match=message):
        load(*parts)


def test_files_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"grid.toml: not UTF-8"):
        grids.load(path)
    with pytest.raises(ConfigError, match=r"none.toml: No such file"):
        grids.load(tmp_path / "none.toml")


class TestIdentity:
    def test_is_stable_and_does_not_know_the_order_of_parameters(self) -> None:
        turned = replace(CELL, setting=Setting("B3", (("sinks", 4), ("budget", 64))))
        renamed = replace(CELL, model=ModelEntry("elsewhere", 7, 2), document=replace(CELL.document, name="other"))
        assert len(cell_id(CELL, CHECKPOINT, ORIGIN)) == 64
        assert cell_id(CELL, CHECKPOINT, ORIGIN) == cell_id(turned, CHECKPOINT, ORIGIN)
        assert cell_id(CELL, CHECKPOINT, ORIGIN) == cell_id(renamed, CHECKPOINT, ORIGIN)

    def test_everything_that_shapes_figures_shapes_it(self) -> None:
        def setting(method: str, **parameters: Any) -> Cell:
            return replace(CELL, setting=Setting(method, tuple(parameters.items())))

        others = [
            cell_id(CELL, CHECKPOINT, ORIGIN),
            cell_id(setting("B4", budget=64, sinks=4), CHECKPOINT, ORIGIN),
            cell_id(setting("B3", budget=64), CHECKPOINT, ORIGIN),
            cell_id(setting("B3", budget=65, sinks=4), CHECKPOINT, ORIGIN),
            cell_id(setting("B3", budget="64", sinks=4), CHECKPOINT, ORIGIN),
            cell_id(replace(CELL, model=ModelEntry("m", 8, 2)), CHECKPOINT, ORIGIN),
            cell_id(replace(CELL, model=ModelEntry("m", 7, 3)), CHECKPOINT, ORIGIN),
            cell_id(replace(CELL, document=Document("d", "some texts", "Why?")), CHECKPOINT, ORIGIN),
            cell_id(replace(CELL, document=Document("d", "some text", "Who?")), CHECKPOINT, ORIGIN),
            cell_id(CELL, msgspec.structs.replace(CHECKPOINT, weights=digest(b"other")), ORIGIN),
            cell_id(CELL, CHECKPOINT, msgspec.structs.replace(ORIGIN, commit="abd")),
            cell_id(CELL, CHECKPOINT, msgspec.structs.replace(ORIGIN, versions={"kvferry": "2"})),
            cell_id(CELL, CHECKPOINT, msgspec.structs.replace(ORIGIN, processor="another")),
        ]
        assert len(set(others)) == len(others)


class TestOwnGrid:
    def test_asks_for_long_prefixes_of_both_models_and_two_documents(self) -> None:
        grid = grids.bundled("methods")
        counts = {model.name: (model.prefix_tokens, model.continuation_tokens) for model in grid.models}
        assert counts == {"smollm2-135m-instruct": (700, 200), "qwen2.5-coder-0.5b-instruct": (500, 150)}
        assert len({document.text for document in grid.documents}) == 2

    def test_runs_every_method_that_sends_a_cache(self) -> None:
        from kvferry.sender.registry import METHODS

        listed = {setting.method for setting in plan(grids.bundled("methods")).settings}
        assert listed == {method.info.id for method in METHODS if method.info.form == "kv"}

    def test_gives_parameters_that_the_methods_take(self) -> None:
        from kvferry.sender import registry

        for setting in plan(grids.bundled("methods")).settings:
            registry.check_parameters(registry.find(setting.method), dict(setting.parameters))

    def test_gives_every_method_with_a_budget_three(self) -> None:
        from kvferry.sender.registry import METHODS

        settings = plan(grids.bundled("methods")).settings
        caches = [method for method in METHODS if method.info.form == "kv"]
        budgeted = [method for method in caches if "budget" in method.parameters.__struct_fields__]
        assert budgeted
        for method in budgeted:
            given = {dict(setting.parameters).get("budget") for setting in settings if setting.method == method.info.id}
            assert given >= {64, 128, 256}
