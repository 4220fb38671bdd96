"""The experiment with a tiny model: an exact method, one that loses rows, and one that is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from msgspec import Meta

from kvferry.ablations.harness import provenance
from kvferry.ablations.harness.provenance import Provenance
from kvferry.ablations.harness.records import Failure, Record
from kvferry.ablations.harness.settings import Setting
from kvferry.ablations.methods import bench as methods
from kvferry.ablations.methods.continuation import split
from kvferry.ablations.methods.figures import Figures
from kvferry.ablations.methods.grid import Document, Grid, ModelEntry
from kvferry.ablations.methods.planning import plan
from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.model import LoadedModel
from kvferry.sender import registry
from kvferry.sender.method import KvMaterial
from kvferry.sender.reading import Reading

TEXT = "The access code of the north warehouse is 4417. The ferry leaves at dawn with eleven crates of paper. " * 9
QUESTION = "Who keeps the keys?"
FED = 20
PREFIX = 150


class EveryParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: Annotated[int, Meta(ge=1)] = 2


class EveryFew:
    """Keeps every ``step``-th row and the last; notes what it was given."""

    info = MethodInfo("T1", "every-few", "kv", "custom", aware=True, source="", summary="")
    parameters = EveryParameters

    def __init__(self) -> None:
        self.readings: list[Reading] = []

    def make(self, reading: Reading, parameters: EveryParameters) -> Generator[Progress, None, KvMaterial]:
        self.readings.append(reading)
        cache = yield from reading.prefill()
        if parameters.step > 100:
            raise InvalidRequestError("step: too long", field="step")
        rows = mx.array(kept_rows(cache.offset, parameters.step), dtype=mx.int32)
        heads = [[rows] * layer.kv_heads for layer in cache.layers]
        return KvMaterial(cache.select(heads))


def kept_rows(count: int, step: int) -> list[int]:
    return sorted({*range(0, count, step), count - 1})


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama", heads=6, kv_heads=3, head_dim=8, layers=3)


@pytest.fixture
def entry(tiny_model_dir: Callable[..., Path]) -> ModelEntry:
    path = tiny_model_dir("llama", heads=6, kv_heads=3, head_dim=8, layers=3)
    return ModelEntry(str(path), PREFIX, FED)


@pytest.fixture(autouse=True)
def unchanged_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that nobody edits a file between two runs: a cell is one of the code that ran it."""
    origin = Provenance("abc", "a processor", 2, "cpu", "Linux", {"kvferry": "1"})
    monkeypatch.setattr(provenance, "here", lambda: origin)


@pytest.fixture
def lossy(monkeypatch: pytest.MonkeyPatch) -> EveryFew:
    method = EveryFew()
    monkeypatch.setattr(registry, "METHODS", (*registry.METHODS, method))
    return method


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, model: LoadedModel) -> list[str]:
    """Lend the experiment the loaded model, and return the list of what it asked for."""
    asked: list[str] = []
    monkeypatch.setattr(methods, "load", lambda source: (asked.append(source), model)[1])
    return asked


@pytest.fixture
def run(tmp_path: Path, entry: ModelEntry, loads: list[str]) -> Callable[..., list[Record]]:
    """Return a function that runs settings on the tiny model."""

    def start(
        *settings: Setting, text: str = TEXT, advance: Callable[[str, float], None] | None = None
    ) -> list[Record]:
        grid = Grid((entry,), (Document("crates", text, QUESTION),), settings)
        return methods.run(grid, tmp_path / "records.jsonl", advance or (lambda _text, _share: None))

    return start


def figures(record: Record) -> Figures:
    assert record.status == "done", record.failure
    return msgspec.convert(record.figures, Figures)


def log_softmax(logits: Any) -> Any:
    shifted = np.asarray(logits, np.float64)
    shifted = shifted - shifted.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def test_the_exact_method_differs_in_nothing(run: Callable[..., list[Record]], model: LoadedModel) -> None:
    (record,) = run(Setting("B1"))
    found = figures(record)
    assert (found.kl_mean, found.kl_p99, found.flip_rate, found.delta_nll) == (0.0, 0.0, 0.0, 0.0)
    assert (found.tier, found.positions, found.name, found.label, found.aware) == (
        "good",
        FED,
        "serialised",
        "custom",
        False,
    )
    tokens = found.prefix_tokens
    assert PREFIX - 4 <= tokens <= PREFIX
    assert found.rows_min == found.rows_mean == found.rows_max == tokens
    # K and V of 3 layers with 3 heads of 8, in float32 here and in bf16 for the yardstick.
    assert found.resident_bytes == 2 * 3 * 3 * 8 * tokens * 4
    assert found.dense_bf16_bytes == 2 * 3 * 3 * 8 * tokens * 2
    assert found.payload_bytes > found.resident_bytes + 4 * tokens
    assert found.manifest_bytes > 0
    assert found.ratio == found.dense_bf16_bytes / (found.payload_bytes + found.manifest_bytes)
    assert found.dtype == "F32"
    for name in ("prefill_ms", "encode_ms", "reconstruct_ms", "first_token_ms", "dense_first_token_ms"):
        assert getattr(found, name) > 0


def test_lost_rows_are_judged_on_the_documents_own_next_tokens(
    run: Callable[..., list[Record]], lossy: EveryFew, model: LoadedModel
) -> None:
    """The oracle is plain mlx-lm: one pass over prefix and continuation, and attention with a mask over lost rows."""
    (record,) = run(Setting("T1", (("step", 3),)))
    found = figures(record)
    cut = split(model.prompt, TEXT, PREFIX, FED)
    whole = model.prompt.prefix(TEXT)
    tokens = [*whole[: cut.prefix_tokens + FED]]
    full = np.array(model.model(mx.array([tokens]), cache=make_prompt_cache(model.model))[0, -FED:])
    kept = kept_rows(cut.prefix_tokens, 3)
    lost = np.array(masked_logits(model, tokens, cut.prefix_tokens, kept))
    ours, theirs = log_softmax(full), log_softmax(lost)
    truth = whole[cut.prefix_tokens + 1 : cut.prefix_tokens + FED + 1]
    each = (np.exp(ours) * (ours - theirs)).sum(axis=1)
    rows = np.arange(FED)
    assert found.kl_mean == pytest.approx(each.mean(), abs=1e-4)
    assert found.kl_mean > 0.05
    assert found.kl_p99 == pytest.approx(each.max(), abs=1e-3)
    assert found.flip_rate == np.mean(full.argmax(axis=1) != lost.argmax(axis=1))
    assert found.delta_nll == pytest.approx((ours - theirs)[rows, truth].mean(), abs=1e-4)
    assert found.tier == "poor"
    assert found.rows_min == found.rows_max == len(kept)
    # The held positions count as well.
    assert found.resident_bytes == len(kept) * 3 * 3 * (2 * 8 * 4 + 4)


def masked_logits(model: LoadedModel, tokens: list[int], prefix: int, kept: list[int]) -> mx.array:
    """Read the prefix, then the rest with a boolean mask that hides the rows that are not kept."""
    cache = make_prompt_cache(model.model)
    model.model(mx.array([tokens[:prefix]]), cache=cache)
    fresh = len(tokens) - prefix
    mask = np.tril(np.ones((fresh, len(tokens)), bool), k=prefix)
    mask[:, [row for row in range(prefix) if row not in kept]] = False
    body = model.model.model
    hidden = body.embed_tokens(mx.array([tokens[prefix:]]))
    for layer, held in zip(body.layers, cache, strict=True):
        hidden = layer(hidden, mx.array(mask), held)
    return body.embed_tokens.as_linear(body.norm(hidden))[0]


def test_the_method_reads_the_prefix_once_and_sees_the_question(
    run: Callable[..., list[Record]], lossy: EveryFew, model: LoadedModel
) -> None:
    records = run(Setting("T1"), Setting("T1", (("step", 4),)))
    assert [reading.question for reading in lossy.readings] == [QUESTION, QUESTION]
    assert [reading.prefill_tokens for reading in lossy.readings] == [0, 0]
    assert {reading.text for reading in lossy.readings} == {split(model.prompt, TEXT, PREFIX, FED).text}
    first, second = map(figures, records)
    assert first.prefill_ms == second.prefill_ms > 0
    assert first.rows_max > second.rows_max
    assert first.payload_bytes > second.payload_bytes
    assert len({first.artifact, second.artifact}) == 2


def test_a_finished_cell_is_not_run_again(run: Callable[..., list[Record]], lossy: EveryFew, tmp_path: Path) -> None:
    settings = (Setting("B1"), Setting("T1"))
    before = run(*settings)
    lines = (tmp_path / "records.jsonl").read_bytes()
    assert run(*settings) == before
    assert len(lossy.readings) == 1
    assert (tmp_path / "records.jsonl").read_bytes() == lines
    # A torn line is a cell that did not finish.
    (tmp_path / "records.jsonl").write_bytes(lines[:-3])
    again = run(*settings)
    assert len(lossy.readings) == 2
    assert again[0] == before[0]
    assert again[1].figures["kl_mean"] == before[1].figures["kl_mean"]
    assert len((tmp_path / "records.jsonl").read_bytes().splitlines()) == 2


def test_a_cell_that_fails_is_recorded_and_run_again_and_the_run_goes_on(
    run: Callable[..., list[Record]], lossy: EveryFew, tmp_path: Path
) -> None:
    settings = (Setting("T1", (("step", 101),)), Setting("nobody"), Setting("B1"))
    for turn in (1, 2):
        refused, unknown, exact = run(*settings)
        assert refused.failure == Failure("INVALID_REQUEST", "step: too long")
        assert unknown.failure is not None
        assert unknown.failure.code == "UNKNOWN_METHOD"
        assert (refused.status, unknown.status, exact.status) == ("failed", "failed", "done")
        assert len(lossy.readings) == turn
    kept = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text("utf-8").splitlines()]
    assert [item["status"] for item in kept] == ["failed", "failed", "done", "failed", "failed"]


def test_a_star_is_every_method_that_sends_a_cache_and_takes_the_parameters(
    run: Callable[..., list[Record]], lossy: EveryFew
) -> None:
    stepped = run(Setting("*", (("step", 2),)), Setting("T1", (("step", 2),)))
    assert [(record.method, record.parameters) for record in stepped] == [("T1", {"step": 2})]
    assert len(lossy.readings) == 1
    with pytest.raises(InvalidRequestError, match=r"^method: '\*': no method takes the parameters stride$"):
        run(Setting("*", (("stride", 2),)))


def test_a_plan_names_every_method_and_keeps_the_order(lossy: EveryFew, entry: ModelEntry) -> None:
    documents = (Document("crates", TEXT, QUESTION),)
    planned = plan(Grid((entry,), documents, (Setting("A1"), Setting("*"), Setting("nobody"))))
    kv = [method.info.id for method in registry.METHODS if method.info.form == "kv"]
    assert kv[-1] == "T1"
    assert [setting.method for setting in planned.settings] == ["A1", *kv, "nobody"]


def test_a_wrong_parameter_stops_the_run_before_anything_is_loaded(
    run: Callable[..., list[Record]], lossy: EveryFew, loads: list[str], tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=r"^stride: method T1 has no such parameter; it takes step$"):
        run(Setting("B1"), Setting("T1", (("stride", 2),)))
    with pytest.raises(InvalidRequestError, match=r"^step: 0, must be a whole number from 1"):
        run(Setting("T1", (("step", 0),)))
    assert loads == []
    assert not (tmp_path / "records.jsonl").exists()


def test_methods_that_send_text_are_skipped_and_say_why(run: Callable[..., list[Record]]) -> None:
    records = run(Setting("A1"), Setting("B0"))
    assert [record.status for record in records] == ["skipped", "skipped"]
    assert records[1].reason == "B0 sends text: there is no cache to compare"
    assert records[1].figures == {}


def test_a_document_that_is_too_short_fails_its_cells_only(tmp_path: Path, entry: ModelEntry, loads: list[str]) -> None:
    documents = (Document("short", "Too short.", QUESTION), Document("crates", TEXT, QUESTION))
    short, long = methods.run(Grid((entry,), documents, (Setting("B1"),)), tmp_path / "r", lambda *_: None)
    assert short.failure is not None
    assert short.failure.message.startswith("document: ")
    assert figures(long).kl_mean == 0.0


def test_a_model_that_is_not_there_stops_the_run_before_it_begins(
    tmp_path: Path, entry: ModelEntry, loads: list[str]
) -> None:
    grid = Grid((entry, ModelEntry("./nowhere", 9, 9)), (Document("crates", TEXT, QUESTION),), (Setting("B1"),))
    with pytest.raises(ModelError, match="nowhere"):
        methods.run(grid, tmp_path / "r", lambda *_: None)
    assert loads == []


def test_documents_do_not_mix(tmp_path: Path, entry: ModelEntry, loads: list[str], lossy: EveryFew) -> None:
    """The same cells in another company give the same figures."""
    first, second = Document("one", TEXT, QUESTION), Document("two", TEXT.upper(), QUESTION)
    both = Grid((entry,), (first, second), (Setting("T1"), Setting("T1", (("step", 5),))))
    together = methods.run(both, tmp_path / "together", lambda *_: None)
    alone = methods.run(replace(both, documents=(second,)), tmp_path / "alone", lambda *_: None)
    assert [item.figures["kl_mean"] for item in together[2:]] == [item.figures["kl_mean"] for item in alone]
    assert together[0].figures["kl_mean"] != together[2].figures["kl_mean"]


def test_progress_goes_forward_to_the_end_and_names_the_cell(run: Callable[..., list[Record]]) -> None:
    seen: list[tuple[str, float]] = []
    run(Setting("B1"), Setting("B0"), advance=lambda text, share: seen.append((text, share)))
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert any("crates: B1" in text for text, _ in seen)


def test_nothing_is_left_in_the_temporary_directory(
    run: Callable[..., list[Record]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    run(Setting("B1"))
    assert list(folder.iterdir()) == []


def test_of_what_is_recorded_nothing_is_run(
    run: Callable[..., list[Record]], entry: ModelEntry, tmp_path: Path
) -> None:
    before = run(Setting("B1"))
    file = tmp_path / "records.jsonl"
    kept = file.read_bytes()
    grid = Grid((entry,), (Document("crates", TEXT, QUESTION),), (Setting("B1"), Setting("B3", (("budget", 8),))))
    assert methods.run(grid, file, lambda *_: None, recorded=True) == before
    assert file.read_bytes() == kept
