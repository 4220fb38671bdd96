"""Q-Filters: scores, the contest, streaming, and the method on tiny models, against the independent rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequestError, ModelError, NotFoundError
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer
from kvferry.engine.model import LoadedModel
from kvferry.sender import registry
from kvferry.sender.calibration import binding, folder
from kvferry.sender.calibration import qfilters as calibration
from kvferry.sender.calibration.qfilters_file import QFilters, Record
from kvferry.sender.kv import streaming
from kvferry.sender.kv.qfilters import filter_scores
from kvferry.sender.kv.selecting import Subject

TEXT = "The access code of the north warehouse is 4417. The ferry carries eleven crates of paper at dawn. " * 4
METHOD = registry.find("qfilters")
Drain = Callable[..., Any]


def random_keys(kv_heads: int, rows: int, dim: int, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((kv_heads, rows, dim)).astype(np.float32), rng.standard_normal((kv_heads, dim))


@pytest.mark.parametrize(("kv_heads", "dim"), [(3, 32), (2, 64), (3, 128), (2, 256)])
def test_scores_and_rows_are_the_independent_ones(qfilter_oracles: Any, kv_heads: int, dim: int) -> None:
    keys, stored = random_keys(kv_heads, 150, dim)
    scores = filter_scores(keys, stored)
    assert scores.dtype == np.float32
    assert np.allclose(scores, qfilter_oracles.scores(keys, stored), rtol=1e-5, atol=1e-5)
    for sinks, recent in ((0, 0), (4, 16), (0, 32)):
        found = streaming.rows_at_once(scores, 50, sinks=sinks, recent=recent)
        for head, rows in enumerate(found):
            assert rows.tolist() == qfilter_oracles.rows(scores[head], 50, recent, sinks).tolist()


def test_inverting_the_stored_sign_keeps_the_lowest_rows() -> None:
    keys, stored = random_keys(2, 40, 32)
    along = -(keys.astype(np.float64) * stored[:, None]).sum(axis=-1)
    right = streaming.rows_at_once(filter_scores(keys, stored), 10, sinks=0, recent=0)
    wrong = streaming.rows_at_once(filter_scores(keys, -stored), 10, sinks=0, recent=0)
    for head in range(2):
        order = np.argsort(along[head])
        assert set(right[head]) == set(order[-10:])
        assert set(wrong[head]) == set(order[:10])


@pytest.mark.parametrize("rows", [1, 2, 7, 128, 500])
def test_a_row_s_score_does_not_depend_on_the_rows_beside_it(rows: int) -> None:
    keys, stored = random_keys(3, 500, 64)
    whole = filter_scores(keys, stored)
    parts = [filter_scores(keys[:, start : start + rows], stored) for start in range(0, 500, rows)]
    assert np.array_equal(np.concatenate(parts, axis=1), whole)


@st.composite
def streams(draw: st.DrawFn) -> tuple[Any, int, int, int, list[int]]:
    """Scores [2, T] with many ties, a budget, sinks, recents, and chunk lengths."""
    chunks = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    rows = sum(chunks)
    values = st.integers(-2, 3) if draw(st.booleans()) else st.floats(-4, 4, width=16)
    scores = [draw(st.lists(values, min_size=rows, max_size=rows)) for _ in range(2)]
    sinks, recent = draw(st.integers(0, 3)), draw(st.integers(0, 6))
    count = sinks + recent + draw(st.integers(1, 8))
    return np.array(scores, dtype=np.float32).reshape(2, rows), count, sinks, recent, chunks


@given(streams())
def test_chunks_change_nothing(qfilter_oracles: Any, stream: tuple[Any, int, int, int, list[int]]) -> None:
    scores, count, sinks, recent, chunks = stream
    rows = scores.shape[1]
    if rows == 0:
        return
    once = streaming.rows_at_once(scores, count, sinks=sinks, recent=recent)
    for lengths in (chunks, [1] * rows, [rows]):
        found = streaming.rows_in_chunks(scores, count, sinks=sinks, recent=recent, chunks=lengths)
        for head in range(2):
            assert found[head].tolist() == once[head].tolist()
            assert found[head].dtype == np.int32
    for head in range(2):
        expected = qfilter_oracles.stream(scores[head], chunks, count, recent, sinks)
        assert once[head].tolist() == expected.tolist()


@given(streams())
def test_the_kept_set_obeys_the_contract(stream: tuple[Any, int, int, int, list[int]]) -> None:
    scores, count, sinks, recent, _ = stream
    rows = scores.shape[1]
    if rows == 0:
        return
    for head, kept in enumerate(streaming.rows_at_once(scores, count, sinks=sinks, recent=recent)):
        assert len(kept) == min(count, rows)
        assert (np.diff(kept) > 0).all()
        assert {*range(min(sinks, rows)), *range(max(rows - recent, 0), rows)} <= set(kept.tolist())
        lost = sorted(set(range(rows)) - set(kept.tolist()))
        contest = [row for row in kept.tolist() if sinks <= row < rows - recent]
        for row in lost:
            assert all((-scores[head, kept_row], kept_row) < (-scores[head, row], row) for kept_row in contest)


def test_equal_scores_keep_the_first_rows() -> None:
    scores = np.zeros((1, 20), dtype=np.float32)
    assert streaming.rows_at_once(scores, 8, sinks=1, recent=3)[0].tolist() == [0, 1, 2, 3, 4, 17, 18, 19]


@pytest.mark.parametrize(("count", "sinks", "recent"), [(8, 4, 4), (8, 0, 9), (1, 1, 0)])
def test_a_budget_that_leaves_nothing_to_choose_is_refused(count: int, sinks: int, recent: int) -> None:
    scores = np.zeros((1, 20), dtype=np.float32)
    for run in (
        lambda: streaming.rows_at_once(scores, count, sinks=sinks, recent=recent),
        lambda: streaming.rows_in_chunks(scores, count, sinks=sinks, recent=recent, chunks=[20]),
    ):
        with pytest.raises(InvalidRequestError, match=f"^budget: {count} rows, but {sinks} sinks and {recent} recent"):
            run()
    # Where every row is kept there is nothing to refuse.
    assert len(streaming.rows_at_once(scores, 20, sinks=20, recent=20)[0]) == 20


def test_chunks_must_cover_the_rows() -> None:
    with pytest.raises(InvalidRequestError, match="^chunks: 19 rows in all, but there are 20"):
        streaming.rows_in_chunks(np.zeros((1, 20), dtype=np.float32), 4, sinks=0, recent=0, chunks=[10, 9])


def test_budgets_above_any_kernel_s_limit_work() -> None:
    scores = np.random.default_rng(0).standard_normal((1, 9000)).astype(np.float32)
    kept = streaming.rows_at_once(scores, 6000, sinks=0, recent=0)[0]
    assert set(kept.tolist()) == set(np.argsort(-scores[0])[:6000].tolist())


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama", layers=2, heads=9, kv_heads=3, head_dim=32)


@pytest.fixture
def stored(model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Filters for the model, saved as "mine" in a folder of this test's own."""
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    bound = binding.describe(model.profile)
    record = Record(1, bound, "negative", "majority", "faithful", 1, 1, 1, 0, 0, "0" * 64)
    filters = np.random.default_rng(3).standard_normal((2, 3, 32)).astype(np.float32)
    calibration = QFilters(record, filters)
    folder.save("mine", calibration)
    return calibration


def subject_of(model: LoadedModel, drain: Drain, calibration: QFilters, tokens: int) -> Subject:
    ids = list(model.prompt.prefix(TEXT))[:tokens]
    return Subject(drain(model.prefill(ids)), model, ids, None, calibration)


def kept_by(model: LoadedModel, drain: Drain, stored: QFilters, count: int, tokens: int = 200, **given: Any) -> Any:
    parameters = registry.check_parameters(METHOD, given)
    return drain(METHOD.rank(subject_of(model, drain, stored, tokens), parameters))(count)  # type: ignore[attr-defined]


def test_the_method_keeps_what_the_rule_keeps(
    model: LoadedModel, drain: Drain, stored: QFilters, qfilter_oracles: Any
) -> None:
    subject = subject_of(model, drain, stored, 200)
    found = kept_by(model, drain, stored, 60, sinks=2, recent=20)
    for layer, heads in enumerate(found):
        scores = qfilter_oracles.scores(np.array(subject.layers[layer].keys[0]), stored.filters[layer])
        for head, rows in enumerate(heads):
            assert rows.tolist() == qfilter_oracles.rows(scores[head], 60, 20, 2).tolist()


@pytest.mark.parametrize("chunk", [1, 7, 64, 199, 4096])
def test_incremental_keeps_the_same_rows_at_any_chunk(
    model: LoadedModel, drain: Drain, stored: QFilters, chunk: int
) -> None:
    once = kept_by(model, drain, stored, 60, recent=16)
    found = kept_by(model, drain, stored, 60, recent=16, mode="incremental", chunk=chunk)
    assert all(
        np.array_equal(one, other)
        for left, right in zip(once, found, strict=True)
        for one, other in zip(left, right, strict=True)
    )


def test_the_digest_travels_and_shapes_the_artifact(workshop: Any, model: LoadedModel, stored: QFilters) -> None:
    shop = workshop(model)
    (folder.qfilters_home() / f"{next(name for name in folder.names() if name != 'mine')}.safetensors").unlink()
    first = shop.make("qfilters", TEXT)
    assert first.stored.manifest.method.calibration == (stored.digest,)
    assert shop.make("qfilters", TEXT).reused
    # Under the same name other filters make another artifact, not the one of before.
    changed = QFilters(stored.record, stored.filters[::-1].copy())
    folder.save("mine", changed)
    second = shop.make("qfilters", TEXT)
    assert not second.reused
    assert second.stored.manifest.method.calibration == (changed.digest,)
    assert second.stored.artifact_id != first.stored.artifact_id
    named = shop.make("qfilters", TEXT, calibration="mine")
    assert named.stored.manifest.method.params["calibration"] == "mine"


def test_methods_without_calibration_say_so(workshop: Any, model: LoadedModel) -> None:
    shop = workshop(model)
    assert shop.make("B3", TEXT).stored.manifest.method.calibration == ()
    assert shop.make("qfilters-svd", TEXT).stored.manifest.method.calibration == ()


def test_without_calibration_nothing_is_read(
    workshop: Any, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = workshop(model)
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(LoadedModel, "prefill", lambda *_: pytest.fail("the document was read"))
    with pytest.raises(NotFoundError, match="kvferry calibrate qfilters --model MODEL --text FILE"):
        shop.make("qfilters", TEXT)


@pytest.mark.parametrize("name", ["../mine", "a/b", "Mine", ".mine"])
def test_a_name_that_is_none_is_refused_by_its_parameter(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^calibration: .*, must be up to 96 of a-z, 0-9"):
        registry.check_parameters(METHOD, {"calibration": name})


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("sinks", -1, "from 0 to 65536"),
        ("recent", -1, "from 0 to 65536"),
        ("chunk", 0, "from 1 to 65536"),
        ("mode", "all", "all"),
        ("recent", 65537, "from 0 to 65536"),
    ],
)
def test_a_bad_parameter_names_itself(name: str, value: Any, word: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        registry.check_parameters(METHOD, {name: value})
    assert caught.value.fields["field"] == name
    assert word in caught.value.message


@pytest.mark.parametrize("recent", [0, 32])
def test_no_recent_rows_is_worth_a_warning(model: LoadedModel, drain: Drain, stored: QFilters, recent: int) -> None:
    with structlog.testing.capture_logs() as logs:
        kept_by(model, drain, stored, 60, recent=recent)
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [entry["event"].startswith("recent is 0") for entry in warnings] == ([True] if recent == 0 else [])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_keys_that_are_not_finite_are_refused(model: LoadedModel, drain: Drain, stored: QFilters, value: float) -> None:
    subject = subject_of(model, drain, stored, 50)
    layer = subject.layers[1]
    keys = np.array(layer.keys)
    keys[0, 2, 7, 5] = value
    broken = PrefixCache((subject.cache.layers[0], DenseLayer(mx.array(keys), layer.values)), 50)
    spoiled = Subject(broken, model, subject.ids, None, stored)
    with pytest.raises(ModelError, match=r"^layers\.1: a score is not finite"):
        drain(METHOD.rank(spoiled, registry.check_parameters(METHOD, {})))  # type: ignore[attr-defined]


def test_a_model_that_attends_in_a_way_of_its_own_is_not_calibrated(model: LoadedModel, drain: Drain) -> None:
    """The queries that would be seen are not proven to be those of its attention."""
    other = replace(model, profile=replace(model.profile, attention="it has a mask of its own"))
    with pytest.raises(ModelError, match="^model: .* does not show its queries: it has a mask of its own"):
        drain(calibration.calibrate(other, ["The ferry leaves at dawn. " * 200], calibration.Request(tokens=64)))


def test_a_byte_budget_is_met_although_small_ones_leave_nothing_to_choose(workshop: Any, model: LoadedModel) -> None:
    shop = workshop(model)
    stored = shop.make("qfilters", TEXT, budget="60KB", recent=8).stored
    assert stored.manifest.payload.length <= 60_000
    assert 9 <= stored.manifest.layout[0].rows < stored.manifest.prefix.tokens
    with pytest.raises(InvalidRequestError, match=r"^budget: 3000 bytes do not suffice .*none is left to choose"):
        shop.make("qfilters", TEXT, budget="3000B", recent=32)
