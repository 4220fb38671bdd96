"""The fallback without calibration: its axis, its sign, its warm-up, and that its result depends on the path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer
from kvferry.sender import registry
from kvferry.sender.kv.qfilters_svd import key_filter
from kvferry.sender.kv.selecting import Subject

METHOD = registry.find("qfilters-svd")
Drain = Callable[..., Any]


def subject_of(keys: Any) -> Subject:
    """A cache of one layer with these keys, [Hk, T, D]; no model is needed."""
    array = mx.array(keys.astype(np.float32))[None]
    cache = PrefixCache((DenseLayer(array, array),), keys.shape[1])
    return Subject(cache, None, [0] * keys.shape[1], None)  # type: ignore[arg-type]


def kept_by(drain: Drain, keys: Any, count: int, **given: Any) -> Any:
    parameters = registry.check_parameters(METHOD, {"recent": 0, **given})
    return drain(METHOD.rank(subject_of(keys), parameters))(count)[0]  # type: ignore[attr-defined]


def random_keys(kv_heads: int = 3, rows: int = 200, dim: int = 32, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((kv_heads, rows, dim)) + 2 * rng.standard_normal((kv_heads, 1, dim))


@pytest.mark.parametrize(("kv_heads", "dim"), [(3, 32), (2, 64), (2, 256)])
def test_the_axis_is_that_of_the_first_keys(qfilter_oracles: Any, drain: Drain, kv_heads: int, dim: int) -> None:
    keys = random_keys(kv_heads, 200, dim).astype(np.float32)
    for head in keys:
        axis = qfilter_oracles.fallback_axis(head, warmup=128)
        found = -key_filter(head[:128], 1)
        assert abs(found @ axis) == pytest.approx(1.0)
        assert (head[:128] @ found).sum() > 0
    plus, minus = (kept_by(drain, keys, 40, sign=sign) for sign in (1, -1))
    for head in range(kv_heads):
        axis = qfilter_oracles.fallback_axis(keys[head], warmup=128)
        along = keys[head] @ axis * np.sign((keys[head][:128] @ axis).sum())
        assert plus[head].tolist() == qfilter_oracles.rows(along, 40).tolist()
        assert minus[head].tolist() == qfilter_oracles.rows(-along, 40).tolist()


def test_a_pure_drift_is_seen_because_nothing_is_centred() -> None:
    keys = np.zeros((128, 4))
    keys[:, 0] = 3.0
    keys[:, 1] = np.tile([1.0, -1.0], 64)
    assert key_filter(keys, 1) == pytest.approx([-1, 0, 0, 0])
    assert key_filter(-keys, 1) == pytest.approx([1, 0, 0, 0])
    assert key_filter(keys, -1) == pytest.approx([1, 0, 0, 0])


def test_only_the_warm_up_shapes_the_axis(drain: Drain) -> None:
    keys = random_keys(rows=160)
    later = keys.copy()
    later[:, 130:] = 50 * np.random.default_rng(5).standard_normal((3, 30, 32))
    first, second = (-key_filter(item[0][:128], 1) for item in (keys, later))
    assert np.array_equal(first, second)
    assert kept_by(drain, keys, 40)[0].tolist() != kept_by(drain, later, 40)[0].tolist()


def path_keys() -> Any:
    """Keys whose first 100 point one way, and the next 100 another, farther."""
    rng = np.random.default_rng(1)
    keys = 0.3 * rng.standard_normal((1, 300, 8))
    keys[:, :100, 0] += 3.0
    keys[:, 100:200, 1] += 9.0
    return keys


def test_the_result_depends_on_the_chunk_that_completes_the_warm_up(drain: Drain) -> None:
    keys = path_keys()
    kept = {chunk: kept_by(drain, keys, 60, warmup=90, mode="incremental", chunk=chunk) for chunk in (30, 45, 90, 200)}
    assert kept[30][0].tolist() == kept[45][0].tolist() == kept[90][0].tolist()
    assert kept[90][0].max() < 100
    assert kept[200][0].min() >= 100
    once = kept_by(drain, keys, 60, warmup=90)
    assert once[0].tolist() == kept[90][0].tolist()


@pytest.mark.parametrize("chunk", [1, 30, 64, 100, 170, 300, 5000])
def test_incremental_agrees_with_the_independent_stream(qfilter_oracles: Any, drain: Drain, chunk: int) -> None:
    keys = random_keys(2, 300, 16).astype(np.float32)
    chunks = [min(chunk, 300 - start) for start in range(0, 300, chunk)]
    found = kept_by(drain, keys, 50, mode="incremental", chunk=chunk, warmup=100, sinks=2, recent=10)
    observed = next(total for total in np.cumsum(chunks) if total >= 100)
    for head in range(2):
        axis = qfilter_oracles.fallback_axis(keys[head], chunks, warmup=100)
        along = keys[head] @ axis * np.sign((keys[head][:observed] @ axis).sum())
        assert found[head].tolist() == qfilter_oracles.rows(along, 50, 10, 2).tolist()


def test_nothing_is_dropped_before_the_warm_up_is_complete(drain: Drain) -> None:
    keys = random_keys(rows=127)
    assert [rows.tolist() for rows in kept_by(drain, keys, 127)] == [list(range(127))] * 3
    for mode in ("one-shot", "incremental"):
        with pytest.raises(
            InvalidRequestError, match=r"^warmup: 128 keys come before anything is dropped.* has 127"
        ) as caught:
            kept_by(drain, keys, 126, mode=mode)
        assert (caught.value.fields["value"], caught.value.fields["tokens"]) == (128, 127)
    assert len(kept_by(drain, random_keys(rows=128), 126)[0]) == 126


@pytest.mark.parametrize("sign", [0, 2, -2, 1.5, "1", True])
def test_any_other_sign_is_refused(sign: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^sign: "):
        registry.check_parameters(METHOD, {"sign": sign})


@pytest.mark.parametrize(("value", "words"), [(np.nan, "not finite"), (0.0, "all of them are 0")])
def test_keys_without_a_direction_are_refused_by_layer(drain: Drain, value: float, words: str) -> None:
    keys = random_keys()
    keys[1] = value
    with pytest.raises(ModelError, match=rf"^layers\.0\.keys: rows: .*{words}"):
        kept_by(drain, keys, 40)
