"""Notes of what earlier requests made: they go with the artifacts that they tell of."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.progress import finish
from kvferry.core.store import ArtifactStore
from kvferry.engine.backend import runtime_versions
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import DEFAULT_SYSTEM
from kvferry.engine.residency import Residency
from kvferry.sender import registry
from kvferry.sender.artifacts import ArtifactMaker
from kvferry.sender.reading import Reading

DOCUMENT = "The access code of the north warehouse is 4417. Tür und Tor, 門, 🚢. " * 8
METHOD = registry.find("A1")
PARAMETERS = registry.check_parameters(METHOD, {})


@pytest.fixture
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model()


@pytest.fixture
def shop(workshop: Callable[..., Any], model: LoadedModel) -> Any:
    return workshop(model)


def notes(store: ArtifactStore) -> list[bytes]:
    return [path.read_bytes() for path in sorted((store.root / "made").iterdir())]


def test_notes_of_artifacts_that_are_gone_go_too(shop: Any, model: LoadedModel) -> None:
    texts = [f"{number}. {DOCUMENT}" for number in range(4)]
    gone, aside, damaged, kept = (shop.make("A1", text).stored for text in texts)
    (damaged_note,) = (
        path for path in (shop.store.root / "made").iterdir() if damaged.artifact_id.hex() in path.read_text()
    )
    damaged_note.write_bytes(b"{")
    shop.store.drop(gone.artifact_id)
    shop.store.quarantine(aside.artifact_id, "tested")
    # Found when it is asked for,
    reading = shop.reading(texts[0])
    assert shop.maker.find(METHOD, reading, PARAMETERS) is None
    assert len(notes(shop.store)) == 3
    # and by the next process.
    maker = ArtifactMaker(model, shop.store, 1024, runtime_versions())
    assert [kept.artifact_id.hex().encode() in note for note in notes(shop.store)] == [True]
    assert maker.find(METHOD, shop.reading(texts[3]), PARAMETERS).reused


def test_any_number_of_requests_leaves_a_store_within_its_budget(tmp_path: Path, model: LoadedModel) -> None:
    budget = 20_000
    with contextlib.closing(ArtifactStore(tmp_path / "small", budget=budget)) as store:
        maker = ArtifactMaker(model, store, 1024, runtime_versions())
        for number in range(60):
            reading = Reading(model, Residency(0), f"{number}. {DOCUMENT}", DEFAULT_SYSTEM, None)
            made = finish(maker.make(METHOD, reading, PARAMETERS))
            assert store.holds(made.stored.artifact_id)
        counted = [path for path in store.root.rglob("*") if path.suffix in (".msgpack", ".safetensors")]
        counted += (store.root / "made").iterdir()
        assert sum(path.stat().st_size for path in counted) <= budget
        there = {artifact_id.hex() for artifact_id in store.ids()}
        assert 1 < len(there) < 60
        # A note goes with what it tells of, give or take the oldest.
        told = {json.loads(note)["artifact"] for note in notes(store)}
        assert len(told - there) <= 1
        assert len(there - told) <= 1
