"""Where calibrations lie: found by name or by the model, written whole, and nothing outside the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from kvferry.core.errors import ContainerError, InvalidRequestError, NotFoundError, StoreError
from kvferry.sender.calibration import folder
from kvferry.sender.calibration.binding import Binding
from kvferry.sender.calibration.qfilters_file import QFilters, Record

MODEL = Binding("tiny", "", "1" * 64, "2" * 64, "", "3" * 64, "4" * 64, 1, 2, 4)
OTHER = msgspec.structs.replace(MODEL, id="big", weights="9" * 64)


def filters(model: Binding = MODEL, estimator: Any = "majority", value: float = 1.0) -> QFilters:
    record = Record(1, model, "negative", estimator, "faithful", 1, 1, 1, 0, 0, "0" * 64)
    return QFilters(record, np.full((1, 2, 4), value, dtype=np.float32))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "calibrations" / "qfilters"


def test_found_by_name_and_by_model(home: Path) -> None:
    path = folder.save("tiny-majority", filters())
    folder.save("big-majority", filters(OTHER, value=2.0))
    assert path == home / "tiny-majority.safetensors"
    assert [item.name for item in home.iterdir() if item.name.startswith(".")] == []
    assert folder.find("", MODEL).digest == folder.find("tiny-majority", MODEL).digest == filters().digest
    assert folder.find("", OTHER).filters[0, 0, 0] == 2.0


def test_without_one_the_error_says_how_to_make_one(home: Path) -> None:
    for name in ("", "mine"):
        with pytest.raises(NotFoundError, match="kvferry calibrate qfilters --model MODEL --text FILE") as caught:
            folder.find(name, MODEL)
        assert str(home) in caught.value.message


def test_another_model_s_is_no_match_and_is_named() -> None:
    folder.save("big-majority", filters(OTHER))
    with pytest.raises(NotFoundError, match=r"none in .* the model tiny \(big-majority: weights 9{12}….*1{12}…"):
        folder.find("", MODEL)
    with pytest.raises(InvalidRequestError, match=r"^calibration 'big-majority': weights 9{12}… of big.* 1{12}…"):
        folder.find("big-majority", MODEL)


def test_of_two_one_must_be_named() -> None:
    folder.save("a", filters())
    folder.save("b", filters(estimator="sum"))
    with pytest.raises(InvalidRequestError, match="2 are bound to the model tiny: a, b; name one"):
        folder.find("", MODEL)
    assert folder.find("b", MODEL).record.estimator == "sum"


def test_a_damaged_file_stops_only_who_names_it(home: Path) -> None:
    folder.save("good", filters())
    (home / "bad.safetensors").write_bytes(b"bad")
    (home / "hub.safetensors").write_bytes(save({"q_filters": filters().filters}))
    assert folder.find("", MODEL).digest == filters().digest
    with pytest.raises(ContainerError, match=r"^bad\.safetensors: no safetensors file"):
        folder.find("bad", MODEL)
    with pytest.raises(InvalidRequestError, match=r"^hub\.safetensors: q_filters, bound to no model"):
        folder.find("hub", MODEL)
    (home / "good.safetensors").unlink()
    with pytest.raises(NotFoundError, match=r"bad\.safetensors: no .*hub\.safetensors: q_filters, bound"):
        folder.find("", MODEL)


@pytest.mark.parametrize(
    "name", ["../secret", "..", "a/b", "/etc/passwd", ".hidden", "a\x00b", "A", "a b", "-a", "a" * 97, "a\n"]
)
def test_names_never_become_paths(home: Path, name: str) -> None:
    folder.save("good", filters())
    (home.parent / "secret.safetensors").write_bytes((home / "good.safetensors").read_bytes())
    with pytest.raises(InvalidRequestError, match="^calibration: .* is no name"):
        folder.find(name, MODEL)
    with pytest.raises(InvalidRequestError, match="is no name"):
        folder.save(name, filters())
    with pytest.raises(InvalidRequestError, match="is no name"):
        folder.check_free(name, overwrite=True)
    assert sorted(item.name for item in home.parent.rglob("*")) == [
        "good.safetensors",
        "qfilters",
        "secret.safetensors",
    ]


def test_a_taken_name_is_kept_unless_told() -> None:
    folder.save("a", filters())
    folder.check_free("b", overwrite=False)
    folder.check_free("a", overwrite=True)
    with pytest.raises(InvalidRequestError, match="'a' is there already"):
        folder.check_free("a", overwrite=False)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("SmolLM2-135M", "smollm2-135m-sum"),
        ("owner/Model v1.5", "owner-model-v1.5-sum"),
        ("門", "model-sum"),
        ("../..", "model-sum"),
        ("x" * 300, "x" * 80 + "-sum"),
    ],
)
def test_default_names_are_names(model: str, name: str) -> None:
    assert folder.default_name(model, "sum") == name
    folder.check_name(name)


def test_a_folder_that_cannot_be_made_is_our_error(home: Path) -> None:
    home.parent.mkdir(parents=True)
    home.write_text("in the way")
    with pytest.raises(StoreError, match="File exists|Not a directory"):
        folder.save("a", filters())
