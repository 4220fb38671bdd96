"""Every layout that a cache can cross in: there and back bit for bit, and read by the second implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from loading import load

from kvferry.core import container
from kvferry.core.errors import ContainerError, IntegrityError
from kvferry.core.manifest import Encoding, Manifest, Payload, Section
from kvferry.core.plan import make_plan
from kvferry.core.store import ArtifactStore
from kvferry.core.stored import Stored
from kvferry.engine.cache import PrefixCache, frozen
from kvferry.engine.dense import DenseLayer
from kvferry.engine.packed import PackedLayer, PackedTensor
from kvferry.engine.packing import unpack
from kvferry.engine.quantise import Scheme, Width, quantise
from kvferry.engine.ragged import RaggedLayer, heads_of
from kvferry.receiver import reconstruct
from kvferry.sender.encode import kv_contents, kv_layout
from kvferry.sender.kv import parameters
from kvferry.sender.kv.sizes import payload_bytes

HERE = Path(__file__).parent
HEADS, TOKENS, KEY_DIM, VALUE_DIM = 3, 140, 64, 96
DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
Kept = list[list[np.ndarray[Any, Any]]]


def by_token(key_bits: int | None, value_bits: int | None) -> Scheme:
    return Scheme(*(None if bits is None else Width(bits, 32) for bits in (key_bits, value_bits)))


def kivi(bits: int) -> Scheme:
    return Scheme(Width(bits, 32, "channel"), Width(bits, 32), "minmax", 64)


# How rows are kept, and how they are packed.
CASES: dict[str, tuple[str, Scheme | None]] = {
    "dense": ("all", None),
    "explicit": ("explicit", None),
    "shared": ("shared", None),
    "renumbered": ("renumbered", None),
    "ragged": ("ragged", None),
    "one layer whole": ("pyramid", None),
    "K8V4": ("all", by_token(8, 4)),
    "K3V6 explicit": ("explicit", by_token(3, 6)),
    "V5 shared": ("shared", by_token(None, 5)),
    "K2V8 renumbered": ("renumbered", by_token(2, 8)),
    "K2 ragged": ("ragged", by_token(2, None)),
    "K5V3 ragged": ("ragged", by_token(5, 3)),
    "K4V4 one layer whole": ("pyramid", by_token(4, 4)),
    "K8V8 answered": ("answered", by_token(8, 8)),
    "kivi": ("all", kivi(2)),
    "kivi explicit": ("explicit", kivi(4)),
    "kivi whole blocks": ("blocks", kivi(2)),
    "kivi too short": ("short", kivi(2)),
}
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    return load("spec/wire_reader.py")


@pytest.fixture(scope="module")
def samples() -> ModuleType:
    return load("core/conftest.py")


def dense_cache(dtype: str) -> PrefixCache:
    rng = np.random.default_rng(21)
    layers = []
    for _ in range(2):
        keys, values = (rng.standard_normal((1, HEADS, TOKENS, size)) for size in (KEY_DIM, VALUE_DIM))
        # What a careless conversion would lose.
        keys[0, :, :, 5] *= 40
        keys[0, 0, 3, :4] = -0.0, 1e-40, 0.0, -6e-8
        layers.append(DenseLayer(*(mx.array(part.astype(np.float32)).astype(DTYPES[dtype]) for part in (keys, values))))
    return PrefixCache(tuple(layers), TOKENS)


def kept_rows(how: str) -> Kept | None:
    rng = np.random.default_rng(22)

    def draw(count: int) -> np.ndarray[Any, Any]:
        return np.sort(rng.permutation(TOKENS)[:count]).astype(np.int32)

    if how in ("all", "answered"):
        return None
    if how == "ragged":
        return [[draw(count) for count in (70, 1, 33)], [draw(count) for count in (5, TOKENS, 6)]]
    if how == "pyramid":
        return [[np.arange(TOKENS, dtype=np.int32)] * HEADS, [draw(20)] * HEADS]
    count = {"blocks": 128, "short": 40}.get(how, 100)
    if how == "explicit":
        return [[draw(count) for _ in range(HEADS)] for _ in range(2)]
    return [[draw(count)] * HEADS for _ in range(2)]


def cache_of(how: str, scheme: Scheme | None, dtype: str) -> PrefixCache:
    cache = dense_cache(dtype)
    kept = kept_rows(how)
    if kept is not None:
        cache = cache.select([[mx.array(rows) for rows in heads] for heads in kept])
    if how == "renumbered":
        layers = [layer for layer in cache.layers if isinstance(layer, DenseLayer)]
        cache = PrefixCache(tuple(DenseLayer(layer.keys, layer.values) for layer in layers), layers[0].rows)
    if scheme is not None:
        cache = quantise(cache, scheme)
    if how == "answered":
        branches = cache.branch(4)
        for branch in branches:
            branch.update_and_fetch(
                mx.ones((1, HEADS, 3, KEY_DIM), dtype=DTYPES[dtype]), mx.ones((1, HEADS, 3, VALUE_DIM))
            )
        cache = frozen(branches)
    mx.eval(cache.arrays)
    return cache


@dataclass(frozen=True)
class Crossed:
    """A cache, and the artifact that it was written to."""

    cache: PrefixCache
    encoding: Encoding
    stored: Stored


@pytest.fixture
def cross(samples: Any, tmp_path: Path) -> Iterator[Callable[..., Crossed]]:
    """Return a factory: ``cross("case", dtype="F32")``."""
    stores: list[ArtifactStore] = []

    def make(case: str, dtype: str = "F32") -> Crossed:
        how, scheme = CASES[case]
        cache = cache_of(how, scheme, dtype)
        encoding = parameters.encoding(scheme)
        tokens = TOKENS if how == "renumbered" else cache.offset
        ids, layout = list(range(7, 7 + tokens)), kv_layout(cache, tokens)
        stores.append(ArtifactStore(tmp_path / f"store-{len(stores)}", durable=False))

        def describe(sections: tuple[Section, ...], payload: Payload) -> Manifest:
            plain = samples.kv_manifest(layout, tokens, container.ids_to_bytes(ids))
            return msgspec.structs.replace(plain, encoding=encoding, sections=sections, payload=payload)

        return Crossed(cache, encoding, stores[-1].create(tuple(kv_contents(cache, layout, ids)), 4096, describe))

    yield make
    for store in stores:
        store.close()


# There and back


def bits(array: mx.array) -> tuple[str, tuple[int, ...], bytes]:
    words = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return str(array.dtype), tuple(array.shape), np.array(words).tobytes()


def contents(layer: Any) -> Any:
    """Everything that a layer is, comparable."""
    if isinstance(layer, RaggedLayer):
        return [contents(head) for head in layer.heads]
    positions = None if layer.positions is None else bits(layer.positions)
    return type(layer).__name__, positions, *(tensor(part) for part in (layer.keys, layer.values))


def tensor(part: mx.array | PackedTensor) -> Any:
    if isinstance(part, mx.array):
        return bits(part)
    if part.packed is None:
        return bits(part.tail)
    packed = part.packed
    return packed.bits, packed.group, packed.axis, [bits(array) for array in packed.arrays], bits(part.tail)


@every_case
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_cache_comes_back_bit_for_bit(cross: Callable[..., Crossed], case: str, dtype: str) -> None:
    crossed = cross(case, dtype)
    rebuilt = reconstruct.prefix_cache(crossed.stored.manifest, crossed.stored.sections)
    assert rebuilt.offset == crossed.cache.offset
    assert rebuilt.row_counts == crossed.cache.row_counts
    assert rebuilt.nbytes == crossed.cache.nbytes
    for there, here in zip(rebuilt.layers, crossed.cache.layers, strict=True):
        assert contents(there) == contents(here)


def test_the_cases_take_every_kind_of_section(cross: Callable[..., Crossed]) -> None:
    kinds, names = set(), set()
    for case in CASES:
        manifest = cross(case).stored.manifest
        assert manifest.layout is not None
        kinds |= {(layer.positions, layer.head_rows is None) for layer in manifest.layout}
        names |= {section.name.split(".", 2)[2] for section in manifest.sections[1:]}
    plain = {("contiguous", True), ("renumbered", True), ("explicit", True), ("shared", True)}
    assert kinds == plain | {("explicit", False)}
    parts = {f"{name}{part}" for name in ("keys", "values") for part in ("", ".codes", ".scales", ".biases", ".tail")}
    assert names == {"positions"} | parts


@every_case
def test_the_payloads_size_is_known_beforehand(cross: Callable[..., Crossed], case: str) -> None:
    how, scheme = CASES[case]
    if how == "answered":
        pytest.skip("no selection")
    kept = kept_rows(how) or [[np.arange(TOKENS, dtype=np.int32)] * HEADS] * 2
    expected = payload_bytes(dense_cache("F32"), kept, scheme, renumbered=how == "renumbered")
    assert cross(case).stored.manifest.payload.length == expected


# The second implementation


def restored(layer: Any) -> list[tuple[np.ndarray[Any, Any], ...]]:
    """For every head its positions, keys and values, the numbers as MLX restores them."""
    found = []
    for head in heads_of(layer):
        rows = []
        for part in (head.keys, head.values):
            if isinstance(part, mx.array):
                plain = part.astype(mx.float32)
            elif part.packed is None:
                plain = part.tail.astype(mx.float32)
            else:
                wide = part.packed
                packed = type(wide)(
                    wide.codes,
                    wide.scales.astype(mx.float32),
                    wide.biases.astype(mx.float32),
                    wide.bits,
                    wide.group,
                    wide.axis,
                )
                plain = mx.concatenate([unpack(packed), part.tail.astype(mx.float32)], axis=2)
            rows.append(np.array(plain)[0, 0])
        positions = np.arange(head.rows) if head.positions is None else np.array(head.positions)[0]
        found.append((positions, *rows))
    return found


@every_case
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_the_reader_of_the_document_sees_the_same_rows(
    reader: Any, cross: Callable[..., Crossed], case: str, dtype: str
) -> None:
    crossed = cross(case, dtype)
    _, manifest = reader.read_manifest(crossed.stored.encoded)
    arrays = reader.read_payload(manifest, crossed.stored.payload_path.read_bytes())
    cache = reader.read_cache(manifest, arrays)
    assert len(cache) == len(crossed.cache.layers)
    for read, layer in zip(cache, crossed.cache.layers, strict=True):
        expected = restored(layer)
        assert len(read) == len(expected) == HEADS
        for found, wanted in zip(read, expected, strict=True):
            assert np.array_equal(found[0], wanted[0])
            for numbers, plain in zip(found[1:], wanted[1:], strict=True):
                assert numbers.dtype == np.float32
                # A scale times a code and a bias may each be a hundred, and nearly cancel.
                np.testing.assert_allclose(numbers, plain, rtol=1e-6, atol=3e-5)
                assert isinstance(layer, PackedLayer | RaggedLayer) or np.array_equal(numbers, plain)


def test_the_packed_bytes_of_the_document_are_read_and_written(reader: Any) -> None:
    from kvferry.engine.packing import pack

    document = (HERE.parents[1] / "docs" / "wire.md").read_text("utf-8")
    shown = document[document.index("Packed with 3 bits") :].split("\n\n")
    words = np.frombuffer(bytes.fromhex(shown[1].strip()), dtype="<u4")
    assert [f"`{word:08x}`" in shown[0] for word in words.tolist()] == [True] * 3
    codes = np.tile(np.arange(8, dtype=np.float32), 4)
    written = pack(mx.array(codes[None, None, None]), 3, 32, rule="minmax")
    assert np.array_equal(np.array(written.codes).ravel(), words)
    arrays = {"k.codes": words[None], "k.scales": np.ones((1, 1), "f4"), "k.biases": np.zeros((1, 1), "f4")}
    assert np.array_equal(reader.read_rows("k", arrays, 1, 3, 32, "token")[0], codes)


# Damage


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("case", ["K5V3 ragged", "kivi explicit", "V5 shared", "K8V8 answered"])
def test_a_bit_of_every_section_is_found(reader: Any, cross: Callable[..., Crossed], case: str) -> None:
    stored = cross(case).stored
    whole, plan = stored.payload_path.read_bytes(), make_plan(stored.manifest)
    _, manifest = reader.read_manifest(stored.encoded)
    rng = np.random.default_rng(5)
    for section in stored.manifest.sections:
        start = plan.range(plan.section_chunks[section.name][0])[0]
        for bit in (0, 8 * section.length - 1, int(rng.integers(8 * section.length))):
            damaged = flipped(whole, 8 * start + bit)
            stored.payload_path.write_bytes(damaged)
            with pytest.raises(IntegrityError, match=f"^section {section.name}: ") as caught:
                reconstruct.prefix_cache(stored.manifest, stored.sections)
            assert caught.value.fields["field"] == section.name
            with pytest.raises(reader.RefusedError):
                reader.read_payload(manifest, damaged)
    stored.payload_path.write_bytes(whole)
    reconstruct.prefix_cache(stored.manifest, stored.sections)


class Given:
    """Sections that a test made up: contents that a digest would have to vouch for."""

    def __init__(self, stored: Stored, **changed: bytes) -> None:
        names = [section.name for section in stored.manifest.sections]
        self._contents = {name: bytes(stored.sections.read(name)) for name in names} | changed

    def __contains__(self, name: str) -> bool:
        return name in self._contents

    def read(self, name: str) -> bytes:
        return self._contents[name]


def with_position(held: Sequence[int], place: int, value: int) -> bytes:
    changed = list(held)
    changed[place] = value
    return np.array(changed, dtype="<i4").tobytes()


@pytest.mark.parametrize("case", ["explicit", "shared", "ragged", "K5V3 ragged", "kivi explicit"])
def test_positions_that_cannot_be_are_refused(reader: Any, cross: Callable[..., Crossed], case: str) -> None:
    stored = cross(case).stored
    _, plain = reader.read_manifest(stored.encoded)
    arrays = reader.read_payload(plain, stored.payload_path.read_bytes())
    name = "layers.1.positions"
    held = arrays[name].reshape(-1).tolist()
    ragged = stored.manifest.layout is not None and stored.manifest.layout[1].head_rows is not None
    # One past the prefix, one before it, one twice; and, where heads differ, in the second head as well.
    places = [(-1, TOKENS), (0, -1), (1, held[0])]
    places += [(9, held[8]), (5 + TOKENS - 1, TOKENS)] if ragged else []
    for place, value in places:
        forged = with_position(held, place, value)
        with pytest.raises(ContainerError, match=rf"section {name}: positions must ascend within 0\.\.139"):
            reconstruct.prefix_cache(stored.manifest, Given(stored, **{name: forged}))
        odd = arrays | {name: np.frombuffer(forged, "<i4").reshape(arrays[name].shape)}
        with pytest.raises(reader.RefusedError):
            reader.read_cache(plain, odd)


def test_heads_of_a_ragged_layer_ascend_each_for_itself(cross: Callable[..., Crossed]) -> None:
    """The last row of a head may stand behind the first of the next; only within a head they ascend."""
    crossed = cross("ragged")
    (first, second, _) = crossed.cache.layers[0].heads  # type: ignore[attr-defined]
    assert np.array(first.positions)[0, -1] > np.array(second.positions)[0, 0]
    reconstruct.prefix_cache(crossed.stored.manifest, crossed.stored.sections)
