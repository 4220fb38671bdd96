"""A second implementation of docs/wire.md, sections 1 to 3: reads, verifies and decodes an artifact.

Written from the document alone, on purpose without anything of kvferry. Needs msgpack, blake3, zstandard and numpy.
"""

import json
import math
import struct

import msgpack
import numpy as np
import zstandard
from blake3 import blake3

DTYPES = {"U8": "u1", "I32": "<i4", "U32": "<u4", "F16": "<f2", "BF16": "<u2", "F32": "<f4"}
TOP = ["version", "form", "model", "tokenizer", "document", "prompt", "prefix", "positions", "layout", "method"]
TOP += ["mapper", "encoding", "sections", "payload", "parity", "runtime"]
KV_ONLY = ("model", "tokenizer", "prefix", "positions", "layout", "parity")


class RefusedError(Exception):
    """The bytes are not an artifact."""


def require(holds, what):
    if not holds:
        raise RefusedError(what)


def digest(data):
    return blake3(data).digest()


def read_manifest(data):
    """Section 2. Returns (artifact id, manifest as plain values)."""
    require(len(data) <= 2 * 1024 * 1024, "manifest over 2 MiB")
    try:
        manifest = msgpack.unpackb(data, raw=False, strict_map_key=True)
        json.dumps(manifest, allow_nan=False, default=bytes.hex)
    except (TypeError, ValueError, msgpack.UnpackException) as error:
        raise RefusedError(f"not MessagePack, or a number that is not finite: {error}") from error
    require(isinstance(manifest, dict) and list(manifest) == TOP, "keys or their order")
    require(manifest["version"] == 1 and manifest["version"] is not True, "version")
    # What msgpack writes for ordered maps: shortest integers, float64, bin.
    require(msgpack.packb(manifest, use_bin_type=True) == data, "not canonical")
    kv = manifest["form"] == "kv"
    require(manifest["form"] in ("text", "evidence", "references", "kv"), "form")
    for group in KV_ONLY:
        require((manifest[group] is not None) == kv, f"group {group} does not fit the form")
    require(kv or manifest["mapper"] is None, "mapper does not fit the form")
    consume = {
        "kv": ["inject"],
        "references": ["look_up"],
        "evidence": ["prefill"],
        "text": ["prefill", "prefill_once"],
    }
    require(manifest["method"]["consume"] in consume[manifest["form"]], "method.consume does not fit the form")
    require(list(manifest["method"]["params"]) == sorted(manifest["method"]["params"]), "params out of order")
    return digest(data), manifest


def expected_header(sections):
    """Section 3: the only header that these sections allow."""
    entries, start = {}, 0
    for section in sections:
        end = start + section["length"]
        entries[section["name"]] = {"dtype": section["dtype"], "shape": section["shape"], "data_offsets": [start, end]}
        start = end
    require(len(entries) == len(sections), "a section appears twice")
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_payload(manifest, data):
    """Section 3: verify every byte and return {section name: numpy array}; bf16 stays its 16-bit words."""
    sections, payload = manifest["sections"], manifest["payload"]
    size, table = payload["chunk_size"], payload["chunks"]
    require(1024 <= size <= 2 * 1024 * 1024 and len(table) % 32 == 0, "chunk size or table")
    require(len(data) == payload["length"], "payload length")
    require(digest(table) == payload["digest"], "payload digest")
    header = expected_header(sections)
    require(data[: len(header)] == header, "header")
    place, used = check_chunks(data, 0, len(header), size, table, 0)
    arrays = {}
    for section in sections:
        shape = section["shape"]
        width = np.dtype(DTYPES[section["dtype"]]).itemsize
        require(math.prod(shape) * width == section["length"], f"{section['name']}: length")
        start, first = place, used
        place, used = check_chunks(data, place, section["length"], size, table, used)
        require(digest(table[first * 32 : used * 32]) == section["digest"], f"{section['name']}: digest")
        arrays[section["name"]] = decode(section, data[start:place])
    require(place == len(data) and used * 32 == len(table), "bytes or digests left over")
    return arrays


def check_chunks(data, place, length, size, table, used):
    end = place + length
    while place < end:
        chunk = data[place : min(place + size, end)]
        require(digest(chunk) == table[used * 32 : used * 32 + 32], f"chunk {used}")
        place, used = place + len(chunk), used + 1
    return place, used


def decode(section, stored):
    if section["encoding"] == "zstd":
        decoded = section["decoded"]
        require(section["dtype"] == "U8" and len(section["shape"]) == 1, f"{section['name']}: zstd is U8")
        require(zstandard.frame_content_size(stored) == decoded["length"], f"{section['name']}: declared size")
        decoder = zstandard.ZstdDecompressor().decompressobj()
        content = decoder.decompress(stored)
        require(decoder.eof and not decoder.unused_data, f"{section['name']}: not one whole frame")
        require(digest(content) == decoded["digest"], f"{section['name']}: content")
        return np.frombuffer(content, dtype="u1")
    require(section["encoding"] == "raw" and section["decoded"] is None, f"{section['name']}: encoding")
    return np.frombuffer(stored, dtype=DTYPES[section["dtype"]]).reshape(section["shape"])


def read_cache(manifest, arrays):
    """Section 3: for every layer and KV head (positions [R], keys [R, Dk], values [R, Dv]); the numbers are float32."""
    encoding, cache = manifest["encoding"], []
    for index, layer in enumerate(manifest["layout"]):
        counts = layer["head_rows"] or [layer["rows"]] * layer["kv_heads"]
        held = arrays.get(f"layers.{index}.positions", np.arange(layer["rows"]))
        held = held.reshape(-1) if layer["positions"] == "explicit" else np.tile(held, len(counts))
        parts = [np.split(held, np.cumsum(counts)[:-1])]
        for rows in parts[0]:
            require(rows[0] >= 0 and rows[-1] < layer["offset"] and (np.diff(rows) > 0).all(), f"positions of {index}")
        for part, axis in (("key", encoding["key_axis"]), ("value", "token")):
            packed = (layer[f"packed_{part}s"], encoding[f"{part}_bits"], encoding[f"{part}_group"], axis)
            rows = read_rows(f"layers.{index}.{part}s", arrays, *packed)
            parts.append(np.split(rows.reshape(-1, layer[f"{part}_dim"]), np.cumsum(counts)[:-1]))
        cache.append(list(zip(*parts, strict=True)))
    return cache


def read_evidence(manifest, arrays):
    """Section 3: the message of evidence or references, and for every fact the places that it may stand at."""
    (data,) = (arrays[name].tobytes() for name in ("document.evidence", "document.references") if name in arrays)
    message = json.loads(data)
    require(json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode() == data, "not the one form")
    facts = message.get("facts", message.get("references"))
    places = [fact["spans"] if "spans" in fact else [[fact["start"], fact["end"]]] for fact in facts]
    for spans in places:
        ends = [-1, *(at for span in spans for at in span[:1]), manifest["document"]["characters"]]
        require(all(start < end <= ends[-1] for start, end in spans) and sorted(ends) == ends, "places")
    return message, places


def read_rows(name, arrays, packed, bits, group, axis):
    if not packed:
        return real(arrays[name])
    words = arrays[f"{name}.codes"]
    stream = np.unpackbits(words.view("u1"), axis=-1, bitorder="little")
    codes = stream.reshape(*words.shape[:-1], -1, bits) @ (1 << np.arange(bits))
    scales, biases = (np.repeat(real(arrays[f"{name}.{part}"]), group, axis=-1) for part in ("scales", "biases"))
    rows = (scales * codes + biases).astype("f4")
    rows = rows.swapaxes(1, 2) if axis == "channel" else rows
    return np.concatenate([rows, real(arrays[f"{name}.tail"])], axis=1) if f"{name}.tail" in arrays else rows


def real(array):
    return (array.astype("u4") << 16).view("f4") if array.dtype == "u2" else array.astype("f4")
