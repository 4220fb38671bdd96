"""Every method against the dense cache: how faithful, how large, how long. One process, no daemons.

A cell goes the whole road: the method's rule on a reading, a real artifact in a store, and the cache rebuilt from its
bytes as the receiver does it. So bytes are those that would cross, and a rebuilt cache is judged, not the one that was
sent. Both caches then take the document's next tokens, see ``kvferry.ablations.continuation``; the reference is the
dense cache of the same prefix, read with the same chunks.

Methods that send text have no cache to compare and are skipped: their answers are the full context's, or are judged by
tasks.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from kvferry.ablations.harness import runner
from kvferry.ablations.harness.records import Record, RecordFile
from kvferry.ablations.harness.runner import Advance, Skipped
from kvferry.ablations.harness.settings import checked
from kvferry.ablations.methods.continuation import Split, split
from kvferry.ablations.methods.fidelity import Logits, compare
from kvferry.ablations.methods.figures import TURNS, Figures
from kvferry.ablations.methods.grid import Cell, Document, Grid
from kvferry.ablations.methods.planning import plan
from kvferry.core.limits import DEFAULT_CHUNK_BYTES
from kvferry.core.manifest import Model, Scalar
from kvferry.core.progress import finish
from kvferry.core.store import ArtifactStore
from kvferry.engine import model_store
from kvferry.engine.backend import runtime_versions
from kvferry.engine.cache import PrefixCache
from kvferry.engine.model import LoadedModel, load
from kvferry.engine.prompt import DEFAULT_SYSTEM
from kvferry.engine.residency import Residency
from kvferry.receiver import reconstruct
from kvferry.sender.artifacts import Artifact, ArtifactMaker
from kvferry.sender.method import Method
from kvferry.sender.reading import Reading

EXPERIMENT = "methods"


def run(grid: Grid, records: Path, advance: Advance, *, recorded: bool = False) -> list[Record]:
    """Run a grid; finished cells are taken from ``records``.

    Args:
        grid: what to run.
        records: the JSON-lines file.
        advance: told what happens and which share of the whole is done.
        recorded: whether to run nothing and leave out what is not finished.

    Raises:
        InvalidRequestError: naming a parameter that its method does not take, before anything is run.
        ModelError: when a model is not there or cannot be loaded. A cell's own errors are recorded.
        StoreError: when records cannot be read or written.
    """
    grid = plan(grid)
    file = RecordFile(records)
    # The second model's absence must not show after an hour with the first.
    for model in grid.models:
        model_store.resolve(model.name)
    return runner.run(
        [(model.name, grid.cells(model)) for model in grid.models], file, open_bench, advance, recorded=recorded
    )


@contextlib.contextmanager
def open_bench(name: str) -> Iterator[MethodBench]:
    """Load a model and lend it a store for as long as it is used.

    Raises:
        ModelError: when it cannot be loaded.
    """
    model = load(str(model_store.resolve(name)))
    with tempfile.TemporaryDirectory(prefix="kvferry-ablate-") as folder:
        store = ArtifactStore(Path(folder), durable=False)
        try:
            yield MethodBench(model, store)
        finally:
            store.close()
            mx.clear_cache()


@dataclass(frozen=True)
class _Subject:
    """A prefix that was read, and what the dense cache says about its continuation."""

    document: Document
    split: Split
    dense: PrefixCache
    prefill_ms: float
    logits: Logits


@dataclass(frozen=True)
class _Carried:
    artifact: Artifact
    rebuilt: PrefixCache
    reconstruct_ms: float


class MethodBench:
    """Measures methods with one loaded model."""

    def __init__(self, loaded: LoadedModel, store: ArtifactStore) -> None:
        self._loaded = loaded
        self._store = store
        self._residency = Residency(sys.maxsize)
        self._subject: _Subject | None = None

    @property
    def model(self) -> Model:
        """The checkpoint."""
        return self._loaded.profile.model

    @cached_property
    def _maker(self) -> ArtifactMaker:
        return ArtifactMaker(self._loaded, self._store, DEFAULT_CHUNK_BYTES, runtime_versions())

    def measure(self, cell: Cell) -> dict[str, Scalar] | Skipped:
        """Run one cell.

        Raises:
            KvferryError: whatever the method, the model, the document or the store refuses.
        """
        method, parameters = checked(cell.setting)
        if method.info.form != "kv":
            return Skipped(f"{method.info.id} sends {method.info.form}: there is no cache to compare")
        subject = self._read(cell)
        carried = self._carry(method, parameters, subject)
        try:
            return msgspec.structs.asdict(self._figures(method, subject, carried))
        finally:
            self._store.drop(carried.artifact.stored.artifact_id)

    def _carry(self, method: Method[Any], parameters: msgspec.Struct, subject: _Subject) -> _Carried:
        """Make an artifact of a prefix, and rebuild the cache from its bytes."""
        reading = self._reading(subject.split.text, subject.document.question)
        artifact = finish(self._maker.make(method, reading, parameters))
        start = time.perf_counter()
        rebuilt = reconstruct.prefix_cache(artifact.stored.manifest, artifact.stored.sections)
        return _Carried(artifact, rebuilt, _since(start))

    def _figures(self, method: Method[Any], subject: _Subject, carried: _Carried) -> Figures:
        stored, account, rebuilt = carried.artifact.stored, carried.artifact.account, carried.rebuilt
        fidelity = compare(subject.logits, self._logits(rebuilt, subject.split.fed), subject.split.truth)
        first_token_ms, dense_first_token_ms = self._first_tokens(rebuilt, subject)
        payload_bytes, manifest_bytes = stored.manifest.payload.length, len(stored.encoded)
        return Figures(
            artifact=stored.artifact_id.hex(),
            name=method.info.name,
            label=method.info.label,
            aware=method.info.aware,
            dtype=self._loaded.profile.layers[0].dtype,
            prefix_tokens=subject.split.prefix_tokens,
            positions=fidelity.positions,
            kl_mean=fidelity.kl_mean,
            kl_p99=fidelity.kl_p99,
            flip_rate=fidelity.flip_rate,
            delta_nll=fidelity.delta_nll,
            tier=fidelity.tier,
            rows_min=min(rebuilt.row_counts),
            rows_mean=statistics.mean(rebuilt.row_counts),
            rows_max=max(rebuilt.row_counts),
            payload_bytes=payload_bytes,
            manifest_bytes=manifest_bytes,
            dense_bf16_bytes=account.dense_bf16_bytes,
            ratio=account.dense_bf16_bytes / (payload_bytes + manifest_bytes),
            resident_bytes=rebuilt.nbytes,
            prefill_ms=subject.prefill_ms,
            method_ms=account.method_ms,
            encode_ms=account.encode_ms,
            reconstruct_ms=carried.reconstruct_ms,
            first_token_ms=first_token_ms,
            dense_first_token_ms=dense_first_token_ms,
        )

    def _read(self, cell: Cell) -> _Subject:
        """Return the cell's prefix, read now or for the cell before."""
        if self._subject is not None and self._subject.document == cell.document:
            return self._subject
        # The one before goes first: two dense caches and two matrices of logits need not fit.
        self._subject = None
        self._residency = Residency(sys.maxsize)
        cut = split(self._loaded.prompt, cell.document.text, cell.model.prefix_tokens, cell.model.continuation_tokens)
        reading = self._reading(cut.text, cell.document.question)
        dense = finish(reading.prefill())
        self._loaded.check_context(dense.offset, len(cut.fed), 1)
        self._subject = _Subject(cell.document, cut, dense, reading.prefill_ms, self._logits(dense, cut.fed))
        return self._subject

    def _reading(self, text: str, question: str) -> Reading:
        return Reading(self._loaded, self._residency, text, DEFAULT_SYSTEM, question)

    def _logits(self, cache: PrefixCache, fed: tuple[int, ...]) -> Logits:
        """Return float32 logits [N, V] of the tokens on a branch of a cache."""
        logits: Logits = np.array(self._loaded.forward(fed, cache.branch(len(fed))).astype(mx.float32))
        mx.clear_cache()
        return logits

    def _first_tokens(self, rebuilt: PrefixCache, subject: _Subject) -> tuple[float, float]:
        """Return the milliseconds from the question to the first token, on the rebuilt and on the dense cache."""
        ids = self._loaded.prompt.fresh(subject.document.question)
        seen: tuple[list[float], list[float]] = ([], [])
        for _ in range(TURNS):
            for cache, times in zip((rebuilt, subject.dense), seen, strict=True):
                start = time.perf_counter()
                mx.argmax(self._loaded.last_logits(ids, cache.branch(len(ids)))).item()
                times.append(_since(start))
        return statistics.median(seen[0]), statistics.median(seen[1])


def _since(start: float) -> float:
    return (time.perf_counter() - start) * 1000
