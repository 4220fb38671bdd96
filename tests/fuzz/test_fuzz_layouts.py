"""Layouts of any kind: what plan and verdict let through, a receiver rebuilds and attends, or refuses in our words."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from kvferry.core import container, layout
from kvferry.core.compat import judge
from kvferry.core.digests import digest
from kvferry.core.errors import ContainerError, ManifestError
from kvferry.core.manifest import Encoding, LayerLayout, Manifest, Prefix
from kvferry.core.payloads import Sections
from kvferry.core.plan import make_plan
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseBranch
from kvferry.engine.layers import AttendingBranch
from kvferry.receiver import reconstruct

TOKENS = 70
WIDTH = {"I32": 4, "U32": 4, "F32": 4, "F16": 2, "BF16": 2}
DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}

ODD: dict[str, Any] = {
    "key_bits": st.none() | st.integers(1, 33),
    "value_bits": st.none() | st.integers(1, 33),
    "key_group": st.none() | st.integers(1, 200) | st.sampled_from((64, 128)),
    "value_group": st.none() | st.integers(1, 200) | st.sampled_from((64, 128)),
    "key_axis": st.sampled_from((None, "token", "channel")),
    "kv_heads": st.integers(1, 4),
    "key_dim": st.integers(1, 130),
    "value_dim": st.integers(1, 130),
    "rows": st.integers(1, TOKENS + 1),
    "head_rows": st.none() | st.lists(st.integers(1, TOKENS), max_size=4).map(tuple),
    "offset": st.integers(1, TOKENS + 1),
    "positions": st.sampled_from(("contiguous", "renumbered", "explicit", "shared")),
    "packed_keys": st.integers(0, TOKENS + 1),
    "packed_values": st.integers(0, TOKENS + 1),
}


@st.composite
def layers(draw: Any, dtype: Any, encoding: Encoding, kind: str, kept: int) -> LayerLayout:
    """Draw a layer that agrees with itself."""
    heads, rows = draw(st.integers(1, 3)), TOKENS if kind == "contiguous" else kept
    counts = None
    if kind == "explicit" and draw(st.booleans()):
        others = draw(st.lists(st.integers(1, rows), min_size=heads - 1, max_size=heads - 1))
        counts = tuple(draw(st.permutations([rows, *others])))
    whole = st.sampled_from((0, rows, rows))
    some = whole if counts else whole | st.integers(0, rows)
    keys = (
        (st.just(0) if counts else some.map(lambda count: count // 32 * 32)) if encoding.key_axis == "channel" else some
    )
    sizes = (32, 64, 96, 128) if encoding.key_bits or encoding.value_bits else (1, 5, 32)
    return LayerLayout(
        "KVCache",
        heads,
        draw(st.sampled_from(sizes)),
        draw(st.sampled_from(sizes)),
        dtype,
        rows,
        counts,
        rows if kind == "renumbered" else TOKENS,
        kind,
        draw(keys) if encoding.key_bits else 0,
        draw(some) if encoding.value_bits else 0,
    )


@st.composite
def cases(draw: Any) -> tuple[Encoding, tuple[LayerLayout, ...]]:
    """Draw layouts that agree with themselves, or all but."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    widths = [draw(st.sampled_from((None, 2, 3, 4, 5, 6, 8))) for _ in range(2)]
    axis = None if widths[0] is None else draw(st.sampled_from(("token", "token", "channel")))
    encoding = Encoding(*widths, *(None if width is None else 32 for width in widths), axis, None, None)
    kept = draw(st.integers(1, TOKENS))
    kinds = st.sampled_from(("contiguous", "explicit", "explicit", "shared"))
    renumbered = draw(st.integers(0, 5)) == 0
    count = draw(st.integers(1, 2))
    found = [draw(layers(dtype, encoding, "renumbered" if renumbered else draw(kinds), kept)) for _ in range(count)]
    if draw(st.integers(0, 2)) == 0:
        name = draw(st.sampled_from(sorted(ODD)))
        odd = {name: draw(ODD[name])}
        if name in Encoding.__struct_fields__:
            encoding = msgspec.structs.replace(encoding, **odd)
        else:
            found[0] = msgspec.structs.replace(found[0], **odd)
    return encoding, tuple(found)


def data_of(item: layout.Expected, given: tuple[LayerLayout, ...], rng: np.random.Generator, *, true: bool) -> bytes:
    """Random bytes; positions that ascend, if they shall be true."""
    size = math.prod(item.shape) * WIDTH[item.dtype]
    if item.dtype != "I32" or not true:
        return rng.bytes(size)
    one = given[int(item.name.split(".")[1])]
    counts = one.head_rows or (one.rows,) * (size // 4 // one.rows)
    if max(counts) > TOKENS:
        return rng.bytes(size)
    found = [np.sort(rng.choice(TOKENS, count, replace=False)) for count in counts]
    return np.concatenate(found).astype("<i4").tobytes()


def asked_for(manifest: Manifest) -> list[layout.Expected] | ManifestError:
    try:
        return list(layout.sections(manifest))
    except ManifestError as error:
        return error


def rebuilt(manifest: Manifest, sections: Sections) -> PrefixCache | ContainerError:
    try:
        return reconstruct.prefix_cache(manifest, sections)
    except ContainerError as error:
        return error


@pytest.fixture
def seen() -> dict[str, int]:
    """How many cases came how far."""
    return dict.fromkeys(("contradictory", "refused", "positions", "rebuilt", "packed", "ragged"), 0)


def test_layouts(
    fuzz: Any, kv_example: Any, describe: Any, profile_of: Any, in_memory: Any, seen: dict[str, int]
) -> None:
    whole = kv_example().manifest

    def crosses(budget: Any, case: Any, seed: int, *, true: bool) -> None:
        encoding, given = case
        rng = np.random.default_rng(seed)
        ids = container.ids_to_bytes(range(TOKENS))
        rope = (whole.positions.rope * 2)[: len(given)]
        manifest = msgspec.structs.replace(
            whole,
            layout=given,
            encoding=encoding,
            prefix=Prefix(TOKENS, digest(ids)),
            positions=msgspec.structs.replace(whole.positions, rope=rope),
        )
        expected = asked_for(manifest)
        if isinstance(expected, ManifestError):
            assert str(expected.fields["field"]).startswith(("layout[", "encoding."))
            seen["contradictory"] += 1
            return
        contents = [container.raw_section(container.IDS, "U32", (TOKENS,), ids)]
        contents += [container.raw_section(*item, data_of(item, given, rng, true=true)) for item in expected[1:]]
        example = describe(manifest, tuple(contents))
        plan = make_plan(example.manifest)
        if not judge(example.manifest, profile_of(example.manifest)).accepted:
            seen["refused"] += 1
            return
        sections = Sections(example.manifest, plan, in_memory(example.chunks()))
        with budget.at_most(2**24):
            cache = rebuilt(example.manifest, sections)
        if isinstance(cache, ContainerError):
            assert not true, cache
            assert ".positions: " in cache.message
            seen["positions"] += 1
            return
        seen["rebuilt"] += 1
        assert [len(set(layer.row_counts)) == 1 for layer in cache.layers] == [
            one.head_rows is None or len(set(one.head_rows)) == 1 for one in given
        ]
        for one, branch in zip(given, cache.branch(3), strict=True):
            attended(one, branch)
            seen["packed"] += bool(one.packed_keys or one.packed_values)
            seen["ragged"] += one.head_rows is not None

    fuzz(crosses, case=cases(), seed=st.integers(0, 2**32 - 1), true=st.sampled_from((True, True, False)))
    # Drawn at random, but not so that nothing comes through.
    assert min(seen.values()) > 0, seen


def attended(one: LayerLayout, branch: Any) -> None:
    """Add rows and attend, with two query heads a KV head: whatever the numbers, there are as many as there must be."""
    dtype = DTYPES[one.dtype]
    keys, values = (mx.ones((1, one.kv_heads, 2, width), dtype=dtype) for width in (one.key_dim, one.value_dim))
    found = branch.update_and_fetch(keys, values)
    assert branch.offset == one.offset + 2
    if isinstance(branch, AttendingBranch):
        output = branch.attend(mx.ones((1, 2 * one.kv_heads, 2, one.key_dim), dtype=dtype), 1.0)
        mx.eval(output)
        assert output.shape == (1, 2 * one.kv_heads, 2, one.value_dim)
        return
    assert isinstance(branch, DenseBranch)
    assert [part.shape[2] for part in found] == [one.rows + 2] * 2
