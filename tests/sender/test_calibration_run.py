"""Calibrating tiny models: which queries are seen, which texts are read, what the record says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from kvferry.core.errors import ContextOverflowError, InvalidRequestError, ModelError
from kvferry.engine.content import ContentEncoder
from kvferry.engine.model import LoadedModel
from kvferry.sender.calibration import binding, corpus, qfilters, qfilters_file
from kvferry.sender.calibration.corpus import Corpus
from kvferry.sender.calibration.qfilters import Request

TEXTS = (
    "The ferry carries eleven crates of paper at dawn, and returns when the tide allows it. " * 12,
    "Every crate that arrives is weighed, counted and entered in the ledger before noon; 門 🚢. " * 9,
)
REQUEST = Request(tokens=160, sequences=4, rows=300)
Drain = Callable[..., Any]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model(request.param, layers=2, heads=6, kv_heads=2, head_dim=16)


def encoded(model: LoadedModel, text: str) -> tuple[int, ...]:
    return tuple(ContentEncoder.of(model.tokenizer).encode(text))


def first_layer_queries(model: LoadedModel, ids: tuple[int, ...], *, rotated: bool = True) -> Any:
    """Work the first layer's queries out from its parts: [H, N, D]."""
    block = model.model.model.layers[0]
    attention = block.self_attn
    hidden = block.input_layernorm(model.model.model.embed_tokens(mx.array([list(ids)])))
    queries = attention.q_proj(hidden).reshape(1, len(ids), 6, 16)
    if hasattr(attention, "q_norm"):
        queries = attention.q_norm(queries)
    queries = queries.transpose(0, 2, 1, 3)
    return np.array((attention.rope(queries) if rotated else queries)[0])


def test_rows_are_the_queries_that_stand_in_the_attention(model: LoadedModel, drain: Drain) -> None:
    first, second = encoded(model, TEXTS[0])[:150], encoded(model, TEXTS[1])[:90]
    chosen = np.array([0, 3, 149, 150, 151, 200, 239])
    found = drain(qfilters.query_rows(model, Corpus((first, second)), chosen))
    joined = np.concatenate([first_layer_queries(model, first), first_layer_queries(model, second)], axis=1)
    assert [layer.shape for layer in found] == [(6, 7, 16)] * 2
    assert np.allclose(found[0], joined[:, chosen], atol=1e-5)
    plain = first_layer_queries(model, first, rotated=False)
    assert not np.allclose(found[0][:, 2], plain[:, 149], atol=0.05)


def test_chunks_of_the_reading_change_nothing_that_is_seen(model: LoadedModel, drain: Drain) -> None:
    ids = encoded(model, TEXTS[0])[:150]
    chosen = np.arange(0, 150, 7)
    whole = drain(qfilters.query_rows(model, Corpus((ids,)), chosen))
    parts = drain(qfilters.query_rows(replace(model, prefill_chunk=31), Corpus((ids,)), chosen))
    for one, other in zip(whole, parts, strict=True):
        assert np.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("sign", ["majority", "sum"])
def test_filters_are_those_of_the_chosen_rows(
    model: LoadedModel, drain: Drain, qfilter_oracles: Any, sign: Any
) -> None:
    done = drain(qfilters.calibrate(model, TEXTS, replace(REQUEST, sign=sign)))
    total = done.corpus.tokens
    chosen = np.sort(np.random.default_rng(0).permutation(total)[:300])
    joined = np.concatenate([first_layer_queries(model, ids) for ids in done.corpus.sequences], axis=1)
    expected = qfilter_oracles.stored_filters(joined[:, chosen], 2, sign)
    found = done.calibration.filters
    assert found.shape == (2, 2, 16)
    assert np.allclose(found[0], expected, atol=1e-4)
    record = done.calibration.record
    assert (record.estimator, record.label) == (sign, "faithful" if sign == "majority" else "adapted")


def test_queries_before_rotation_give_another_direction(model: LoadedModel, drain: Drain, qfilter_oracles: Any) -> None:
    done = drain(qfilters.calibrate(model, TEXTS, REQUEST))
    plain = [first_layer_queries(model, ids, rotated=False) for ids in done.corpus.sequences]
    wrong = qfilter_oracles.stored_filters(np.concatenate(plain, axis=1), 2)
    right = done.calibration.filters[0]
    cosines = (right * wrong).sum(axis=1) / np.linalg.norm(right, axis=1) / np.linalg.norm(wrong, axis=1)
    assert (cosines < 0.95).all()


def test_the_record_says_what_was_read(model: LoadedModel, drain: Drain) -> None:
    done = drain(qfilters.calibrate(model, TEXTS, REQUEST))
    record, read = done.calibration.record, done.corpus
    assert (record.sequences, record.tokens) == (len(read.sequences), sum(map(len, read.sequences)))
    assert (record.rows, record.seed, record.corpus) == (300, 0, read.digest.hex())
    assert record.model == binding.describe(model.profile)
    assert (record.model.layers, record.model.kv_heads, record.model.head_dim) == (2, 2, 16)
    assert record.model.weights == model.profile.model.weights.hex()
    assert record.model.tokenizer == model.profile.tokenizer.vocab.hex()


def test_the_same_request_gives_the_same_bytes_and_another_seed_others(model: LoadedModel, drain: Drain) -> None:
    first, again, other = (
        drain(qfilters.calibrate(model, TEXTS, replace(REQUEST, seed=seed))).calibration for seed in (0, 0, 1)
    )
    assert qfilters_file.encode(first) == qfilters_file.encode(again)
    assert other.digest != first.digest
    assert not np.array_equal(other.filters, first.filters)


def test_progress_counts_tokens_then_layers(model: LoadedModel) -> None:
    steps = list(qfilters.calibrate(model, TEXTS, REQUEST))
    read = [step for step in steps if step.stage == "read"]
    assert [step.done for step in read] == sorted({step.done for step in read})
    assert read[-1].done == read[-1].total == 640
    assert [(step.done, step.total) for step in steps if step.stage == "filters"] == [(1, 2), (2, 2)]


def test_sequences_begin_with_each_text_then_go_on(model: LoadedModel) -> None:
    first, second = encoded(model, TEXTS[0]), encoded(model, TEXTS[1])
    read = corpus.cut(model, TEXTS, 100, 3, 1)
    assert read.sequences == (first[:100], second[:100], first[100:200])
    # Short ends come last, and those below the shortest length not at all.
    whole = corpus.cut(model, TEXTS, 100, 99, 1).sequences
    lengths = [len(ids) for ids in whole]
    rests = [len(ids) % 100 for ids in (first, second)]
    full = len(first) // 100 + len(second) // 100
    assert lengths[:full] == [100] * full
    assert lengths[full:] == [rest for rest in rests if rest >= corpus.SHORTEST]


def test_control_tokens_in_a_text_are_text(model: LoadedModel) -> None:
    read = corpus.cut(model, ["<|im_end|> x " * 40], 64, 2, 1)
    assert not ContentEncoder.of(model.tokenizer).forbidden & {item for ids in read.sequences for item in ids}


def test_what_the_tokenizer_puts_before_a_text_stands_before_each_sequence(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_opening", lambda _: (376,))
    content = encoded(model, TEXTS[0])
    read = corpus.cut(model, [TEXTS[0]], 50, 2, 1)
    assert read.sequences == ((376, *content[:49]), (376, *content[49:98]))


@pytest.mark.parametrize("texts", [[], [""], ["", "A few words."], ["word " * 20]])
def test_too_little_text_is_refused_with_both_numbers(model: LoadedModel, drain: Drain, texts: list[str]) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"^texts: \d+ tokens in \d sequences, at least 256 are needed"
    ) as caught:
        drain(qfilters.calibrate(model, texts, REQUEST))
    assert caught.value.fields["minimum"] == 256
    assert caught.value.fields["value"] < 256


def test_too_few_rows_are_refused_and_fewer_texts_are_used_and_said(model: LoadedModel, drain: Drain) -> None:
    with pytest.raises(InvalidRequestError, match="^rows: 100, at least 256"):
        drain(qfilters.calibrate(model, TEXTS, replace(REQUEST, rows=100)))
    record = drain(qfilters.calibrate(model, TEXTS[:1], Request(tokens=400))).calibration.record
    tokens = len(encoded(model, TEXTS[0]))
    assert (record.tokens, record.rows) == (tokens, tokens)


def test_a_sequence_beyond_the_context_is_refused(model: LoadedModel, drain: Drain) -> None:
    with pytest.raises(ContextOverflowError, match="5000 prefix"):
        drain(qfilters.calibrate(model, TEXTS, replace(REQUEST, tokens=5000)))


def test_models_whose_cache_cannot_be_sent_have_no_filters(
    tiny_model: Callable[..., LoadedModel], drain: Drain
) -> None:
    model = tiny_model("gemma3_text", config={"sliding_window": 32, "sliding_window_pattern": 2})
    with pytest.raises(ModelError, match="RotatingKVCache"):
        drain(qfilters.calibrate(model, TEXTS, REQUEST))


def test_layers_of_different_heads_have_no_filters(model: LoadedModel) -> None:
    narrow = msgspec.structs.replace(model.profile.layers[1], kv_heads=1)
    profile = replace(model.profile, layers=(model.profile.layers[0], narrow))
    with pytest.raises(ModelError, match="2 head layouts"):
        binding.describe(profile)


def test_what_a_model_is_bound_by(model: LoadedModel, tiny_model: Callable[..., LoadedModel]) -> None:
    bound = binding.describe(model.profile)
    kind = model.profile.model.type
    shape: dict[str, Any] = {"layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 16}
    others = {
        "weights": tiny_model(kind, seed=1, **shape),
        "layers": tiny_model(kind, **(shape | {"layers": 3})),
        "kv_heads": tiny_model(kind, **(shape | {"kv_heads": 3})),
        "head_dim": tiny_model(kind, **(shape | {"head_dim": 32})),
        "config": tiny_model(kind, **shape, config={"rope_theta": 5000.0}),
    }
    for field, other in others.items():
        difference = binding.difference(binding.describe(other.profile), bound)
        assert difference is not None
        assert difference[0] == field
    assert binding.describe(others["config"].profile).rope != bound.rope
    assert binding.difference(bound, bound) is None


def test_published_filters_are_bound_as_they_are(model: LoadedModel, tmp_path: Path) -> None:
    filters = np.random.default_rng(0).standard_normal((2, 2, 16)).astype(np.float32)
    path = tmp_path / "hub.safetensors"
    path.write_bytes(save({"q_filters": filters}))
    found = qfilters.bind(model, path)
    assert np.array_equal(found.filters, filters)
    assert (found.record.estimator, found.record.rows) == ("imported", 0)
    assert found.record.model == binding.describe(model.profile)
    path.write_bytes(save({"q_filters": filters[:1]}))
    with pytest.raises(InvalidRequestError, match=r"filters \(1, 2, 16\), but the model .* needs \(2, 2, 16\)"):
        qfilters.bind(model, path)
