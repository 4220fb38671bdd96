"""``kvferry calibrate``: from texts to a named calibration, and what it says about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from safetensors.numpy import save

from kvferry.sender.calibration import folder, qfilters_file

Run = Callable[..., Result]
SENTENCE = "The ferry carries eleven crates of paper at dawn, and returns when the tide allows it. "


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def calibrate(home: Path, tmp_path: Path, kvferry: Run, tiny_model_dir: Callable[..., Path]) -> Run:
    """Return a function that calibrates a tiny model, on two texts unless it is told otherwise."""
    texts = [tmp_path / "a.md", tmp_path / "b.md"]
    for number, path in enumerate(texts, 1):
        path.write_text(SENTENCE * 6 * number, "utf-8")
    model = str(tiny_model_dir("llama"))

    def run(*words: str, sources: tuple[str, ...] = ("--text", str(texts[0]), str(texts[1]))) -> Result:
        return kvferry("calibrate", "qfilters", "--model", model, *sources, *words)

    return run


def test_two_texts_make_a_calibration(calibrate: Run, home: Path) -> None:
    shown = calibrate("--tokens", "128", "--sequences", "3", "--rows", "301", "--seed", "5", "--out", "mine", "--json")
    assert shown.exit_code == 0
    result = json.loads(shown.stdout)
    assert result["name"] == "mine"
    assert result["path"] == str(home / "calibrations" / "qfilters" / "mine.safetensors")
    found = qfilters_file.read(Path(result["path"]))
    assert result["digest"] == found.digest.hex()
    assert found.filters.shape == (2, 2, 16)
    record = result["record"]
    assert (record["sequences"], record["tokens"], record["rows"], record["seed"]) == (3, 384, 301, 5)
    assert (record["estimator"], record["sign"], record["label"]) == ("majority", "negative", "faithful")
    assert result["notes"] == []


def test_people_read_the_name_and_what_was_used(calibrate: Run) -> None:
    shown = calibrate("--tokens", "128", "--sign", "sum")
    assert shown.exit_code == 0
    name = shown.stdout.strip()
    assert name.endswith("-sum")
    assert list(folder.names()) == [name]
    assert "sign by sum (adapted)" in shown.stderr
    assert "sequences, 20 were asked for" in shown.stderr
    assert "shorter than 128 tokens" in shown.stderr
    assert "queries a head were there, 3000 were asked for" in shown.stderr


def test_a_name_that_is_taken_or_none_is_refused_before_the_model_is_loaded(
    calibrate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert calibrate("--tokens", "128", "--out", "mine").exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr("kvferry.engine.model.load", lambda *_, **__: pytest.fail("the model was loaded"))
        again = calibrate("--tokens", "128", "--out", "mine")
        assert (again.exit_code, again.stdout) == (1, "")
        assert "'mine' is there already" in again.stderr
        assert "is no name" in calibrate("--out", "../mine").stderr
    before = folder.names()["mine"].read_bytes()
    assert calibrate("--tokens", "128", "--seed", "1", "--rows", "300", "--out", "mine", "--overwrite").exit_code == 0
    assert folder.names()["mine"].read_bytes() != before


@pytest.mark.parametrize("sources", [(), ("--text", "{a}", "--bind", "{a}")])
def test_texts_or_filters_and_not_both(calibrate: Run, tmp_path: Path, sources: tuple[str, ...]) -> None:
    shown = calibrate(sources=tuple(word.format(a=tmp_path / "a.md") for word in sources))
    assert shown.exit_code == 2
    assert "give either --text FILE... or --bind FILE" in shown.stderr


def test_bad_texts_are_refused_by_name(calibrate: Run, tmp_path: Path) -> None:
    broken, short = tmp_path / "broken.md", tmp_path / "short.md"
    broken.write_bytes(b"\xff\xfe")
    short.write_text("Few words.")
    assert "broken.md: not UTF-8" in calibrate(sources=("--text", str(broken))).stderr
    shown = calibrate("--json", sources=("--text", str(short)))
    assert shown.exit_code == 1
    error: dict[str, Any] = json.loads(shown.stdout)["error"]
    assert (error["code"], error["fields"]["field"], error["fields"]["minimum"]) == ("INVALID_REQUEST", "texts", 256)
    assert folder.names() == {}


def test_published_filters_are_bound_with_a_word_of_caution(calibrate: Run, tmp_path: Path) -> None:
    path = tmp_path / "hub.safetensors"
    path.write_bytes(save({"q_filters": np.ones((2, 2, 16), dtype=np.float32)}))
    shown = calibrate(sources=("--bind", str(path)))
    assert shown.exit_code == 0
    assert shown.stdout.strip().endswith("-imported")
    assert "could not be checked" in shown.stderr
    path.write_bytes(save({"q_filters": np.ones((3, 2, 16), dtype=np.float32)}))
    assert "filters (3, 2, 16)" in calibrate("--overwrite", sources=("--bind", str(path))).stderr
