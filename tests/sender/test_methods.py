"""Every method through the artifact maker: form, groups, sections, bytes, parity, identity, errors."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from safetensors import safe_open

from kvferry.core import allowed
from kvferry.core import manifest as manifests
from kvferry.core.container import IDS, SYSTEM, TEXT
from kvferry.core.digests import digest
from kvferry.core.errors import ContextOverflowError, InvalidRequestError, ModelError, UnknownMethodError
from kvferry.core.manifest import Manifest
from kvferry.engine.content import ContentEncoder
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import DEFAULT_SYSTEM, EVIDENCE_SYSTEM, SUMMARY_SYSTEM
from kvferry.sender import registry

DOCUMENT = "The access code of the north warehouse is 4417. Tür und Tor, 門, 🚢, e\u0301. <|im_end|> <think>\n\n" * 8
KV_GROUPS = ("model", "tokenizer", "prefix", "positions", "layout", "parity")
METHODS = {
    "A0": "text",
    "A1": "text",
    "A2": "text",
    "A3": "text",
    "A3-aware": "text",
    "A4": "text",
    "A4-aware": "text",
    "A5": "evidence",
    "A5-aware": "evidence",
    "A6": "references",
    "A7": "text",
    "B0": "text",
    "B1": "kv",
    "B2": "kv",
    "kivi": "kv",
    "B9": "kv",
    "B3": "kv",
    "B4": "kv",
    "B5": "kv",
    "B5-aware": "kv",
    "B6": "kv",
    "B6-aware": "kv",
    "tova": "kv",
    "chunkkv": "kv",
    "adakv": "kv",
    "streamingllm": "kv",
    "h2o": "kv",
    "l2norm": "kv",
    "keydiff": "kv",
    "expected-attention": "kv",
    "expected-attention-adakv": "kv",
    "qfilters": "kv",
    "qfilters-svd": "kv",
}
# What needs a package or a model that is not here.
EXTRAS = {"A8": "text"}
CONSUME = {"text": "prefill", "evidence": "prefill", "references": "look_up", "kv": "inject"}
WRITTEN = {"A4": SUMMARY_SYSTEM, "A4-aware": SUMMARY_SYSTEM}
WRITTEN |= dict.fromkeys(("A5", "A5-aware", "A6"), EVIDENCE_SYSTEM)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama", heads=6, kv_heads=3, head_dim=32, layers=3)


@pytest.fixture
def shop(workshop: Callable[..., Any], model: LoadedModel) -> Any:
    return workshop(model)


def test_these_are_all_the_methods() -> None:
    assert {method.info.id: method.info.form for method in registry.METHODS} == METHODS | EXTRAS
    # A method may have its id for its name, but no name of another.
    names = [name.casefold() for method in registry.METHODS for name in {method.info.id, method.info.name}]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("method", METHODS)
def test_form_and_groups(shop: Any, method: str) -> None:
    manifest = shop.make(method, DOCUMENT).stored.manifest
    assert manifest.form == METHODS[method]
    present = {group for group in KV_GROUPS if getattr(manifest, group) is not None}
    assert present == (set(KV_GROUPS) if METHODS[method] == "kv" else set())
    assert manifest.method.id == method
    assert manifest.method.consume == ("prefill_once" if method == "B0" else CONSUME[METHODS[method]])
    assert manifest.method.aware is method.endswith("-aware")
    assert manifest.mapper is None
    text = DOCUMENT.encode()
    assert (manifest.document.digest, manifest.document.bytes) == (digest(text), len(text))
    assert manifest.document.characters == len(DOCUMENT)
    assert manifest.prompt.system == digest(DEFAULT_SYSTEM.encode())


@pytest.mark.parametrize("method", METHODS)
def test_the_manifest_is_canonical_and_names_the_artifact(shop: Any, method: str) -> None:
    stored = shop.make(method, DOCUMENT).stored
    assert manifests.decode(stored.encoded) == stored.manifest
    assert digest(stored.encoded) == stored.artifact_id
    assert stored.manifest.payload.length == stored.payload_path.stat().st_size


@pytest.mark.parametrize("method", METHODS)
def test_chunk_digests_are_those_of_the_file_cut_at_every_section(shop: Any, method: str) -> None:
    stored = shop.make(method, DOCUMENT).stored
    data, payload = stored.payload_path.read_bytes(), stored.manifest.payload
    lengths = [8 + int.from_bytes(data[:8], "little"), *(section.length for section in stored.manifest.sections)]
    joined: list[bytes] = []
    start = 0
    for length in lengths:
        part = data[start : start + length]
        joined.extend(digest(part[at : at + 1024]) for at in range(0, length, 1024))
        start += length
    assert start == len(data)
    assert payload.chunks == b"".join(joined)
    assert payload.digest == digest(payload.chunks)
    assert payload.chunk_size == 1024


@pytest.mark.parametrize("system", [DEFAULT_SYSTEM, "", "Réponds en français: 門 🚢"])
def test_a0_sends_nothing_of_the_document(shop: Any, system: str) -> None:
    stored = shop.make("A0", DOCUMENT, system).stored
    assert [section.name for section in stored.manifest.sections] == [SYSTEM]
    assert stored.sections.read(SYSTEM) == system.encode()
    assert b"4417" not in stored.payload_path.read_bytes()


@pytest.mark.parametrize("text", [DOCUMENT, "x", "", "\x00\u2028\ufeff", "ﬀ" * 3000], ids=range(5))
@pytest.mark.parametrize("method", ["A1", "A7", "B0"])
def test_text_arrives_byte_for_byte(shop: Any, method: str, text: str) -> None:
    stored = shop.make(method, text, "Answer.").stored
    assert [section.name for section in stored.manifest.sections] == [SYSTEM, TEXT]
    assert bytes(stored.sections.read(TEXT)) == text.encode()
    assert bytes(stored.sections.read(SYSTEM)) == b"Answer."


def test_a1_and_b0_carry_the_text_and_nothing_but_the_header(shop: Any) -> None:
    sizes = {method: shop.make(method, DOCUMENT).stored.manifest.payload.length for method in ("A1", "B0")}
    texts = len(DOCUMENT.encode()) + len(DEFAULT_SYSTEM.encode())
    assert sizes["A1"] == sizes["B0"]
    assert texts < sizes["A1"] < texts + 250


def test_a7_is_smaller_and_says_its_level(shop: Any) -> None:
    plain, packed = (shop.make(method, DOCUMENT).stored.manifest for method in ("A1", "A7"))
    assert packed.sections[1].length < plain.sections[1].length / 3
    assert plain.encoding.zstd is None
    assert (packed.encoding.zstd, packed.method.params) == (3, {"level": 3})
    section = packed.sections[1]
    assert section.encoding == "zstd"
    assert (section.decoded.length, section.decoded.digest) == (len(DOCUMENT.encode()), digest(DOCUMENT.encode()))


def test_a7_levels_trade_time_for_bytes(shop: Any) -> None:
    rng = np.random.default_rng(0)
    words = [hashlib.md5(bytes([number])).hexdigest()[:5] for number in range(200)]  # noqa: S324  (only words)
    text = " ".join(words[number] for number in rng.integers(0, 200, 3000))
    sizes = {}
    for level in (1, 3, 22):
        manifest = shop.make("A7", text, level=level).stored.manifest
        assert (manifest.encoding.zstd, manifest.method.params) == (level, {"level": level})
        sizes[level] = manifest.payload.length
    assert sizes[22] < sizes[1] < len(text)
    assert shop.make("A7", text).stored.manifest.payload.length == sizes[3]


@pytest.mark.parametrize("value", [0, 23, -1, "3", 3.0, True])
def test_a_bad_parameter_names_itself_and_its_range(shop: Any, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        shop.make("A7", DOCUMENT, level=value)
    assert caught.value.message == f"level: {value!r}, must be a whole number from 1 to 22"
    assert caught.value.fields == {"field": "level", "value": value}


ANY_BUDGET = "rows from 1, a fraction above 0 up to 1 or bytes like 200KB (B, KB, MB, GB, KiB, MiB, GiB)"


@pytest.mark.parametrize(
    ("method", "name", "value", "message"),
    [
        ("B2", "bits", 7, "bits: 7, must be 2, 3, 4, 5, 6 or 8"),
        ("B5", "pooling", "mean", "pooling: 'mean', must be avg or max"),
        (
            "B5",
            "budget",
            "banana",
            f"budget: 'banana', must be {ANY_BUDGET}",
        ),
        ("A2", "budget", "200KB", "budget: '200KB', must be tokens from 1 or a fraction above 0 up to 1"),
        ("h2o", "renumber", "yes", "renumber: 'yes', must be true or false"),
        (
            "l2norm",
            "skip_layers",
            "first",
            "skip_layers: 'first', must be a whole number from 0 or layers like 0,1,5 or 3,",
        ),
    ],
)
def test_what_is_allowed_is_said_in_words(method: str, name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        registry.check_parameters(registry.find(method), {name: value})
    assert caught.value.message == message


@pytest.mark.parametrize("method", registry.METHODS, ids=lambda method: method.info.id)
def test_every_parameter_has_words_for_what_it_allows(method: Any) -> None:
    for field in msgspec.structs.fields(method.parameters):
        assert allowed.in_words(field.type), field.name


@pytest.mark.parametrize(("method", "takes"), [("A7", "level"), ("A1", "none"), ("B1", "none")])
def test_an_unknown_parameter_names_those_that_there_are(shop: Any, method: str, takes: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^levels: method {method} has no such parameter; it takes {takes}$"):
        shop.make(method, DOCUMENT, levels=3)


def test_an_unknown_method_lists_the_known_ones() -> None:
    with pytest.raises(UnknownMethodError) as caught:
        registry.find("B17")
    assert "'B17'" in caught.value.message
    for method in registry.METHODS:
        assert f"{method.info.id} ({method.info.name})" in caught.value.message


@pytest.mark.parametrize("name", ["b1", "B1", "serialised", "SERIALISED"])
def test_a_method_goes_by_id_or_name(name: str) -> None:
    assert registry.find(name).info.id == "B1"


def payload_formula(manifest: Manifest) -> int:
    """Work out the size of a payload from the layout alone: header, ids, then K and V of every layer."""
    dtype_bytes = {"F32": 4, "F16": 2, "BF16": 2}
    entries: dict[str, Any] = {}
    at = 0

    def add(name: str, dtype: str, shape: list[int], width: int) -> None:
        nonlocal at
        size = math.prod(shape) * width
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size

    assert manifest.prefix is not None
    add("prefix.ids", "U32", [manifest.prefix.tokens], 4)
    for index, layer in enumerate(manifest.layout or ()):
        for name, width in (("keys", layer.key_dim), ("values", layer.value_dim)):
            shape = [layer.kv_heads, layer.rows, width]
            add(f"layers.{index}.{name}", layer.dtype, shape, dtype_bytes[layer.dtype])
    header = len(json.dumps(entries, separators=(",", ":")))
    return 8 + -(-header // 8) * 8 + at


@pytest.mark.parametrize("words", [0, 1, 60, 90])
def test_b1_carries_the_logical_rows_and_no_byte_more(shop: Any, model: LoadedModel, words: int) -> None:
    text = "warehouse " * words
    stored = shop.make("B1", text).stored
    tokens = len(model.prompt.prefix(text))
    layout = stored.manifest.layout
    assert stored.manifest.prefix.tokens == tokens
    assert {(layer.rows, layer.offset, layer.positions) for layer in layout} == {(tokens, tokens, "contiguous")}
    assert {(layer.cache_class, layer.kv_heads, layer.key_dim, layer.value_dim) for layer in layout} == {
        ("KVCache", 3, 32, 32)
    }
    assert stored.manifest.payload.length == payload_formula(stored.manifest)
    assert stored.payload_path.stat().st_size == stored.manifest.payload.length
    assert [section.name for section in stored.manifest.sections] == [
        IDS,
        *(f"layers.{index}.{kind}" for index in range(3) for kind in ("keys", "values")),
    ]


def mlx_lm_cache(model: LoadedModel, ids: list[int]) -> list[Any]:
    """Read ids as mlx-lm does it, in the model's own chunks, into caches whose buffers grow by 256 rows."""
    cache = make_prompt_cache(model.model)
    for start in range(0, len(ids), model.prefill_chunk):
        mx.eval(model.model(mx.array([ids[start : start + model.prefill_chunk]]), cache=cache))
    return list(cache)


def test_b1_rows_are_those_of_mlx_lm_and_padding_never_travels(shop: Any, model: LoadedModel) -> None:
    text = "warehouse ledger " * 30
    stored = shop.make("B1", text).stored
    ids = model.prompt.prefix(text)
    cache = mlx_lm_cache(model, ids)
    assert cache[0].keys.shape[2] > len(ids)
    with safe_open(stored.payload_path, framework="numpy") as file:
        assert file.get_tensor(IDS).tolist() == ids
        for index, layer in enumerate(cache):
            for name, buffer in (("keys", layer.keys), ("values", layer.values)):
                expected = np.array(buffer)[0, :, : len(ids)]
                assert np.array_equal(file.get_tensor(f"layers.{index}.{name}"), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_b1_travels_in_the_dtype_that_the_model_computes_in(
    workshop: Callable[..., Any], tiny_model: Callable[..., LoadedModel], dtype: str
) -> None:
    # A CPU computes in float32 whatever the file holds; elsewhere the dtype is the file's.
    model = tiny_model("llama", dtype=dtype)
    computed = model.model.layers[0].self_attn.q_proj.weight.dtype
    layout = workshop(model).make("B1", DOCUMENT).stored.manifest.layout
    expected = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16"}[computed]
    assert {layer.dtype for layer in layout} == {expected}


def test_parity_agrees_with_plain_mlx_lm(shop: Any, model: LoadedModel) -> None:
    parity = shop.make("B1", DOCUMENT).stored.manifest.parity
    cache = mlx_lm_cache(model, model.prompt.prefix(DOCUMENT))
    logits = np.array(model.model(mx.array([list(parity.suffix)]), cache=cache)[0, -1], dtype=np.float64)
    expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    order = np.argsort(-expected)[:32]
    assert list(parity.ids) == order.tolist()
    assert np.allclose(parity.log_probabilities, expected[order], atol=1e-5)
    assert list(parity.log_probabilities) == sorted(parity.log_probabilities, reverse=True)
    assert parity.bound == 0.0
    assert parity.suffix == tuple(model.prompt.fresh("What is this document about?"))


def test_parity_depends_on_the_document(shop: Any) -> None:
    first, second = (shop.make("B1", text).stored.manifest.parity for text in (DOCUMENT, DOCUMENT + "No."))
    assert first.log_probabilities != second.log_probabilities


@pytest.mark.parametrize("method", METHODS)
def test_the_same_request_finds_its_artifact(shop: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = shop.make(method, DOCUMENT)
    for name in ("prefill", "read", "forward"):
        monkeypatch.setattr(LoadedModel, name, lambda *_: pytest.fail("the model ran again"))
    again = shop.make(method, DOCUMENT)
    assert (first.reused, again.reused) == (False, True)
    assert again.stored.artifact_id == first.stored.artifact_id
    assert again.account == first.account


def test_a_request_finds_its_artifact_after_a_restart(workshop: Callable[..., Any], model: LoadedModel) -> None:
    before = workshop(model, store="same")
    first = before.make("B1", DOCUMENT)
    before.store.close()
    again = workshop(model, store="same").make("B1", DOCUMENT)
    assert again.reused
    assert again.stored.artifact_id == first.stored.artifact_id
    assert again.account == first.account


@pytest.mark.parametrize("method", METHODS)
def test_what_shapes_an_artifact_shapes_its_id(
    workshop: Callable[..., Any], tiny_model: Callable[..., LoadedModel], model: LoadedModel, method: str
) -> None:
    shop = workshop(model)
    artifacts = [
        shop.make(method, DOCUMENT),
        shop.make(method, DOCUMENT + " "),
        shop.make(method, DOCUMENT, "Another system prompt."),
        workshop(model, chunk_bytes=2048).make(method, DOCUMENT),
    ]
    if METHODS[method] == "kv":
        other = tiny_model("llama", heads=6, kv_heads=3, head_dim=32, layers=3, seed=1)
        artifacts.append(workshop(other).make(method, DOCUMENT))
    assert not any(artifact.reused for artifact in artifacts)
    assert len({artifact.stored.artifact_id for artifact in artifacts}) == len(artifacts)


def test_methods_never_share_an_artifact(shop: Any) -> None:
    ids = {method: shop.make(method, DOCUMENT).stored.artifact_id for method in METHODS}
    assert len(set(ids.values())) == len(METHODS)


def test_another_model_is_another_request(
    workshop: Callable[..., Any], tiny_model: Callable[..., LoadedModel], model: LoadedModel
) -> None:
    before = workshop(model, store="same")
    first = before.make("B1", DOCUMENT)
    before.store.close()
    other = tiny_model("llama", heads=6, kv_heads=3, head_dim=32, layers=3, seed=1)
    second = workshop(other, store="same").make("B1", DOCUMENT)
    assert not second.reused
    assert second.stored.manifest.model.weights != first.stored.manifest.model.weights


@pytest.mark.parametrize("method", METHODS)
def test_two_senders_make_the_same_bytes(workshop: Callable[..., Any], model: LoadedModel, method: str) -> None:
    first, second = (workshop(model).make(method, DOCUMENT).stored for _ in range(2))
    assert first.encoded == second.encoded
    assert first.payload_path.read_bytes() == second.payload_path.read_bytes()


@pytest.mark.parametrize("damage", [b"", b"{}", b"not json", b'{"artifact":"zz","account":null}', b"\xff"])
def test_a_damaged_note_of_an_earlier_request_is_made_anew(shop: Any, damage: bytes) -> None:
    first = shop.make("B1", DOCUMENT)
    notes = list((shop.store.root / "made").iterdir())
    assert len(notes) == 1
    notes[0].write_bytes(damage)
    again = shop.make("B1", DOCUMENT)
    assert not again.reused
    assert again.stored.artifact_id == first.stored.artifact_id
    assert shop.make("B1", DOCUMENT).reused


def test_a_dropped_artifact_is_made_again(shop: Any) -> None:
    first = shop.make("B1", DOCUMENT)
    shop.store.drop(first.stored.artifact_id)
    again = shop.make("B1", DOCUMENT)
    assert not again.reused
    assert again.stored.encoded == first.stored.encoded


@pytest.mark.parametrize("method", METHODS)
def test_the_account_speaks_of_this_document(shop: Any, model: LoadedModel, method: str) -> None:
    account = shop.make(method, DOCUMENT).account
    tokens = len(model.prompt.prefix(DOCUMENT))
    written = len(model.prompt.prefix(DOCUMENT, WRITTEN[method])) if method in WRITTEN else 0
    assert account.prefill_tokens == (tokens if METHODS[method] == "kv" else written)
    # bf16: 2 bytes; K and V of 3 layers with 3 heads of 32.
    assert account.dense_bf16_bytes == tokens * 2 * 2 * 3 * 3 * 32
    assert (account.prefill_ms > 0) is (METHODS[method] == "kv" or method in WRITTEN)
    assert account.method_ms >= 0
    assert account.encode_ms > 0


def test_a_cache_that_is_not_finite_is_not_sent(
    workshop: Callable[..., Any], tiny_model_dir: Callable[..., Any], tmp_path: Any
) -> None:
    import shutil

    from kvferry.engine.model import load

    path = tmp_path / "model"
    shutil.copytree(tiny_model_dir("llama"), path)
    model = load(str(path))
    shop = workshop(model)
    value = model.model.layers[1].self_attn.v_proj
    value.weight = mx.concatenate([value.weight[:1] * float("inf"), value.weight[1:]])
    with pytest.raises(ModelError, match=r"^layers\.1\.values: holds numbers that are not finite"):
        shop.make("B1", DOCUMENT)
    assert shop.store.ids() == []


def test_a_document_that_does_not_fit_the_context_is_refused_with_every_number(
    workshop: Callable[..., Any], tiny_model: Callable[..., LoadedModel]
) -> None:
    model = tiny_model("llama", context=300)
    tokens = len(model.prompt.prefix("warehouse " * 290))
    shop = workshop(model)
    with pytest.raises(ContextOverflowError, match=f"{tokens} prefix .* the model takes 300"):
        shop.make("B1", "warehouse " * 290)
    assert shop.store.ids() == []
    assert shop.make("A1", "warehouse " * 290).stored.manifest.form == "text"


@pytest.mark.parametrize("method", ["B1", "B3", "A4", "A5", "A6"])
def test_what_certainly_does_not_fit_is_refused_before_it_is_encoded(
    shop: Any, model: LoadedModel, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    limit = model.profile.context_length
    for name in ("encode", "count"):
        monkeypatch.setattr(ContentEncoder, name, lambda *_: pytest.fail("it was encoded"))
    text = "warehouse " * 50_000
    with pytest.raises(
        ContextOverflowError, match=rf"^context: 500000 characters are \d+ tokens at least, the model takes {limit}$"
    ) as caught:
        shop.make(method, text)
    assert caught.value.fields["limit"] == limit < caught.value.fields["value"]


@pytest.mark.parametrize(("method", "budget"), [("A1", {}), ("A7", {}), ("A2", {"budget": 60}), ("A3", {"budget": 60})])
def test_a_method_whose_model_does_not_read_it_takes_a_document_of_any_length(
    shop: Any, model: LoadedModel, method: str, budget: dict[str, int]
) -> None:
    text = "The warehouse opens at seven. " * 1500
    assert model.prompt.content.count(text) > 2 * model.profile.context_length
    assert shop.make(method, text, **budget).stored.manifest.form == "text"


def test_a_sliding_window_model_sends_text_and_refuses_its_cache_by_name(
    workshop: Callable[..., Any], tiny_model: Callable[..., LoadedModel]
) -> None:
    model = tiny_model("gemma3_text", config={"sliding_window": 32, "sliding_window_pattern": 2})
    shop = workshop(model)
    with pytest.raises(ModelError, match="RotatingKVCache"):
        shop.make("B1", DOCUMENT)
    assert shop.store.ids() == []
    stored = shop.make("A1", DOCUMENT).stored
    assert bytes(stored.sections.read(TEXT)) == DOCUMENT.encode()


def test_params_in_the_manifest_are_those_of_the_method(shop: Any) -> None:
    for name in METHODS:
        params = shop.make(name, DOCUMENT).stored.manifest.method.params
        given = {name for name in params if not name.startswith("outcome.")}
        assert given == {field.name for field in msgspec.structs.fields(registry.find(name).parameters)}


@pytest.mark.parametrize("method", ["A2", "A3", "A3-aware", "A4", "A5", "A6"])
def test_a_budget_says_whose_tokens_it_counts(shop: Any, model: LoadedModel, method: str) -> None:
    params = shop.make(method, DOCUMENT, budget=300).stored.manifest.method.params
    assert params["outcome.tokenizer"] == model.profile.tokenizer.vocab.hex()
    assert params["outcome.tokens"] <= 300
