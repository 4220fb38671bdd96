"""The public surface: what it offers, what it needs, and what it keeps to itself."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

import kvferry.client
from kvferry.client import AsyncClient, AsyncSendReport, Client, SendReport
from kvferry.core import errors


def test_all_is_sorted_and_whole() -> None:
    public = [
        name for name, value in vars(kvferry.client).items() if not name.startswith("_") and not inspect.ismodule(value)
    ]
    assert kvferry.client.__all__ == sorted(public)


def test_every_error_can_be_imported_from_the_client() -> None:
    for kind in errors.error_classes().values():
        assert getattr(kvferry.client, kind.__name__) is kind


def test_both_clients_offer_the_same() -> None:
    def surface(kind: type) -> dict[str, list[tuple[str, Any]]]:
        return {
            name: [(parameter.name, parameter.default) for parameter in inspect.signature(value).parameters.values()]
            for name, value in inspect.getmembers(kind, callable)
            if name == "__init__" or not name.startswith("_")
        }

    assert surface(Client) == surface(AsyncClient)
    assert surface(SendReport).keys() == surface(AsyncSendReport).keys()


def test_constructors_take_keywords_only() -> None:
    for kind in (Client, AsyncClient):
        assert all(
            parameter.kind is inspect.Parameter.KEYWORD_ONLY
            for parameter in inspect.signature(kind).parameters.values()
        )


def mentioned(annotation: Any) -> set[str]:
    """Return the modules of all types in an annotation."""
    found = {getattr(annotation, "__module__", "")}
    for part in typing.get_args(annotation):
        found |= mentioned(part) if not isinstance(part, list) else set().union(*map(mentioned, part))
    return found


@pytest.mark.parametrize("name", kvferry.client.__all__)
def test_no_protobuf_type_is_in_a_public_signature(name: str) -> None:
    public = getattr(kvferry.client, name)
    members = (
        [public, *(value for key, value in vars(public).items() if not key.startswith("_"))]
        if isinstance(public, type)
        else []
    )
    for member in [item.fget if isinstance(item, property) else item for item in members]:
        if isinstance(member, type) or inspect.isfunction(member):
            for annotation in typing.get_type_hints(member).values():
                assert not any(module.startswith(("google", "kvferry.proto")) for module in mentioned(annotation))


def test_importing_the_client_imports_no_model_code() -> None:
    code = (
        "import sys, kvferry.client\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'numpy', 'kvferry.engine', 'kvferry.sender', 'kvferry.receiver'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(root / ".dev")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
