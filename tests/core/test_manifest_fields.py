"""Every field of the manifest, one at a time: missing, unknown, of a wrong type, out of range, or written otherwise.

The manifest is walked as plain values and packed by a writer of the test's own, so nothing here knows the schema but
the tables below.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from kvferry.core import manifest
from kvferry.core.errors import ManifestError
from kvferry.core.manifest import Manifest

Path = tuple[str | int, ...]

# Fields that may be nil, wherever they stand. The groups of a KV manifest may be nil by type, but not in this form.
NULLABLE = {
    "model.quantization",
    "model.adapter",
    "positions.rope.base",
    "positions.rope.freqs",
    "layout.head_rows",
    "method.seed",
    "mapper",
    "encoding.key_bits",
    "encoding.value_bits",
    "encoding.key_group",
    "encoding.value_group",
    "encoding.key_axis",
    "encoding.entropy",
    "encoding.zstd",
    "sections.decoded",
}
SCALARS = "method.params."
WRONG_TYPES: dict[type, list[object]] = {
    bool: [1, 0.5, "true", b"1", [True], {"a": True}],
    int: [True, 1.5, 1.0, "1", b"1", [1], {"a": 1}],
    float: [True, "0.5", b"0.5", [0.5], {"a": 0.5}],
    str: [1, True, b"kv", ["kv"], {"a": "kv"}],
    bytes: [1, "d" * 32, "00" * 32, [0] * 32, {"a": b"d" * 32}],
    list: [1, "list", b"list", {"0": 1}],
    dict: [1, "map", b"map", [], [["id", "x"]]],
}


@pytest.fixture(scope="module")
def plain(full_manifest: Manifest) -> dict[str, Any]:
    values: dict[str, Any] = msgpack.unpackb(manifest.encode(full_manifest))
    return values


def nodes(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from nodes(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from nodes(item, (*path, index))


def fields(plain: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    return ((path, value) for path, value in nodes(plain) if path)


def dotted(path: Path) -> str:
    return ".".join(key for key in path if isinstance(key, str))


def shown(path: Path) -> str:
    """The path as the error shows it. Parameters have free names, so only their map is named."""
    text = "$"
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}"
    return text.partition("params.")[0]


def changed(plain: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(plain)
    parent: Any = found
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return found


def message(plain: object) -> str:
    with pytest.raises(ManifestError) as caught:
        manifest.decode(msgpack.packb(plain))
    return str(caught.value)


def test_the_example_leaves_nothing_out(plain: dict[str, Any], full_manifest: Manifest) -> None:
    assert manifest.decode(msgpack.packb(plain)) == full_manifest
    set_somewhere = {dotted(path) for path, value in fields(plain) if value is not None}
    assert set_somewhere >= NULLABLE
    assert all(value for _, value in nodes(plain) if isinstance(value, dict | list))


def test_a_missing_key_is_named(plain: dict[str, Any]) -> None:
    for path, value in nodes(plain):
        if not isinstance(value, dict) or dotted(path) == "method.params":
            continue
        for key in value:
            rest = {name: item for name, item in value.items() if name != key}
            said = message(changed(plain, path, rest) if path else rest)
            assert key in said, (path, key)
            assert not path or shown(path) in said, (path, key)


def test_an_unknown_key_is_named(plain: dict[str, Any]) -> None:
    for path, value in nodes(plain):
        if not isinstance(value, dict) or dotted(path) == "method.params":
            continue
        more = value | {"surplus": 1}
        said = message(changed(plain, path, more) if path else more)
        assert "surplus" in said, path
        assert not path or shown(path) in said, path


def test_a_key_that_is_not_text_is_refused(plain: dict[str, Any]) -> None:
    for path, value in nodes(plain):
        if isinstance(value, dict):
            for odd in (b"surplus", 1, True, None):
                more = value | {odd: 1}
                message(changed(plain, path, more) if path else more)


def test_a_wrong_type_is_named(plain: dict[str, Any]) -> None:
    for path, value in fields(plain):
        if dotted(path) == "version" or value is None:
            continue
        wrongs = [b"x", [1], {"a": 1}] if dotted(path).startswith(SCALARS) else WRONG_TYPES[type(value)]
        for wrong in wrongs:
            said = message(changed(plain, path, wrong))
            assert shown(path) in said, (path, wrong)


def test_nil_is_allowed_where_the_table_says_so_and_nowhere_else(plain: dict[str, Any]) -> None:
    for path, _ in fields(plain):
        name = dotted(path)
        inside_a_list = isinstance(path[-1], int)
        if name.startswith(SCALARS) or (name in NULLABLE and not inside_a_list):
            manifest.decode(msgpack.packb(changed(plain, path, None)))
            continue
        said = message(changed(plain, path, None))
        assert str(path[0] if len(path) == 1 else shown(path)) in said, path


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_named(plain: dict[str, Any], value: float) -> None:
    floats = [path for path, was in fields(plain) if isinstance(was, float)]
    assert ("parity", "log_probabilities", 0) in floats
    assert ("method", "params", "floor") in floats
    for path in floats:
        said = message(changed(plain, path, value))
        assert shown(path).removeprefix("$.") in said, path


@pytest.mark.parametrize("kind", [msgpack.ExtType(5, b"x" * 32), msgpack.Timestamp(1, 0), msgpack.Timestamp(1, 2)])
def test_extension_types_are_refused_in_every_field(plain: dict[str, Any], kind: object) -> None:
    for path, _ in fields(plain):
        message(changed(plain, path, kind))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("form", "video"),
        ("model.type", ""),
        ("model.type", "x" * 257),
        ("model.id", "x" * 1025),
        ("model.revision", "x" * 257),
        ("model.weights", b"d" * 31),
        ("model.weights", b"d" * 33),
        ("model.adapter", b""),
        ("model.quantization.bits", 0),
        ("document.bytes", -1),
        ("document.bytes", 2**53 + 1),
        ("document.bytes", 2**64 - 1),
        ("document.bytes", -(2**63)),
        ("prompt.version", 0),
        ("prefix.tokens", 0),
        ("positions.rope", []),
        ("positions.rope.0.kind", "alibi"),
        ("positions.rope.0.dims", -1),
        ("positions.probe_error", -1e-9),
        ("layout.0.kv_heads", 0),
        ("layout.0.rows", 0),
        ("layout.0.dtype", "I32"),
        ("layout.0.positions", "guessed"),
        ("layout.1.head_rows", [24, 0]),
        ("layout.0.packed_keys", -1),
        ("layout.0.packed_values", 2**53 + 1),
        ("encoding.key_bits", 0),
        ("encoding.key_axis", "row"),
        ("method.label", "original"),
        ("method.consume", "stream"),
        ("method.seed", -1),
        ("method.calibration", [b"d" * 31]),
        ("mapper.level", "L1"),
        ("encoding.zstd", 0),
        ("encoding.zstd", 23),
        ("sections.0.dtype", "F64"),
        ("sections.0.encoding", "gzip"),
        ("sections.0.shape", [1] * 9),
        ("sections.0.shape", [-1]),
        ("sections.0.name", ""),
        ("payload.length", 0),
        ("payload.chunk_size", 1023),
        ("payload.chunk_size", 2 * 2**20 + 1),
        ("parity.suffix", [2**32]),
        ("parity.bound", -0.5),
    ],
)
def test_a_value_out_of_range_is_named(plain: dict[str, Any], path: str, value: object) -> None:
    keys: Path = tuple(int(key) if key.isdigit() else key for key in path.split("."))
    said = message(changed(plain, keys, value))
    assert shown(keys) in said


# Other ways to write the same values. A manifest has one form only, or its digest would not be its identity.


def head(tag: int, count: int) -> bytes:
    return bytes([tag]) + count.to_bytes(4, "big")


def wide(value: Any) -> list[bytes]:
    """A scalar in every form but the shortest."""
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, int):
        forms = [b"\xcd" + struct.pack(">H", value)] if 0 <= value < 256 else []
        return [*forms, b"\xcf" + struct.pack(">Q", value), b"\xd3" + struct.pack(">q", value)]
    if isinstance(value, float):
        return [b"\xca" + struct.pack(">f", value), *([msgpack.packb(int(value))] if value.is_integer() else [])]
    raw = value.encode() if isinstance(value, str) else value
    if isinstance(value, str):
        return [b"\xda" + len(raw).to_bytes(2, "big") + raw, head(0xDB, len(raw)) + raw]
    return [b"\xc5" + len(raw).to_bytes(2, "big") + raw, head(0xC6, len(raw)) + raw] if len(raw) < 256 else []


def write(value: Any, at: Path | None, how: str, path: Path = ()) -> bytes:
    """Pack ``value``, the container at ``at`` in the odd way ``how``."""
    odd = how if path == at else ""
    if isinstance(value, list):
        count = head(0xDD, len(value)) if odd == "wide" else msgpack.Packer().pack_array_header(len(value))
        return count + b"".join(write(item, at, how, (*path, index)) for index, item in enumerate(value))
    if not isinstance(value, dict):
        return how.encode("latin-1") if odd else msgpack.packb(value)
    pairs = [(msgpack.packb(key), write(item, at, how, (*path, key))) for key, item in value.items()]
    if odd == "swapped":
        pairs[0], pairs[-1] = pairs[-1], pairs[0]
    elif odd == "repeated":
        pairs.append(pairs[0])
    elif odd == "wide key":
        key = next(iter(value)).encode()
        pairs[0] = (b"\xd9" + bytes([len(key)]) + key, pairs[0][1])
    count = head(0xDF, len(pairs)) if odd == "wide" else msgpack.Packer().pack_map_header(len(pairs))
    return count + b"".join(key + item for key, item in pairs)


def test_the_tests_writer_agrees_on_the_canonical_form(plain: dict[str, Any], full_manifest: Manifest) -> None:
    assert write(plain, None, "") == manifest.encode(full_manifest)


@pytest.mark.parametrize("how", ["swapped", "repeated", "wide", "wide key"])
def test_containers_written_otherwise_are_refused(plain: dict[str, Any], how: str) -> None:
    for path, value in nodes(plain):
        if isinstance(value, dict) or (isinstance(value, list) and how == "wide"):
            data = write(value=plain, at=path, how=how)
            assert how in ("repeated", "wide", "wide key") or msgpack.unpackb(data) == plain
            with pytest.raises(ManifestError, match="not in canonical form"):
                manifest.decode(data)


def test_scalars_in_wider_forms_are_refused(plain: dict[str, Any]) -> None:
    tried = 0
    for path, value in fields(plain):
        if isinstance(value, dict | list):
            continue
        for form in wide(value):
            tried += 1
            with pytest.raises(ManifestError, match="not in canonical form"):
                manifest.decode(write(plain, path, form.decode("latin-1")))
    assert tried > 200


def test_a_repeated_key_with_another_value_is_refused(plain: dict[str, Any]) -> None:
    """A reader that lets the last key win and one that lets the first win must not see two artifacts."""
    model = plain["model"]
    pairs = [*model.items(), ("weights", b"\x00" * 32)]
    body = msgpack.Packer().pack_map_header(len(pairs)) + b"".join(msgpack.packb(x) for pair in pairs for x in pair)
    with pytest.raises(ManifestError, match="canonical"):
        manifest.decode(msgpack.packb(plain).replace(msgpack.packb(model), body))


def test_bytes_before_after_or_missing_are_refused(plain: dict[str, Any]) -> None:
    data = msgpack.packb(plain)
    for odd in (data + b"\xc0", data + data, b"\xc0" + data, b"\x91" + data, b""):
        with pytest.raises(ManifestError):
            manifest.decode(odd)
    for length in range(len(data)):
        with pytest.raises(ManifestError):
            manifest.decode(data[:length])
