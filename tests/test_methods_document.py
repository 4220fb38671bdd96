"""docs/methods.md keeps its word: every method of the registry, its label, its parameters with defaults and ranges."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import pytest
from msgspec import inspect

from kvferry.core import bm25
from kvferry.engine import prompt
from kvferry.receiver import lookups
from kvferry.sender import registry
from kvferry.sender.kv import capabilities, probes
from kvferry.sender.kv.parameters import PackingParameters, SelectionParameters, WidthParameters
from kvferry.sender.kv.window_scores import WindowScoreParameters
from kvferry.sender.method import Method, NoParameters
from kvferry.sender.text.counted import BudgetParameters

TEXT = (Path(__file__).parents[1] / "docs" / "methods.md").read_text("utf-8")
SECTIONS: dict[str, str] = dict(re.findall(r"^### (.+)\n((?:(?!^##).*(?:\n|\Z))*)", TEXT, re.MULTILINE))
HEADING = re.compile(r"(?P<id>\S+?)(?: (?P<name>\S+))?: (?P<label>\w+)")
LABELS = ["official", "faithful", "adapted", "inspired", "custom"]
COSTS = ("no pass", "window pass", "second reading", "the selector's")
# Sections on parameters that many methods have: the Struct that they tell of, and the one that it adds to.
SHARED: dict[str, tuple[type[msgspec.Struct], type[msgspec.Struct]]] = {
    "Budget": (SelectionParameters, PackingParameters),
    "Packing": (PackingParameters, NoParameters),
    "Window scores": (WindowScoreParameters, SelectionParameters),
    "Text": (BudgetParameters, NoParameters),
}

each_method = pytest.mark.parametrize("method", registry.METHODS, ids=lambda method: method.info.id)


class Row(NamedTuple):
    """A line of a table of parameters."""

    default: str
    values: str


def of_methods() -> Iterator[tuple[dict[str, str], str]]:
    """Yield the parts of every heading that names a method, with the text below it."""
    for heading, body in SECTIONS.items():
        match = HEADING.fullmatch(heading)
        if match:
            yield match.groupdict(), body


def section(method: Method[Any]) -> str:
    """Return the text of a method's section."""
    (body,) = [body for parts, body in of_methods() if parts["id"] == method.info.id]
    return body


def tables(body: str) -> Iterator[list[list[str]]]:
    """Yield a section's tables: the cells of the head, and of every line below it."""
    for lines in re.findall(r"(?:^\|.*\n)+", body, re.MULTILINE):
        head, _, *below = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()]
        yield [head, *below]


def parameters(body: str) -> dict[str, Row]:
    """Return what a section's tables say of every parameter; a line may name several."""
    found: dict[str, Row] = {}
    for head, *below in tables(body):
        if head[0] != "parameter":
            continue
        for named, default, values, meaning in below:
            assert meaning
            for name in re.findall(r"`(\w+)`", named):
                assert name not in found
                found[name] = Row(default, values)
    return found


def applies(heading: str, method: Method[Any]) -> bool:
    """Whether a method has parameters of a shared section. Of those for packing, some methods take a few only."""
    kind = WidthParameters if heading == "Packing" else SHARED[heading][0]
    return issubclass(method.parameters, kind)


def written(value: object) -> str:
    """Return a default, or a limit, as the document writes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{value}`" if value else '`""`'
    return f"{value:g}" if isinstance(value, float) else str(value)


def limits(kind: inspect.Type) -> set[str]:
    """Return every number and word that the values of a parameter are bounded by, or taken from."""
    if isinstance(kind, inspect.Metadata):
        return limits(kind.type)
    if isinstance(kind, inspect.UnionType):
        return set().union(*(limits(part) for part in kind.types))
    if isinstance(kind, inspect.LiteralType):
        return {str(value) for value in kind.values}
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return {written(bound) for bound in (kind.ge, kind.gt, kind.le, kind.lt) if bound is not None}
    return set()


def test_the_sections_are_the_methods_of_the_registry_with_their_labels() -> None:
    found = [parts for parts, _ in of_methods()]
    # The name is left out where it is the id.
    named = {parts["id"]: (parts["name"] or parts["id"], parts["label"]) for parts in found}
    assert len(named) == len(found)
    assert named == {info.id: (info.name, info.label) for info in (method.info for method in registry.METHODS)}


def test_no_other_section_looks_like_a_methods() -> None:
    (table,) = tables(SECTIONS["Labels"])
    assert [row[0] for row in table[1:]] == LABELS
    others = [heading for heading in SECTIONS if not HEADING.fullmatch(heading)]
    assert not [heading for heading in others if ":" in heading or any(label in heading for label in LABELS)]
    assert set(SHARED) <= set(others)


@each_method
def test_parameters_defaults_and_ranges(method: Method[Any]) -> None:
    own = parameters(section(method))
    shared = [parameters(SECTIONS[heading]) for heading in SHARED if applies(heading, method)]
    fields = {field.name: field for field in msgspec.structs.fields(method.parameters)}
    assert set(own) <= set(fields)
    for name, field in fields.items():
        # What a method has for itself, or with another default than others, stands in its own section.
        (row,) = [own[name]] if name in own else [table[name] for table in shared if name in table]
        assert row.default == written(field.default), name
        words, others = re.findall(r"`([^`]+)`", row.values), re.sub(r"`[^`]+`", "", row.values)
        said = {*words, *re.findall(r"-?\d+(?:\.\d+)?", others)}
        assert said == limits(inspect.type_info(field.type)), name


@pytest.mark.parametrize("heading", SHARED)
def test_a_shared_section_tells_of_what_its_struct_adds(heading: str) -> None:
    ours, others = ({field.name for field in msgspec.structs.fields(kind)} for kind in SHARED[heading])
    assert set(parameters(SECTIONS[heading])) == ours - others
    assert sum(applies(heading, method) for method in registry.METHODS) > 1


@each_method
def test_source_difference_and_cost(method: Method[Any]) -> None:
    body, info = " ".join(section(method).split()), method.info
    assert "Source: " in body
    for part in re.findall(r"\d{4}\.\d{5}|[\w-]+/[\w-]+|\w+\.py|RFC \d+", info.source):
        assert part in body
    # A label that says that something was changed needs what.
    assert "Differs" in body or info.label not in {"adapted", "inspired"}
    costs = re.findall(r"\bCost: ([^.]+)\.", body)
    assert len(costs) == (info.form == "kv")
    assert all(cost.startswith(COSTS) for cost in costs)


def test_the_table_of_what_goes_together() -> None:
    (((_, *quantisers), *table),) = tables(SECTIONS["What goes together"])
    said = {(row[0], quantiser): cell for row in table for quantiser, cell in zip(quantisers, row[1:], strict=True)}
    pairs = itertools.product(get_args(capabilities.Selection), get_args(capabilities.Quantiser))
    assert said == {pair: _word(*pair) for pair in pairs}


def _word(selection: capabilities.Selection, quantiser: capabilities.Quantiser) -> str:
    if (selection, quantiser) in capabilities.REFUSED:
        return "refused"
    return "any model" if (selection, quantiser) in capabilities.MLX_LM_ATTENDS else "own"


def test_the_instruction_is_the_one_that_runs() -> None:
    quoted = " ".join(SECTIONS["Window scores"].split())
    assert f"\n\n{prompt.LOOKING_INSTRUCTION.strip()}" == prompt.LOOKING_INSTRUCTION
    assert f"of {prompt.LOOKING_INSTRUCTION.strip()} with two line breaks before it." in quoted
    assert f"the first {probes.INSTRUCTION_TOKENS} tokens" in quoted


def test_fixed_numbers_are_those_of_the_code() -> None:
    ((_, *rows),) = tables(SECTIONS["Fixed numbers"])
    said = {}
    for number, constant, _ in rows:
        file, name = re.fullmatch(r"`(.+)\.py` `(\w+)`", constant).groups()  # type: ignore[union-attr]
        said[file, name] = (float(number), getattr(importlib.import_module(f"kvferry.{file.replace('/', '.')}"), name))
    assert len(said) == len(rows) > 10
    assert all(number == value for number, value in said.values()), said


def test_fixed_numbers_of_look_ups_are_also_those_of_the_wire() -> None:
    wire = (Path(__file__).parents[1] / "docs" / "wire.md").read_text("utf-8")
    choosing = " ".join(wire.split("A receiver chooses so:")[1].split("A receiver MUST refuse an answer")[0].split())
    assert f"k1 = {bm25.K1}, b = {bm25.B})" in choosing
    assert lookups.MAX_LOOKUPS == 6
    assert "The best six are followed" in choosing
    assert f"{lookups.BEFORE} code points before its place to {lookups.AFTER} behind it" in choosing
    assert f"at most {lookups.MAX_WINDOW} long" in choosing
    assert f"`max_bytes` is {lookups.MAX_BYTES:,}." in choosing


def test_methods_that_are_mentioned_are_there() -> None:
    mentioned = set(re.findall(r"\b[A-E]\d+(?:-\w+)?\b", TEXT))
    assert {"A1", "B5-aware", "B9"} <= mentioned
    assert mentioned <= {method.info.id for method in registry.METHODS}


def test_links_within_the_document_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.+)", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    used = set(re.findall(r"\]\(#([^)]+)\)", TEXT))
    assert used
    assert used <= anchors
