"""From a document and a method to a stored artifact, made once and found again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import msgspec

from kvferry.core import json_records
from kvferry.core.digests import digest
from kvferry.core.errors import NotFoundError, StoreError, TooLargeError
from kvferry.core.evidence import References
from kvferry.core.ledger import SenderAccount
from kvferry.core.manifest import (
    MANIFEST_VERSION,
    OUTCOME,
    Consume,
    Encoding,
    Form,
    Manifest,
    Payload,
    Positions,
    Prompt,
    Runtime,
    Section,
)
from kvferry.core.manifest import (
    Method as MethodGroup,
)
from kvferry.core.progress import Progress, Stopwatch
from kvferry.core.store import ArtifactStore
from kvferry.core.stored import Stored
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import instructions
from kvferry.sender import parity
from kvferry.sender.encode import evidence_contents, kv_contents, kv_layout, text_contents
from kvferry.sender.method import DENSE, EvidenceMaterial, KvMaterial, Material, Method, Shaped, TextMaterial
from kvferry.sender.reading import Reading
from kvferry.sender.text.counted import BudgetParameters


@dataclass(frozen=True)
class Artifact:
    """A stored artifact and what making it cost. ``reused`` says that an earlier request made it."""

    stored: Stored
    account: SenderAccount
    reused: bool


class ArtifactMaker:
    """Makes artifacts with one model. Use from the worker thread.

    A request that was served before finds its artifact by a digest of everything that shaped it, so a broken transfer
    resumes without reading the document again.
    """

    def __init__(self, model: LoadedModel, store: ArtifactStore, chunk_bytes: int, versions: Mapping[str, str]) -> None:
        self._model = model
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._runtime = Runtime(versions["kvferry"], versions["mlx"], versions["mlx_lm"], versions["device"])
        self._notes = store.files("made")
        self._remove_stale()

    def make(
        self, method: Method[Any], reading: Reading, parameters: msgspec.Struct, fallback_for: str = ""
    ) -> Generator[Progress, None, Artifact]:
        """Make an artifact, or find the one that the same request made before.

        Args:
            method: the rule.
            reading: the document.
            parameters: the method's own.
            fallback_for: id of the method in whose place this one is used; it becomes part of the artifact, so that
                answers from it can say so.

        Raises:
            KvferryError: whatever the method, the model or the store refuses.
        """
        request = _Request(method, reading, parameters, fallback_for)
        key = self._request_key(request)
        found = self._find(key)
        if found is not None:
            return found
        making = Stopwatch()
        material = yield from making.timing(method.make(reading, parameters))
        yield Progress("encode", 0, 1)
        start = time.perf_counter()
        stored = self._store_material(request, material)
        encode_ms = (time.perf_counter() - start) * 1000
        account = SenderAccount(
            prefill_tokens=reading.prefill_tokens,
            dense_bf16_bytes=reading.prefix.tokens * self._model.profile.dense_bytes_per_token,
            prefill_ms=reading.prefill_ms,
            method_ms=max(making.ms - reading.prefill_ms, 0.0),
            encode_ms=encode_ms,
            transfer_ms=0.0,
        )
        note = msgspec.json.encode(_Note(stored.artifact_id.hex(), account))
        # The note only saves making it again: it must not take the artifact's place.
        with self._store.pinned(stored.artifact_id), contextlib.suppress(StoreError, TooLargeError):
            self._notes.write(key, note)
        yield Progress("encode", 1, 1)
        return Artifact(stored, account, reused=False)

    def find(
        self, method: Method[Any], reading: Reading, parameters: msgspec.Struct, fallback_for: str = ""
    ) -> Artifact | None:
        """Return what ``make`` would find rather than make; None if it would make it."""
        return self._find(self._request_key(_Request(method, reading, parameters, fallback_for)))

    def _find(self, key: bytes) -> Artifact | None:
        try:
            with self._notes.in_use(key) as path:
                entry = _read_note(path)
            artifact_id = bytes.fromhex(entry.artifact)
            if self._store.holds(artifact_id):
                return Artifact(self._store.get(artifact_id), entry.account, reused=True)
        except (OSError, NotFoundError, msgspec.MsgspecError, ValueError):
            return None
        # What was evicted, or put aside as damaged, is made anew.
        self._notes.remove(key)
        return None

    def _remove_stale(self) -> None:
        """Remove the notes that an earlier process left of artifacts that are gone."""
        there = {artifact_id.hex() for artifact_id in self._store.ids()}
        for key in self._notes.digests():
            try:
                stale = _read_note(self._notes.path(key)).artifact not in there
            except (OSError, msgspec.MsgspecError):
                stale = True
            if stale:
                self._notes.remove(key)

    def _request_key(self, request: _Request) -> bytes:
        profile, method, reading = self._model.profile, request.method, request.reading
        parts = [
            MANIFEST_VERSION,
            msgspec.to_builtins(reading.document, builtin_types=(bytes,)),
            reading.system,
            reading.question if method.info.aware else None,
            method.info.id,
            request.fallback_for,
            msgspec.to_builtins(request.parameters),
            msgspec.to_builtins(profile.model, builtin_types=(bytes,)),
            msgspec.to_builtins(profile.tokenizer, builtin_types=(bytes,)),
            profile.prompt_version,
            self._model.prefill_chunk,
            self._chunk_bytes,
            msgspec.to_builtins(self._runtime),
            instructions(),
            list(method.shaped_by(self._model, request.parameters)) if isinstance(method, Shaped) else [],
            reading.counter.vocab if isinstance(request.parameters, BudgetParameters) else None,
        ]
        return digest(msgpack.packb(parts))

    def _store_material(self, request: _Request, material: Material) -> Stored:
        reading = request.reading
        kv_groups: dict[str, Any] = {}
        if isinstance(material, TextMaterial):
            contents = tuple(text_contents(material, reading.system))
        elif isinstance(material, EvidenceMaterial):
            contents = tuple(evidence_contents(material, reading.system))
        else:
            layout = kv_layout(material.cache, reading.prefix.tokens)
            contents = tuple(kv_contents(material.cache, layout, reading.ids))
            kv_groups = self._kv_groups(reading, material) | {"layout": layout}

        def describe(sections: tuple[Section, ...], payload: Payload) -> Manifest:
            plain = self._message_manifest(request, material, sections, payload)
            return msgspec.structs.replace(plain, **kv_groups)

        return self._store.create(contents, self._chunk_bytes, describe)

    def _message_manifest(
        self, request: _Request, material: Material, sections: tuple[Section, ...], payload: Payload
    ) -> Manifest:
        reading = request.reading
        return Manifest(
            version=MANIFEST_VERSION,
            form=_form(material),
            model=None,
            tokenizer=None,
            document=reading.document,
            prompt=Prompt(self._model.profile.prompt_version, digest(reading.system.encode("utf-8"))),
            prefix=None,
            positions=None,
            layout=None,
            method=_method_group(request, material),
            mapper=None,
            encoding=_encoding(material),
            sections=sections,
            payload=payload,
            parity=None,
            runtime=self._runtime,
        )

    def _kv_groups(self, reading: Reading, material: KvMaterial) -> dict[str, Any]:
        profile = self._model.profile
        return {
            "model": profile.model,
            "tokenizer": profile.tokenizer,
            "prefix": reading.prefix,
            "positions": Positions(profile.rope, profile.probe_error),
            "parity": parity.measure(self._model, material.cache, material.bound),
        }


class _Note(msgspec.Struct, frozen=True):
    artifact: str
    account: SenderAccount


def _read_note(path: Path) -> _Note:
    return json_records.decode(path.read_bytes(), _Note)


@dataclass(frozen=True)
class _Request:
    method: Method[Any]
    reading: Reading
    parameters: msgspec.Struct
    fallback_for: str


def _consume(material: Material) -> Consume:
    if isinstance(material, KvMaterial):
        return "inject"
    if isinstance(material, EvidenceMaterial):
        return "look_up" if isinstance(material.message, References) else "prefill"
    return "prefill_once" if material.retain else "prefill"


def _form(material: Material) -> Form:
    if isinstance(material, KvMaterial):
        return "kv"
    if isinstance(material, EvidenceMaterial):
        return "references" if isinstance(material.message, References) else "evidence"
    return "text"


def _encoding(material: Material) -> Encoding:
    if isinstance(material, KvMaterial):
        return material.encoding
    zstd = material.zstd if isinstance(material, TextMaterial) else None
    return msgspec.structs.replace(DENSE, zstd=zstd)


def _method_group(request: _Request, material: Material) -> MethodGroup:
    info = request.method.info
    replaced = {"fallback_for": request.fallback_for} if request.fallback_for else {}
    found = {} if isinstance(material, KvMaterial) else dict(material.outcome)
    if "tokens" in found:
        # A receiver with another tokenizer counts a budget differently.
        found["tokenizer"] = request.reading.counter.vocab.hex()
    outcome = {f"{OUTCOME}{name}": value for name, value in found.items()}
    return MethodGroup(
        id=info.id,
        label=info.label,  # type: ignore[arg-type]  # the schema refuses any other word
        aware=info.aware,
        consume=_consume(material),
        params=msgspec.to_builtins(request.parameters) | outcome | replaced,
        seed=getattr(request.parameters, "seed", None),
        calibration=material.calibration if isinstance(material, KvMaterial) else (),
    )
