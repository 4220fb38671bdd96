"""``kvferry methods``: the registry, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Callable

from click.testing import Result

Run = Callable[..., Result]


def test_json_lists_every_method(kvferry: Run) -> None:
    from kvferry.sender.registry import METHODS

    (line,) = kvferry("methods", "--json").stdout.splitlines()
    methods = json.loads(line)["methods"]
    assert [method["id"] for method in methods] == [method.info.id for method in METHODS]
    for method in methods:
        assert set(method) == {"id", "name", "form", "label", "aware", "source", "summary"}
        assert method["form"] in {"text", "evidence", "references", "kv"}
        assert method["label"] in {"official", "faithful", "adapted", "inspired", "custom"}


def test_people_get_a_table(kvferry: Run) -> None:
    from kvferry.sender.registry import METHODS

    head, *rows = kvferry("methods").stdout.splitlines()
    assert head.split() == ["ID", "NAME", "FORM", "LABEL", "QUESTION", "SUMMARY", "SOURCE"]
    assert [row.split()[0] for row in rows] == [method.info.id for method in METHODS]
    for row, method in zip(rows, METHODS, strict=True):
        assert method.info.summary in row
        assert row.endswith(method.info.source)
