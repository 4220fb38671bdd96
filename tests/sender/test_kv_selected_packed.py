"""B9, and which selection goes with which quantiser: the whole table, asked before a document is read."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.core.wire import MethodInfo
from kvferry.engine.dense import DenseLayer
from kvferry.engine.model import LoadedModel
from kvferry.engine.packed import PackedLayer
from kvferry.engine.packing import pack
from kvferry.engine.ragged import RaggedLayer
from kvferry.sender import registry
from kvferry.sender.kv.parameters import SelectionParameters
from kvferry.sender.kv.selected_packed import SelectedPacked
from kvferry.sender.kv.selecting import SelectingMethod, every_layer
from kvferry.sender.method import KvMaterial

TEXT = "The access code of the north warehouse is 4417. The ferry carries eleven crates of paper at dawn. " * 4
SELECTORS = [
    method
    for method in registry.METHODS
    if isinstance(method, SelectingMethod) and not isinstance(method, SelectedPacked)
]
QUANTISERS: dict[str, dict[str, Any]] = {
    "dense": {},
    "affine": {"bits": 4},
    "K8V4": {"key_bits": 8, "value_bits": 4},
    "V4": {"value_bits": 4},
    "kivi": {"bits": 4, "quantiser": "kivi", "residual": 32},
}
each = pytest.mark.parametrize("method", SELECTORS, ids=[method.info.id for method in SELECTORS])


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama", heads=4, kv_heads=2, head_dim=32)


@pytest.fixture
def shop(workshop: Callable[..., Any], model: LoadedModel) -> Any:
    return workshop(model, chunk_bytes=4096)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prefill", "read", "forward"):
        monkeypatch.setattr(LoadedModel, name, lambda *_: pytest.fail("the model ran"))


class Ragged(SelectingMethod):
    """Keeps one row more in every head than in the one before; renumbers or knows something, as a test wants it."""

    info = MethodInfo("stairs", "stairs", "kv", "custom", aware=False, source="tests", summary="more rows head by head")
    ragged = True
    asked: list[Any]

    def __init__(self) -> None:
        self.asked = []

    def calibrated(self, model: LoadedModel, given: Any) -> Any:
        self.asked.append(given)
        return Known()

    def rank(self, subject: Any, given: Any) -> Generator[Any, None, Any]:
        self.asked.append((given, subject.calibration))
        yield from ()
        heads = subject.layers[0].kv_heads
        return lambda count: every_layer(
            [np.arange(min(count + head, subject.rows), dtype=np.int32) for head in range(heads)], len(subject.layers)
        )


class Known:
    digest = b"\x07" * 32


# The table


@each
@pytest.mark.parametrize("quantiser", QUANTISERS)
def test_every_pair_is_made_or_refused_by_name(
    shop: Any, drain: Callable[..., Any], method: SelectingMethod, quantiser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"budget": 80, **QUANTISERS[quantiser]}
    if method.info.id.startswith("qfilters"):
        options |= {} if method.info.id == "qfilters" else {"warmup": 32}
    given = registry.check_parameters(method, options)
    profile = shop.model.profile
    if method.ragged and quantiser == "kivi":
        with pytest.raises(InvalidRequestError, match=f"^quantiser: kivi does not go with method {method.info.name}:"):
            method.plan(profile, given)
        monkeypatch.setattr(LoadedModel, "prefill", lambda *_: pytest.fail("the model ran"))
        with pytest.raises(InvalidRequestError, match="^quantiser: kivi"):
            drain(method.make(shop.reading(TEXT, question="Who?"), given))
        return
    packing = method.plan(profile, given)
    assert (packing is None) == (quantiser == "dense")
    assert packing is None or bool(packing.residual) == (quantiser == "kivi")


@each
@pytest.mark.parametrize("quantiser", QUANTISERS)
def test_a_model_without_our_attention_takes_level_dense_rows_only(
    model: LoadedModel, method: SelectingMethod, quantiser: str
) -> None:
    profile = replace(model.profile, attention="its scores are capped")
    given = registry.check_parameters(method, QUANTISERS[quantiser])
    if quantiser == "dense" and not method.ragged:
        assert method.plan(profile, given) is None
        return
    expected = InvalidRequestError if method.ragged and quantiser == "kivi" else ModelError
    with pytest.raises(expected, match=method.info.name):
        method.plan(profile, given)


class Pyramid(Ragged):
    """Keeps half of the rows in every layer but the first."""

    info = MethodInfo("steps", "steps", "kv", "custom", aware=False, source="tests", summary="more rows in one layer")
    ragged = False

    def rank(self, subject: Any, given: Any) -> Generator[Any, None, Any]:
        yield from ()
        kept = [[np.arange(rows, dtype=np.int32)] * subject.layers[0].kv_heads for rows in (40, 20)]
        return lambda count: kept


def test_layers_of_different_lengths_need_our_attention_or_a_mask_for_each(
    workshop: Callable[..., Any], tiny_model: Callable[..., LoadedModel], drain: Callable[..., Any]
) -> None:
    method, given = Pyramid(), SelectionParameters(budget=40)
    plain = tiny_model("llama")
    made = drain(method.make(workshop(plain).reading(TEXT), given)).cache
    assert made.row_counts == [40, 40, 20, 20]
    soft = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 16}
    capped = tiny_model("gemma2", config=soft)
    # This model asks the first layer's cache for an array, and uses it in all.
    with pytest.raises(ValueError, match="broadcast"):
        capped.forward([5, 6], made.branch(2))
    with pytest.raises(ModelError, match="cannot attend what method steps makes, from 20 to 40 rows a layer: .*gemma2"):
        drain(method.make(workshop(capped).reading(TEXT), given))


# B9


def b9(shop: Any, drain: Callable[..., Any], method: SelectingMethod | None = None, **given: Any) -> KvMaterial:
    method = method or registry.find("B9")  # type: ignore[assignment]
    assert method is not None
    made: KvMaterial = drain(method.make(shop.reading(TEXT), registry.check_parameters(method, given)))
    return made


BLIND = [method for method in SELECTORS if not method.info.aware and method.info.id != "qfilters"]


@pytest.mark.parametrize("method", BLIND, ids=[method.info.id for method in BLIND])
def test_rows_are_the_selectors_and_codes_those_of_its_rows(
    shop: Any, drain: Callable[..., Any], method: SelectingMethod
) -> None:
    """Packing by token commutes with taking rows out: the same as packing what the selector alone keeps."""
    dense = drain(method.make(shop.reading(TEXT), registry.check_parameters(method, {"budget": 70})))
    made = b9(shop, drain, selector=method.info.name, budget=70)
    assert made.calibration == dense.calibration
    assert (made.encoding.key_bits, made.encoding.value_bits) == (8, 8)
    assert made.cache.offset == dense.cache.offset
    assert made.cache.row_counts == dense.cache.row_counts
    for small, plain in zip(made.cache.layers, dense.cache.layers, strict=True):
        pairs = (
            list(zip(small.heads, plain.heads, strict=True))
            if isinstance(small, RaggedLayer) and isinstance(plain, RaggedLayer)
            else [(small, plain)]
        )
        for head, rows in pairs:
            assert isinstance(head, PackedLayer)
            assert isinstance(rows, DenseLayer)
            held = [None if item.positions is None else np.array(item.positions).tolist() for item in (head, rows)]
            assert held[0] == held[1]
            for part, expected in ((head.keys, rows.keys), (head.values, rows.values)):
                assert part.packed is not None
                for array, other in zip(part.packed.arrays, pack(expected, 8, 32).arrays, strict=True):
                    assert np.array_equal(np.array(array), np.array(other))


def test_a_selector_goes_by_id_or_name(shop: Any, drain: Callable[..., Any]) -> None:
    one, other = (b9(shop, drain, selector=name, budget=40) for name in ("B3", "SINK-recent"))
    assert one.cache.row_counts == other.cache.row_counts == [40] * 4
    assert all(
        np.array_equal(np.array(a), np.array(b)) for a, b in zip(one.cache.arrays, other.cache.arrays, strict=True)
    )


def test_kivi_of_selected_rows(shop: Any, drain: Callable[..., Any]) -> None:
    made = b9(shop, drain, selector="sink-recent", budget=100, quantiser="kivi", residual=32, bits=4)
    assert made.encoding.key_axis == "channel"
    for layer in made.cache.layers:
        assert isinstance(layer, PackedLayer)
        assert (layer.keys.packed_rows, layer.values.packed_rows, layer.rows) == (96, 68, 100)


@pytest.mark.parametrize("quantiser", ["affine", "kivi"])
def test_what_a_selector_is_asked_and_what_it_may_be(
    shop: Any, drain: Callable[..., Any], quantiser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stairs = Ragged()
    monkeypatch.setattr(registry, "METHODS", (*registry.METHODS, stairs))
    if quantiser == "kivi":
        with pytest.raises(InvalidRequestError, match="^quantiser: kivi does not go with method stairs: "):
            b9(shop, drain, selector="stairs", quantiser="kivi")
        assert stairs.asked == []
        return
    made = b9(shop, drain, selector="stairs", budget=30, bits=4)
    assert made.cache.row_counts == [30, 31] * 2
    assert made.calibration == (Known.digest,)
    own = SelectionParameters(budget=30)
    (first, (second, calibration)) = stairs.asked
    assert first == second == own
    assert isinstance(calibration, Known)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"selector": "B17"}, "selector: method: 'B17' is not one of A0"),
        ({"selector": "B1"}, "selector: serialised is no method that chooses rows"),
        ({"selector": "A1"}, "selector: .* is no method that chooses rows"),
        ({"selector": "B2"}, "selector: packed is no method that chooses rows"),
        ({"selector": "selected-packed"}, "selector: selected-packed is no method that chooses rows"),
        ({"selector": "B3", "group": 64}, "key_group: 64 does not divide the head dimension 32"),
        ({"selector": "B3", "quantiser": "kivi", "residual": 48}, "residual: 48 is no multiple"),
    ],
)
def test_what_cannot_be_is_refused_before_the_document_is_read(
    shop: Any, drain: Callable[..., Any], unread: None, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{said}") as caught:
        b9(shop, drain, **given)
    assert caught.value.fields["field"] == said.partition(":")[0]


def test_selectors_that_look_at_the_question_are_refused(shop: Any, drain: Callable[..., Any], unread: None) -> None:
    class Looking(Ragged):
        info = MethodInfo("looks", "looks", "kv", "custom", aware=True, source="tests", summary="looks at the question")

    method = SelectedPacked(lambda name: Looking())
    with pytest.raises(InvalidRequestError, match="^selector: looks looks at the question, and B9 does not") as caught:
        b9(shop, drain, method, selector="looks")
    assert caught.value.fields == {"field": "selector", "value": "looks"}


def test_a_renumbering_selector_stays_one(shop: Any, drain: Callable[..., Any]) -> None:
    made = b9(shop, drain, selector="streamingllm", budget=60)
    assert made.cache.offset == 60
    assert all(layer.positions is None for layer in made.cache.layers)
    fresh = shop.model.prompt.fresh("Who?")
    plain = drain(
        registry.find("streamingllm").make(
            shop.reading(TEXT), registry.check_parameters(registry.find("streamingllm"), {"budget": 60})
        )
    )
    one, other = (shop.model.forward(fresh, cache.branch(len(fresh))) for cache in (made.cache, plain.cache))
    assert float(mx.abs(one - other).max().item()) < 0.1 * float(mx.abs(other).max().item())  # type: ignore[arg-type]
