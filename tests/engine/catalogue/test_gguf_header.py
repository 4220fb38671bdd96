"""The header reader against the reader of the gguf package, and against files that lie about their sizes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import pytest

from kvferry.core.errors import ModelError
from kvferry.engine.gguf_header import read_header


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def file_of(pairs: list[bytes], tensors: list[bytes], data: bytes = b"", alignment: int = 32) -> memoryview:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return memoryview(head + b"\0" * (-len(head) % alignment) + data)


def test_it_agrees_with_the_gguf_package(tmp_path: Path, tiny: Any) -> None:
    path = tiny(quantise=True).write(tmp_path / "tiny.gguf")
    header = read_header(memoryview(path.read_bytes()))
    reader = gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == expected
    assert len(header.tensors) == len(reader.tensors) > 10
    for theirs in reader.tensors:
        ours = header.tensors[theirs.name]
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert (ours.quantisation, ours.offset, ours.size) == (
            theirs.tensor_type,
            theirs.data_offset,
            theirs.n_bytes,
        )


def test_every_value_type_is_read() -> None:
    values = {0: ("B", 200), 1: ("b", -3), 2: ("H", 60000), 3: ("h", -300), 4: ("I", 4_000_000_000)}
    values |= {5: ("i", -70000), 6: ("f", 0.5), 10: ("Q", 2**63), 11: ("q", -(2**40)), 12: ("d", 0.1)}
    pairs = [pair(f"n{kind}", kind, struct.pack("<" + letter, value)) for kind, (letter, value) in values.items()]
    pairs.append(pair("flag", 7, b"\1"))
    pairs.append(pair("text", 8, text("é")))
    pairs.append(pair("flags", 9, struct.pack("<IQ", 7, 3) + b"\0\1\0"))
    pairs.append(pair("texts", 9, struct.pack("<IQ", 8, 2) + text("a") + text("")))
    pairs.append(pair("numbers", 9, struct.pack("<IQ3h", 3, 3, 1, -2, 3)))
    found = read_header(file_of(pairs, [])).metadata
    assert found == {f"n{kind}": value for kind, (_, value) in values.items()} | {
        "flag": True,
        "text": "é",
        "flags": [False, True, False],
        "texts": ["a", ""],
        "numbers": [1, -2, 3],
    }


def test_offsets_follow_the_alignment() -> None:
    pairs = [pair("general.alignment", 4, struct.pack("<I", 64))]
    data = file_of(pairs, [tensor("a", (3, 2), 0, 0), tensor("b", (4,), 1, 64)], bytes(64 + 8), alignment=64)
    header = read_header(data)
    start = len(data) - 72
    assert (header.tensors["a"].shape, header.tensors["a"].offset, header.tensors["a"].size) == ((2, 3), start, 24)
    assert (header.tensors["b"].shape, header.tensors["b"].offset, header.tensors["b"].size) == ((4,), start + 64, 8)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, tiny: Any) -> None:
    content = tiny().write(tmp_path / "tiny.gguf").read_bytes()
    for size in [*range(0, 9000, 13), len(content) - 1]:
        with pytest.raises(ModelError, match="not a readable GGUF file"):
            read_header(memoryview(content[:size]))


HUGE = 2**60
NUMBER = pair("n", 4, struct.pack("<I", 1))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (memoryview(b"GGML" + bytes(60)), "does not start with GGUF"),
        (memoryview(b"GGUF" + struct.pack("<IQQ", 1, 0, 0)), "version 1 is not supported"),
        (memoryview(b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE)), f"{HUGE} metadata pairs at byte 24"),
        (memoryview(b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0)), f"{HUGE} tensors at byte 24"),
        (file_of([pair("t", 8, struct.pack("<Q", HUGE) + b"a")], []), f"{HUGE} bytes of text"),
        (file_of([pair("t", 9, struct.pack("<IQ", 8, HUGE))], []), f"{HUGE} texts"),
        (file_of([pair("t", 9, struct.pack("<IQ", 12, HUGE))], []), f"{HUGE} numbers"),
        (file_of([pair("t", 9, struct.pack("<IQ", 7, HUGE))], []), f"{HUGE} flags"),
        (file_of([pair("t", 9, struct.pack("<IQ", 9, 1))], []), "unknown value type 9"),
        (file_of([pair("t", 77, b"1234")], []), "unknown value type 77"),
        (file_of([NUMBER, NUMBER], []), "the key 'n' comes twice"),
        (file_of([pair("t", 8, struct.pack("<Q", 2) + b"\xff\xfe")], []), "is not UTF-8"),
        (file_of([pair("general.alignment", 4, struct.pack("<I", 48))], []), "alignment is 48"),
        (file_of([], [tensor("a", (2, 2, 2), 0, 0)], bytes(32)), "tensor a has 3 dimensions"),
        (file_of([], [tensor("a", (4,), 99, 0)], bytes(32)), "tensor a has the unknown format 99"),
        (file_of([], [tensor("a", (33, 1), 8, 0)], bytes(64)), r"tensor a: shape \[1, 33\] does not fit Q8_0"),
        (file_of([], [tensor("a", (32,), 8, 0)], bytes(64)), r"tensor a: shape \[32\] does not fit Q8_0"),
        (file_of([], [tensor("a", (0,), 0, 0)], bytes(64)), r"tensor a: shape \[0\] does not fit F32"),
        (file_of([], [tensor("a", (HUGE, HUGE), 0, 0)], bytes(64)), "tensor a ends at byte"),
        (file_of([], [tensor("a", (4,), 0, HUGE)], bytes(64)), "tensor a ends at byte"),
        (file_of([], [tensor("a", (4,), 0, 52)], bytes(64)), "tensor a ends at byte"),
        (file_of([], [tensor("a", (4,), 0, 0)] * 2, bytes(64)), "tensor a comes twice"),
    ],
)
def test_a_file_that_lies_is_refused_before_anything_is_allocated(data: memoryview, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_header(data)
