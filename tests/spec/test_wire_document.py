"""docs/wire.md stands on its own: a reader written from it alone reads and refuses what kvferry does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from blake3 import blake3
from loading import load
from tokenizers import Tokenizer, models

from kvferry.core import container, evidence
from kvferry.core.container import header, raw_section, write_payload
from kvferry.core.limits import MIN_CHUNK_BYTES
from kvferry.core.store import ArtifactStore
from kvferry.core.stored import Stored
from kvferry.engine.content import ContentEncoder
from kvferry.engine.fingerprint import describe_tokenizer
from kvferry.engine.model import LoadedModel
from kvferry.engine.residency import Residency
from kvferry.sender import registry
from kvferry.sender.artifacts import ArtifactMaker
from kvferry.sender.reading import Reading

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {"kvferry": "0", "mlx": "0", "mlx_lm": "0", "device": "cpu"}
TEXT = "Gate 7 opens at 06:40; gate 1 does not. Ключ 🗝 in room 208.\r\n" * 3


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    return load("spec/wire_reader.py")


@pytest.fixture(scope="module")
def made(
    tiny_model: Callable[..., LoadedModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Stored]]:
    model = tiny_model("llama", seed=5, layers=2)
    store = ArtifactStore(tmp_path_factory.mktemp("spec"))
    maker = ArtifactMaker(model, store, MIN_CHUNK_BYTES, VERSIONS)

    def make(method_id: str) -> Stored:
        method = registry.find(method_id)
        reading = Reading(model, Residency(2**30), TEXT, "Be brief.", None)
        # A random model writes long before its first fact is whole.
        given = {"budget": 400} if method_id in ("A5", "A6") else {}
        steps = maker.make(method, reading, registry.check_parameters(method, given))
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                stored: Stored = stop.value.stored
                return stored

    yield make
    store.close()


@pytest.mark.parametrize("method", ["A0", "A1", "A2", "A3", "A4", "A7", "B0", "B1"])
def test_the_reader_decodes_every_method(reader: Any, made: Callable[[str], Stored], method: str) -> None:
    stored = made(method)
    artifact_id, manifest = reader.read_manifest(stored.encoded)
    assert artifact_id == stored.artifact_id
    arrays = reader.read_payload(manifest, stored.payload_path.read_bytes())
    assert list(arrays) == [section.name for section in stored.manifest.sections]
    if method in ("A1", "A7", "B0"):
        assert arrays["document.text"].tobytes().decode() == TEXT
    if method == "A0":
        assert list(arrays) == ["prompt.system"]
    if method in ("A2", "A3", "A4"):
        _, text, spans = arrays.values()
        written = text.tobytes().decode()
        for at, start, end in spans.tolist():
            assert written[at : at + end - start] == TEXT[start:end] != ""
        assert (len(spans) > 0) is (method != "A4")


@pytest.mark.parametrize("method", ["A5", "A6"])
def test_the_reader_decodes_evidence(reader: Any, made: Callable[[str], Stored], method: str) -> None:
    stored = made(method)
    _, manifest = reader.read_manifest(stored.encoded)
    arrays = reader.read_payload(manifest, stored.payload_path.read_bytes())
    message, places = reader.read_evidence(manifest, arrays)
    facts = message["facts"] if method == "A5" else message["references"]
    assert len(facts) == len(places) == manifest["method"]["params"]["outcome.facts"]
    assert all(TEXT[start:end].strip() for spans in places for start, end in spans)


def test_the_golden_message_of_the_document_is_what_is_written(reader: Any) -> None:
    document = (ROOT / "docs" / "wire.md").read_text("utf-8")
    shown = re.findall(r"^    (\{\"(?:facts|references)\".*(?:\n    .+)*)$", document, re.MULTILINE)
    golden = [re.sub(r"\n +", "", one).encode() for one in shown]
    found = evidence.evidence_from_bytes("golden", golden[0], 46)
    assert [evidence.to_bytes(found), evidence.to_bytes(evidence.references(found))] == golden
    arrays = {"document.evidence": np.frombuffer(golden[0], dtype="u1")}
    _, places = reader.read_evidence({"document": {"characters": 46}}, arrays)
    assert places == [[[3, 9], [40, 46]]]


def test_the_reader_decodes_the_cache_that_the_model_computed(
    reader: Any, made: Callable[[str], Stored], tiny_model: Callable[..., LoadedModel]
) -> None:
    model = tiny_model("llama", seed=5, layers=2)
    stored = made("B1")
    arrays = reader.read_payload(reader.read_manifest(stored.encoded)[1], stored.payload_path.read_bytes())
    ids = model.prompt.prefix(TEXT, "Be brief.")
    assert arrays["prefix.ids"].tolist() == ids
    cache = model.model.make_cache()
    for start in range(0, len(ids), model.prefill_chunk):
        model.model(mx.array(ids[start : start + model.prefill_chunk])[None], cache=cache)
    for index, layer in enumerate(cache):
        keys, values = layer.keys_and_values()
        np.testing.assert_array_equal(arrays[f"layers.{index}.keys"], np.array(keys[0]))
        np.testing.assert_array_equal(arrays[f"layers.{index}.values"], np.array(values[0]))


def test_the_reader_refuses_every_changed_byte(reader: Any, made: Callable[[str], Stored]) -> None:
    stored = made("A7")
    payload = bytearray(stored.payload_path.read_bytes())
    _, manifest = reader.read_manifest(stored.encoded)
    for place in range(len(payload)):
        payload[place] ^= 1
        with pytest.raises(reader.RefusedError):
            reader.read_payload(manifest, bytes(payload))
        payload[place] ^= 1
    for end in range(len(payload)):
        with pytest.raises(reader.RefusedError):
            reader.read_payload(manifest, bytes(payload[:end]))


def test_the_reader_is_short_and_knows_nothing_of_ours() -> None:
    text = Path(__file__).with_name("wire_reader.py").read_text()
    assert len(text.splitlines()) <= 165
    assert "import kvferry" not in text
    assert "from kvferry" not in text


def test_the_golden_tokenizer_of_the_document_is_one_and_has_its_digest() -> None:
    document = (ROOT / "docs" / "wire.md").read_text("utf-8")
    shown = re.search(r"^    (\[\{\"added_tokens\".*(?:\n    .+)*)$", document, re.MULTILINE)
    digest = re.search(r"^Its digest is `([0-9a-f]{64})`", document, re.MULTILINE)
    assert shown is not None
    assert digest is not None
    description = re.sub(r"\n +", "", shown[1]).encode()
    assert blake3(description).hexdigest() == digest[1]
    encoder = ContentEncoder(description)
    assert encoder.vocab.hex() == digest[1]
    assert encoder.encode("abba") == [2, 1, 0]
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    assert describe_tokenizer(SimpleNamespace(backend_tokenizer=backend, eos_token_ids={0})) == description


def test_the_golden_payload_of_the_document_is_what_is_written() -> None:
    document = (ROOT / "docs" / "wire.md").read_text("utf-8")
    golden = document[document.index("## 7. Golden bytes") :]
    shown_header = re.search(r"^    (\{\"prompt.system\".*\})$", golden, re.MULTILINE)
    length = re.search(r"is (\d+) bytes", golden)
    assert shown_header is not None
    assert length is not None
    contents = [raw_section(container.SYSTEM, "U8", (1,), b"S"), raw_section(container.TEXT, "U8", (2,), b"hi")]
    written = header(contents) + b"".join(bytes(content.data) for content in contents)
    expected = bytes.fromhex("8800000000000000") + shown_header.group(1).encode().ljust(136) + bytes.fromhex("536869")
    assert written == expected
    assert len(written) == int(length.group(1))
    sections, payload = write_payload(contents, lambda _: None, MIN_CHUNK_BYTES)
    for shown in (payload.digest, *(section.digest for section in sections)):
        assert shown.hex() in golden
