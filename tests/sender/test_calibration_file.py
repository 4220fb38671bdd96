"""Files of filters: what is written is read, and everything else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from kvferry.core.digests import digest
from kvferry.core.errors import ContainerError, InvalidRequestError, KvferryError, StoreError, TooLargeError
from kvferry.sender.calibration import binding, qfilters_file
from kvferry.sender.calibration.binding import Binding
from kvferry.sender.calibration.qfilters_file import ENTRY, TENSOR, QFilters, Record

BINDING = Binding("tiny", "main", "1" * 64, "2" * 64, "", "3" * 64, "4" * 64, 2, 3, 8)
RECORD = Record(1, BINDING, "negative", "majority", "faithful", 2, 100, 90, 7, 1, "5" * 64)
FILTERS = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
SAMPLE = QFilters(RECORD, FILTERS)


def crafted(filters: Any = FILTERS, metadata: dict[str, str] | None = None, **changes: Any) -> bytes:
    """Return a file with a right checksum, whatever it holds; ``changes`` are to the record's JSON."""
    record = json.dumps(msgspec.to_builtins(RECORD) | changes, separators=(",", ":"))
    checksum = digest(digest(record.encode()) + digest(filters.tobytes())).hex()
    return save({TENSOR: filters}, {ENTRY: f"{checksum} {record}"} if metadata is None else metadata)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(qfilters_file.encode(SAMPLE))
    found = qfilters_file.read(path)
    assert found.record == RECORD
    assert np.array_equal(found.filters, FILTERS)
    assert found.digest == SAMPLE.digest
    assert np.array_equal(load(path.read_bytes())[TENSOR], FILTERS)
    assert qfilters_file.decode(crafted(), "a").digest == SAMPLE.digest


def test_the_digest_covers_record_and_numbers() -> None:
    other = FILTERS.copy()
    other[1, 2, 7] = np.nextafter(other[1, 2, 7], np.float32(9))
    digests = {
        SAMPLE.digest,
        QFilters(RECORD, other).digest,
        QFilters(msgspec.structs.replace(RECORD, seed=8), FILTERS).digest,
        QFilters(msgspec.structs.replace(RECORD, model=msgspec.structs.replace(BINDING, id="other")), FILTERS).digest,
    }
    assert len(digests) == 4


def refusal(data: bytes) -> KvferryError:
    with pytest.raises(KvferryError) as caught:
        qfilters_file.decode(data, "a")
    assert caught.value.message.startswith("a: ")
    return caught.value


def spoiled(index: tuple[int, ...], value: Any) -> Any:
    filters = FILTERS.copy()
    filters[index] = value
    return filters


@pytest.mark.parametrize(
    ("data", "kind", "field", "words"),
    [
        (crafted(version=2), ContainerError, "version", ["2", "reads 1"]),
        (crafted(version=2, more="x"), ContainerError, "version", ["2", "reads 1"]),
        (crafted(FILTERS[:1]), ContainerError, TENSOR, ["(1, 3, 8)", "(2, 3, 8)"]),
        (crafted(FILTERS[:, :2].copy()), ContainerError, TENSOR, ["(2, 2, 8)", "(2, 3, 8)"]),
        (crafted(FILTERS.reshape(2, 24)), ContainerError, TENSOR, ["(2, 24)", "(2, 3, 8)"]),
        (crafted(FILTERS.astype(np.float16)), ContainerError, TENSOR, ["F16", "F32"]),
        (crafted(spoiled((1, 2, 3), np.nan)), ContainerError, TENSOR, ["layer 1, KV head 2", "not finite"]),
        (crafted(spoiled((0, 1, 0), np.inf)), ContainerError, TENSOR, ["layer 0, KV head 1", "not finite"]),
        (crafted(spoiled((1, 0), 0.0)), ContainerError, TENSOR, ["layer 1, KV head 0", "is 0"]),
        (crafted(estimator="mode"), ContainerError, "record", ["estimator"]),
        (crafted(sign="positive"), ContainerError, "record", ["sign"]),
        (crafted(rows=-1), ContainerError, "record", ["rows"]),
        (crafted(model=None), ContainerError, "record", ["model"]),
        (crafted(more=1), ContainerError, "record", ["more"]),
        (crafted(metadata={ENTRY: " " + "[" * 5000}), ContainerError, "record", []),
        (crafted(metadata={ENTRY: " {}"}), ContainerError, "record", ["version"]),
        (crafted(metadata={ENTRY: ""}), ContainerError, "record", []),
        (crafted(metadata={ENTRY: " {}", "format": "pt"}), ContainerError, "metadata", ["format", ENTRY]),
        (save({"w": FILTERS}, {ENTRY: "x"}), ContainerError, "tensors", ["w", TENSOR]),
        (save({TENSOR: FILTERS, "w": FILTERS}), ContainerError, "tensors", ["q_filters, w"]),
        (b"", ContainerError, "file", []),
        (b"\xff" * 40, ContainerError, "file", []),
        (crafted()[:-1], ContainerError, "file", []),
        (crafted()[:60], ContainerError, "file", []),
        (crafted() + b"x", ContainerError, "file", []),
    ],
)
def test_every_other_file_is_refused_by_name(data: bytes, kind: Any, field: str, words: list[str]) -> None:
    error = refusal(data)
    assert type(error) is kind
    assert error.fields["field"] == field
    assert all(word in error.message for word in words)


def test_a_changed_number_breaks_the_checksum() -> None:
    data = bytearray(qfilters_file.encode(SAMPLE))
    data[-3] ^= 1
    error = refusal(bytes(data))
    assert error.fields["field"] == "checksum"
    assert error.fields["value"] != error.fields["expected"] == SAMPLE.digest.hex()


def test_a_changed_record_breaks_the_checksum() -> None:
    data = qfilters_file.encode(SAMPLE)
    changed = data.replace(rb"seed\":7", rb"seed\":8")
    assert changed != data
    assert refusal(changed).fields["field"] == "checksum"


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_published_filters_alone_are_bound_to_nothing(metadata: dict[str, str] | None) -> None:
    error = refusal(save({TENSOR: FILTERS}, metadata))
    assert type(error) is InvalidRequestError
    assert "bound to no model" in error.message
    assert "--bind" in error.message


def test_published_filters_can_be_read_for_binding(tmp_path: Path) -> None:
    path = tmp_path / "hub.safetensors"
    for dtype in (np.float32, np.float16):
        path.write_bytes(save({TENSOR: FILTERS.astype(dtype)}))
        found, source = qfilters_file.read_unbound(path)
        assert found.dtype == np.float32
        assert np.array_equal(found, FILTERS.astype(dtype).astype(np.float32))
        assert source == digest(path.read_bytes())
    path.write_bytes(save({TENSOR: FILTERS.astype(np.float64)}))
    with pytest.raises(ContainerError, match="F64 .* expected F32 or F16"):
        qfilters_file.read_unbound(path)
    path.write_bytes(qfilters_file.encode(SAMPLE))
    with pytest.raises(InvalidRequestError, match="bound to a model already"):
        qfilters_file.read_unbound(path)


@pytest.mark.parametrize("filters", [FILTERS[:1], spoiled((0, 0, 0), np.nan), spoiled((0, 0), 0.0)])
def test_what_cannot_be_used_is_not_written(filters: Any) -> None:
    with pytest.raises(ContainerError, match=TENSOR):
        qfilters_file.encode(QFilters(RECORD, filters))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(qfilters_file.encode(SAMPLE))
    monkeypatch.setattr(qfilters_file, "MAX_FILE_BYTES", 100)
    with pytest.raises(TooLargeError) as caught:
        qfilters_file.read(path)
    assert caught.value.fields["limit"] == 100
    with pytest.raises(StoreError, match="No such file"):
        qfilters_file.read(tmp_path / "b.safetensors")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 3),
        ("kv_heads", 1),
        ("head_dim", 16),
        ("weights", "a" * 64),
        ("config", "a" * 64),
        ("adapter", "a" * 64),
        ("tokenizer", "a" * 64),
        ("rope", "a" * 64),
    ],
)
def test_another_model_is_refused_with_both_values(field: str, value: Any) -> None:
    other = msgspec.structs.replace(BINDING, **{field: value})
    with pytest.raises(InvalidRequestError) as caught:
        binding.check_bound(BINDING, other, "a")
    held = getattr(BINDING, field)
    assert caught.value.fields == {"field": field, "value": held, "expected": value}
    assert caught.value.message.startswith(f"a: {field} ")
    assert (str(held)[:12] or "none") in caught.value.message
    assert str(value)[:12] in caught.value.message


def test_names_are_for_people() -> None:
    binding.check_bound(BINDING, msgspec.structs.replace(BINDING, id="elsewhere", revision="v2"), "a")


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_damaged_byte_changes_nothing_or_is_refused(at: int, bits: int) -> None:
    data = bytearray(qfilters_file.encode(SAMPLE))
    data[at % len(data)] ^= bits
    try:
        found = qfilters_file.decode(bytes(data), "a")
    except KvferryError:
        return
    assert found.record == RECORD
    assert np.array_equal(found.filters, FILTERS)


@given(st.integers(0, 2000))
def test_a_cut_file_is_refused(length: int) -> None:
    data = qfilters_file.encode(SAMPLE)
    with pytest.raises(ContainerError):
        qfilters_file.decode(data[: length % len(data)], "a")


@given(st.binary(max_size=300))
def test_bytes_of_any_kind_give_one_of_our_errors(data: bytes) -> None:
    with pytest.raises(KvferryError):
        qfilters_file.decode(data, "a")


json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*RECORD.__struct_fields__, "more"]), json_value, min_size=1, max_size=3))
def test_records_of_any_kind_are_read_whole_or_refused(changes: dict[str, Any]) -> None:
    try:
        found = qfilters_file.decode(crafted(**changes), "a")
    except KvferryError:
        return
    assert msgspec.to_builtins(found.record) == msgspec.to_builtins(RECORD) | changes
