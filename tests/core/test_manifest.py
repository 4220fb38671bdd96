from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import pytest
from blake3 import blake3

from kvferry.core import limits, manifest
from kvferry.core.errors import ManifestError, TooLargeError
from kvferry.core.manifest import Manifest, Parity

replace = msgspec.structs.replace

# One small artifact, written down as plain values. Its bytes and its id must never change: they are version 1.
GOLDEN: dict[str, Any] = {
    "version": 1,
    "form": "text",
    "model": None,
    "tokenizer": None,
    "document": {"digest": b"\xd1" * 32, "bytes": 300, "characters": 70000},
    "prompt": {"version": 1, "system": b"\xd2" * 32},
    "prefix": None,
    "positions": None,
    "layout": None,
    "method": {
        "id": "A0",
        "label": "custom",
        "aware": False,
        "consume": "prefill",
        "params": {"a": -1, "b": 0.5, "c": "é", "d": True, "e": None},
        "seed": 5000000000,
        "calibration": [b"\xd3" * 32],
    },
    "mapper": None,
    "encoding": {
        "key_bits": None,
        "value_bits": None,
        "key_group": None,
        "value_group": None,
        "key_axis": None,
        "entropy": None,
        "zstd": 3,
    },
    "sections": [
        {
            "name": "prompt.system",
            "dtype": "U8",
            "shape": [2],
            "encoding": "raw",
            "length": 2,
            "digest": b"\xd4" * 32,
            "decoded": None,
        }
    ],
    "payload": {"length": 74, "digest": b"\xd5" * 32, "chunk_size": 1024, "chunks": b"\xd6" * 32},
    "parity": None,
    "runtime": {"kvferry": "0.1.0", "mlx": "0.32.4", "mlx_lm": "0.32.2", "device": "cpu"},
}
GOLDEN_BYTES = bytes.fromhex(
    "de0010a776657273696f6e01a4666f726da474657874a56d6f64656cc0a9746f6b656e697a6572c0a8646f63756d656e"
    "7483a6646967657374c420d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1a562797465"
    "73cd012caa63686172616374657273ce00011170a670726f6d707482a776657273696f6e01a673797374656dc420d2d2"
    "d2d2d2d2d2d2d2d2d2d2d2d2d2d2d2d2d2d2d2d2d2d2d2d2d2d2d2d2d2d2a6707265666978c0a9706f736974696f6e73"
    "c0a66c61796f7574c0a66d6574686f6487a26964a24130a56c6162656ca6637573746f6da56177617265c2a7636f6e73"
    "756d65a770726566696c6ca6706172616d7385a161ffa162cb3fe0000000000000a163a2c3a9a164c3a165c0a4736565"
    "64cf000000012a05f200ab63616c6962726174696f6e91c420d3d3d3d3d3d3d3d3d3d3d3d3d3d3d3d3d3d3d3d3d3d3d3"
    "d3d3d3d3d3d3d3d3d3a66d6170706572c0a8656e636f64696e6787a86b65795f62697473c0aa76616c75655f62697473"
    "c0a96b65795f67726f7570c0ab76616c75655f67726f7570c0a86b65795f61786973c0a7656e74726f7079c0a47a7374"
    "6403a873656374696f6e739187a46e616d65ad70726f6d70742e73797374656da56474797065a25538a5736861706591"
    "02a8656e636f64696e67a3726177a66c656e67746802a6646967657374c420d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4"
    "d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4a76465636f646564c0a77061796c6f616484a66c656e6774684aa6646967657374"
    "c420d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5d5aa6368756e6b5f73697a65cd0400"
    "a66368756e6b73c420d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6a6706172697479"
    "c0a772756e74696d6584a76b766665727279a5302e312e30a36d6c78a6302e33322e34a66d6c785f6c6da6302e33322e"
    "32a6646576696365a3637075"
)
GOLDEN_ID = "63c9b3f0cec861ae36ac807cbcba8919fce7e5a29a4fba44caf745e63d40ef2a"


def test_the_bytes_and_the_id_of_a_known_manifest_never_change() -> None:
    decoded = manifest.decode(GOLDEN_BYTES)
    assert manifest.encode(decoded) == GOLDEN_BYTES
    assert manifest.artifact_id(GOLDEN_BYTES).hex() == GOLDEN_ID
    assert decoded.document.characters == 70000
    assert decoded.method.params == {"a": -1, "b": 0.5, "c": "é", "d": True, "e": None}
    assert decoded.sections[0].shape == (2,)


def test_the_bytes_are_plain_messagepack_in_field_order() -> None:
    assert msgpack.packb(GOLDEN, use_bin_type=True) == GOLDEN_BYTES
    assert blake3(GOLDEN_BYTES).hexdigest() == GOLDEN_ID
    assert list(msgpack.unpackb(GOLDEN_BYTES)) == list(Manifest.__struct_fields__)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_round_trip_of_kv(kv_example: Callable[..., Any], dtype: str) -> None:
    example = kv_example(dtype=dtype)
    assert manifest.decode(example.encoded) == example.manifest
    assert manifest.artifact_id(example.encoded) == example.id


def test_round_trip_of_text_and_of_every_optional_field(
    text_example: Callable[..., Any], zstd_example: Callable[..., Any], full_manifest: Manifest
) -> None:
    for one in (text_example().manifest, zstd_example().manifest, full_manifest):
        assert manifest.decode(manifest.encode(one)) == one


def test_the_order_in_which_parameters_were_given_does_not_matter(text_example: Callable[..., Any]) -> None:
    one = text_example().manifest
    there = replace(one, method=replace(one.method, params={"a": 1, "Z": 2, "é": 3}))
    back = replace(one, method=replace(one.method, params={"é": 3, "Z": 2, "a": 1}))
    assert manifest.encode(there) == manifest.encode(back)
    assert list(manifest.decode(manifest.encode(back)).method.params) == ["Z", "a", "é"]


def test_integers_in_float_fields_are_written_as_floats(kv_example: Callable[..., Any]) -> None:
    one = kv_example().manifest
    whole = replace(one, positions=replace(one.positions, probe_error=0))
    exact = replace(one, positions=replace(one.positions, probe_error=0.0))
    assert manifest.encode(whole) == manifest.encode(exact)


def test_one_changed_value_changes_the_id(full_manifest: Manifest) -> None:
    other = replace(full_manifest, runtime=replace(full_manifest.runtime, mlx="0.32.5"))
    ids = {manifest.artifact_id(manifest.encode(one)) for one in (full_manifest, other)}
    assert len(ids) == 2


def test_the_schema_is_enforced_when_writing_too(kv_example: Callable[..., Any]) -> None:
    one = kv_example().manifest
    for wrong in (
        replace(one, form="video"),
        replace(one, document=replace(one.document, bytes=-1)),
        replace(one, model=replace(one.model, weights=b"short")),
        replace(one, method=replace(one.method, params={"deep": [1]})),
        replace(one, method=replace(one.method, params={"thing": object()})),
        replace(one, positions=replace(one.positions, probe_error=float("nan"))),
    ):
        with pytest.raises(ManifestError):
            manifest.encode(wrong)


@pytest.mark.parametrize("value", ["\ud800", 2**64, -(2**63) - 1])
def test_values_that_messagepack_cannot_carry_are_refused_when_writing(
    text_example: Callable[..., Any], value: object
) -> None:
    one = text_example().manifest
    with pytest.raises(ManifestError):
        manifest.encode(replace(one, method=replace(one.method, params={"x": value})))


@pytest.mark.parametrize("value", [2**64 - 1, -(2**63), 0, -1, 127, 128, -32, -33, 65535, 65536])
def test_integers_at_the_borders_of_their_encodings_round_trip(text_example: Callable[..., Any], value: int) -> None:
    one = text_example().manifest
    one = replace(one, method=replace(one.method, params={"x": value}))
    assert manifest.decode(manifest.encode(one)).method.params == {"x": value}


# Version


@pytest.mark.parametrize("version", [0, 2, -1, 2**63, None, "1", b"1", True, [1], 1.5])
def test_another_version_is_refused_with_both_named(version: object) -> None:
    with pytest.raises(ManifestError) as caught:
        manifest.decode(msgpack.packb(GOLDEN | {"version": version}))
    assert repr(version) in str(caught.value)
    assert "version 1," in str(caught.value)
    assert caught.value.fields == {"field": "version", "value": repr(version), "expected": 1}


def test_the_version_is_judged_before_anything_else() -> None:
    with pytest.raises(ManifestError, match="the artifact has 2"):
        manifest.decode(msgpack.packb({"version": 2, "whatever": "comes next"}))


def test_a_missing_version_is_refused() -> None:
    with pytest.raises(ManifestError, match=r"^version:"):
        manifest.decode(msgpack.packb({key: value for key, value in GOLDEN.items() if key != "version"}))


def test_a_huge_version_does_not_make_a_huge_message() -> None:
    with pytest.raises(ManifestError) as caught:
        manifest.decode(msgpack.packb({"version": "9" * 1_000_000}))
    assert len(str(caught.value)) < 300


# Form and groups


KV_GROUPS = ["model", "tokenizer", "prefix", "positions", "layout", "parity"]


@pytest.mark.parametrize("group", KV_GROUPS)
def test_a_kv_artifact_needs_every_group(kv_example: Callable[..., Any], group: str) -> None:
    with pytest.raises(ManifestError, match=f"^{group}: a kv artifact needs") as caught:
        manifest.encode(replace(kv_example().manifest, **{group: None}))
    assert caught.value.fields["field"] == group


@pytest.mark.parametrize("form", ["text", "evidence", "references"])
@pytest.mark.parametrize("group", [*KV_GROUPS, "mapper"])
def test_other_forms_must_not_have_them(
    message_example: Callable[..., Any], full_manifest: Manifest, form: str, group: str
) -> None:
    plain = message_example(form).manifest
    assert manifest.decode(manifest.encode(plain)).form == form
    with pytest.raises(ManifestError, match=f"^{group}: a {form} artifact must not have"):
        manifest.encode(replace(plain, **{group: getattr(full_manifest, group)}))


def test_groups_are_checked_when_reading(kv_example: Callable[..., Any]) -> None:
    plain = msgpack.unpackb(kv_example().encoded)
    with pytest.raises(ManifestError, match=r"^parity: a kv artifact needs"):
        manifest.decode(msgpack.packb(plain | {"parity": None}))


CONSUMED = {
    "text": {"prefill", "prefill_once"},
    "evidence": {"prefill"},
    "references": {"look_up"},
    "kv": {"inject"},
}


@pytest.mark.parametrize("consume", ["inject", "prefill", "prefill_once", "look_up"])
@pytest.mark.parametrize("form", CONSUMED)
def test_what_the_receiver_does_must_fit_the_form(
    kv_example: Callable[..., Any], message_example: Callable[..., Any], form: str, consume: str
) -> None:
    one = kv_example().manifest if form == "kv" else message_example(form).manifest
    changed = replace(one, method=replace(one.method, consume=consume))
    if consume in CONSUMED[form]:
        assert manifest.decode(manifest.encode(changed)) == changed
        return
    with pytest.raises(ManifestError, match=rf"^method\.consume: '{consume}' does not fit the form '{form}'"):
        manifest.encode(changed)


# Size


def test_oversize_is_refused_before_parsing() -> None:
    with pytest.raises(TooLargeError) as caught:
        manifest.decode(b"\xc1" * (limits.MAX_MANIFEST_BYTES + 1))
    assert caught.value.fields == {"value": 2 * 2**20 + 1, "limit": 2 * 2**20}


def test_the_limit_itself_is_allowed(text_example: Callable[..., Any]) -> None:
    one = text_example().manifest
    spare = limits.MAX_MANIFEST_BYTES - len(manifest.encode(one))

    def padded(extra: int) -> Manifest:
        # "p", and a text with five bytes of header.
        return replace(one, method=replace(one.method, params={"p": "x" * (spare - 7 + extra)}))

    largest = manifest.encode(padded(0))
    assert len(largest) == limits.MAX_MANIFEST_BYTES
    assert manifest.encode(manifest.decode(largest)) == largest
    with pytest.raises(TooLargeError):
        manifest.encode(padded(1))


# JSON


def test_json_shows_digests_as_hexadecimal(kv_example: Callable[..., Any]) -> None:
    one = kv_example().manifest
    shown = json.loads(json.dumps(manifest.to_json(one), allow_nan=False))
    assert list(shown) == list(Manifest.__struct_fields__)
    assert shown["model"]["weights"] == one.model.weights.hex()
    assert shown["positions"]["rope"][1]["freqs"] == one.positions.rope[1].freqs.hex()
    assert shown["layout"][1]["rows"] == 24
    assert "".join(shown["payload"]["chunks"]) == one.payload.chunks.hex()
    assert len(shown["payload"]["chunks"]) == 12


def test_json_shows_a_single_chunk_as_a_list_too(text_example: Callable[..., Any]) -> None:
    one = text_example(text=b"", system=b"").manifest
    assert len(one.payload.chunks) == 32
    assert manifest.to_json(one)["payload"]["chunks"] == [one.payload.chunks.hex()]


def test_token_ids_of_the_probe_are_bounded(kv_example: Callable[..., Any]) -> None:
    one = kv_example().manifest
    top = replace(one, parity=Parity((2**32 - 1,), (0,), (-0.0,), 0.0))
    assert manifest.decode(manifest.encode(top)).parity == top.parity
    with pytest.raises(ManifestError, match="parity"):
        manifest.encode(replace(one, parity=Parity((2**32,), (0,), (0.0,), 0.0)))
