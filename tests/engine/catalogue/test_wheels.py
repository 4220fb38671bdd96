"""Joining pieces out of wheels, and what happens to damaged, missing and oversized ones."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.digests import digest
from kvferry.core.errors import ModelError
from kvferry.engine.catalogue import KNOWN_MODELS, KnownModel, PinnedWheel, find_model
from kvferry.engine.wheels import fetch_wheel, find_wheel, join_pieces

FIRST, SECOND = bytes(range(256)) * 9000, b"second piece"


def model_of(*wheels: PinnedWheel, size: int | None = None, content: bytes = FIRST + SECOND) -> KnownModel:
    return KnownModel(
        name="tiny",
        family="tiny",
        licence="Apache-2.0",
        summary="",
        wheels=wheels,
        gguf_bytes=len(content) if size is None else size,
        gguf_blake3=digest(content).hex(),
    )


WHEELS = (PinnedWheel("some-part1", "1.0", ("data/part01.bin",)), PinnedWheel("some-part2", "1.0", ("x/b.bin",)))


@pytest.fixture
def parts(tmp_path: Path, make_wheel: Any) -> list[Path]:
    return [
        make_wheel(tmp_path, "some-part1", "1.0", {"some_part1/data/part01.bin": FIRST}),
        make_wheel(tmp_path, "some-part2", "1.0", {"x/b.bin": SECOND}),
    ]


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".whl")


def test_pieces_are_joined_in_order(tmp_path: Path, parts: list[Path]) -> None:
    seen: list[tuple[int, int]] = []
    found = join_pieces(model_of(*WHEELS), parts, tmp_path / "x.gguf", lambda *step: seen.append(step))
    assert (tmp_path / "x.gguf").read_bytes() == FIRST + SECOND
    assert found == digest(FIRST + SECOND).hex()
    assert seen[-1] == (len(FIRST + SECOND), len(FIRST + SECOND))
    assert left_over(tmp_path) == ["x.gguf"]


def test_the_wrong_order_is_refused_with_both_digests(tmp_path: Path, parts: list[Path]) -> None:
    with pytest.raises(ModelError) as caught:
        join_pieces(model_of(*reversed(WHEELS)), parts[::-1], tmp_path / "x.gguf")
    assert digest(SECOND + FIRST).hex() in caught.value.message
    assert digest(FIRST + SECOND).hex() in caught.value.message
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(("size", "found"), [(len(FIRST), "more than 2304000"), (9_999_999, "2304012")])
def test_a_wrong_size_is_refused_with_both_values(tmp_path: Path, parts: list[Path], size: int, found: str) -> None:
    with pytest.raises(ModelError, match=f"the pieces make {found} bytes, expected {size}"):
        join_pieces(model_of(*WHEELS, size=size), parts, tmp_path / "x.gguf")
    assert left_over(tmp_path) == []


def test_a_missing_piece_is_named(tmp_path: Path, parts: list[Path]) -> None:
    wrong = PinnedWheel("some-part2", "1.0", ("x/c.bin",))
    with pytest.raises(ModelError, match=r"some_part2-1\.0-py3-none-any\.whl should hold one x/c\.bin, it holds 0"):
        join_pieces(model_of(WHEELS[0], wrong), parts, tmp_path / "x.gguf")
    assert left_over(tmp_path) == []


def test_a_flipped_byte_inside_a_wheel_without_digest_is_found(tmp_path: Path, parts: list[Path]) -> None:
    content = bytearray(parts[0].read_bytes())
    content[len(content) // 2] ^= 1
    parts[0].write_bytes(content)
    with pytest.raises(ModelError, match=r"some_part1.* is damaged: Bad CRC-32"):
        join_pieces(model_of(*WHEELS), parts, tmp_path / "x.gguf")
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_cut_wheel_is_found(tmp_path: Path, parts: list[Path], keep: int) -> None:
    parts[0].write_bytes(parts[0].read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"some_part1.* is damaged"):
        join_pieces(model_of(*WHEELS), parts, tmp_path / "x.gguf")
    assert left_over(tmp_path) == []


def test_a_present_wheel_is_reused_and_a_damaged_one_refused_with_both_digests(
    tmp_path: Path, parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("nothing may be downloaded"))
    good = hashlib.sha256(parts[0].read_bytes()).hexdigest()
    pinned = PinnedWheel("some-part1", "1.0", ("data/part01.bin",), good)
    assert fetch_wheel(pinned, tmp_path) == parts[0]
    parts[0].write_bytes(parts[0].read_bytes() + b"x")
    bad = hashlib.sha256(parts[0].read_bytes()).hexdigest()
    with pytest.raises(ModelError, match=f"SHA-256 is {bad}, expected {good}"):
        fetch_wheel(pinned, tmp_path)


def test_only_the_very_version_counts_as_present(tmp_path: Path, parts: list[Path]) -> None:
    assert find_wheel(PinnedWheel("Some.Part1", "1.0", ()), tmp_path) == parts[0]
    assert find_wheel(PinnedWheel("some-part1", "1.0.1", ()), tmp_path) is None
    assert find_wheel(PinnedWheel("some-part", "1.0", ()), tmp_path) is None


@pytest.fixture
def pip_settings(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    pytest.importorskip("pip")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return monkeypatch


@pytest.mark.slow
def test_pip_downloads_a_wheel(tmp_path: Path, parts: list[Path], pip_settings: pytest.MonkeyPatch) -> None:
    pip_settings.setenv("PIP_NO_INDEX", "1")
    pip_settings.setenv("PIP_FIND_LINKS", str(tmp_path))
    target = tmp_path / "downloads"
    target.mkdir()
    found = fetch_wheel(WHEELS[0], target)
    assert found.parent == target
    assert found.read_bytes() == parts[0].read_bytes()
    with pytest.raises(ModelError, match=r"cannot download absent-x==2: pip failed; .*No matching distribution"):
        fetch_wheel(PinnedWheel("absent-x", "2", ()), target)


@pytest.mark.slow
def test_being_offline_is_said(tmp_path: Path, pip_settings: pytest.MonkeyPatch) -> None:
    # Nothing listens on the discard port of this machine, so the connection is refused at once.
    pip_settings.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelError, match=r"offline; pip's last line: ERROR: No matching .* given with --wheels"):
        fetch_wheel(PinnedWheel("absent-x", "2", ()), tmp_path)
    assert left_over(tmp_path) == []


def test_the_catalogue_is_consistent() -> None:
    assert "smollm2-135m-instruct" in KNOWN_MODELS
    for name, model in KNOWN_MODELS.items():
        assert model.name == name == find_model(name).name
        requirements = [wheel.requirement for wheel in model.wheels]
        assert len(set(requirements)) == len(requirements)
        assert all(wheel.pieces for wheel in model.wheels)
        digests = [wheel.sha256 for wheel in model.wheels] + [model.gguf_blake3]
        assert all(value is None or len(bytes.fromhex(value)) == 32 for value in digests)
    assert [wheel.pieces for wheel in find_model("qwen2.5-coder-1.5b-instruct").wheels][::21] == [
        ("data/part01.bin",),
        ("data/part22.bin",),
    ]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match="unknown model 'smollm'; the catalogue has smollm2-135m-instruct, qwen"):
        find_model("smollm")
