"""Which sections a layout asks for, written down; and layouts that contradict themselves or the encoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvferry.core import layout as layouts
from kvferry.core.errors import ManifestError
from kvferry.core.layout import Expected, layer_sections
from kvferry.core.manifest import Encoding, LayerLayout, Manifest
from kvferry.core.plan import make_plan

replace = msgspec.structs.replace
BY_TOKEN = Encoding(3, 4, 32, 64, "token", None, None)
BY_CHANNEL = Encoding(2, 8, 32, 64, "channel", None, None)
DENSE = Encoding(None, None, None, None, None, None, None)


def layer(**changes: Any) -> LayerLayout:
    """A dense layer of 96 rows with 2 heads, keys of 96 dimensions and values of 64."""
    return replace(LayerLayout("KVCache", 2, 96, 64, "BF16", 96, None, 96, "contiguous", 0, 0), **changes)


def named(*sections: tuple[str, str, tuple[int, ...]]) -> list[Expected]:
    return [Expected(f"layers.5.{name}", dtype, shape) for name, dtype, shape in sections]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "encoding", "sections"),
    [
        pytest.param(layer(), DENSE, [("keys", "BF16", (2, 96, 96)), ("values", "BF16", (2, 96, 64))], id="dense"),
        pytest.param(
            layer(rows=7, positions="explicit"),
            DENSE,
            [("positions", "I32", (2, 7)), ("keys", "BF16", (2, 7, 96)), ("values", "BF16", (2, 7, 64))],
            id="explicit",
        ),
        pytest.param(
            layer(rows=7, positions="shared"),
            DENSE,
            [("positions", "I32", (7,)), ("keys", "BF16", (2, 7, 96)), ("values", "BF16", (2, 7, 64))],
            id="shared",
        ),
        pytest.param(
            layer(rows=7, offset=7, positions="renumbered"),
            DENSE,
            [("keys", "BF16", (2, 7, 96)), ("values", "BF16", (2, 7, 64))],
            id="renumbered",
        ),
        pytest.param(
            layer(rows=7, head_rows=(2, 7), positions="explicit"),
            DENSE,
            [("positions", "I32", (9,)), ("keys", "BF16", (9, 96)), ("values", "BF16", (9, 64))],
            id="ragged",
        ),
        pytest.param(
            layer(rows=7, positions="shared", packed_keys=7, packed_values=7),
            BY_TOKEN,
            [
                ("positions", "I32", (7,)),
                ("keys.codes", "U32", (2, 7, 9)),
                ("keys.scales", "BF16", (2, 7, 3)),
                ("keys.biases", "BF16", (2, 7, 3)),
                ("values.codes", "U32", (2, 7, 8)),
                ("values.scales", "BF16", (2, 7, 1)),
                ("values.biases", "BF16", (2, 7, 1)),
            ],
            id="packed",
        ),
        pytest.param(
            layer(rows=7, head_rows=(7, 1), positions="explicit", packed_keys=7, packed_values=0),
            BY_TOKEN,
            [
                ("positions", "I32", (8,)),
                ("keys.codes", "U32", (8, 9)),
                ("keys.scales", "BF16", (8, 3)),
                ("keys.biases", "BF16", (8, 3)),
                ("values", "BF16", (8, 64)),
            ],
            id="ragged, packed keys",
        ),
        pytest.param(
            layer(packed_keys=64, packed_values=95),
            BY_CHANNEL,
            [
                ("keys.codes", "U32", (2, 96, 4)),
                ("keys.scales", "BF16", (2, 96, 2)),
                ("keys.biases", "BF16", (2, 96, 2)),
                ("keys.tail", "BF16", (2, 32, 96)),
                ("values.codes", "U32", (2, 95, 16)),
                ("values.scales", "BF16", (2, 95, 1)),
                ("values.biases", "BF16", (2, 95, 1)),
                ("values.tail", "BF16", (2, 1, 64)),
            ],
            id="by channel, tails",
        ),
        pytest.param(
            layer(packed_keys=0, packed_values=0),
            BY_CHANNEL,
            [("keys", "BF16", (2, 96, 96)), ("values", "BF16", (2, 96, 64))],
            id="nothing packed yet",
        ),
    ],
)
def test_the_sections_of_a_layer(given: LayerLayout, encoding: Encoding, sections: Any) -> None:
    layouts.check(5, given, encoding)
    assert list(layer_sections(5, given, encoding)) == named(*sections)


@pytest.mark.parametrize("which", ["token", "channel", "renumbered"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_whole_artifacts_are_planned(packed_example: Callable[..., Any], which: str, dtype: str) -> None:
    example = packed_example(which, dtype)
    assert make_plan(example.manifest).count == len(example.chunks())
    found = [(item.name, item.dtype, item.shape) for item in layouts.sections(example.manifest)]
    assert found == [(item.name, item.dtype, item.shape) for item in example.contents]


def test_every_section_that_is_missing_or_of_another_shape_is_refused(
    packed_example: Callable[..., Any], describe: Callable[..., Any]
) -> None:
    for which in ("token", "channel"):
        whole = packed_example(which)
        for index, content in enumerate(whole.contents):
            rest = whole.contents[:index] + whole.contents[index + 1 :]
            with pytest.raises(ManifestError, match=rf"^sections\[{min(index, len(rest))}\]: "):
                make_plan(describe(whole.manifest, rest).manifest)
            flat = replace_shape(content)
            contents = (*whole.contents[:index], flat, *whole.contents[index + 1 :])
            with pytest.raises(ManifestError, match=rf"^sections\[{index}\]: .*{content.name}"):
                make_plan(describe(whole.manifest, contents).manifest)


def replace_shape(content: Any) -> Any:
    """The same bytes in another shape."""
    import dataclasses

    return dataclasses.replace(content, shape=(1, *content.shape))


@pytest.mark.parametrize(
    ("given", "encoding", "field", "value", "expected"),
    [
        pytest.param(
            layer(head_rows=(96, 1, 2), positions="explicit"),
            DENSE,
            "layout[3].head_rows",
            "(96, 1, 2)",
            "2 heads of at most 96 rows",
            id="a head too many",
        ),
        pytest.param(
            layer(head_rows=(95, 1), positions="explicit"),
            DENSE,
            "layout[3].head_rows",
            "(95, 1)",
            "2 heads of at most 96 rows",
            id="no head keeps the rows",
        ),
        pytest.param(
            layer(head_rows=(97, 96), positions="explicit"),
            DENSE,
            "layout[3].head_rows",
            "(97, 96)",
            "2 heads of at most 96 rows",
            id="a head keeps more",
        ),
        pytest.param(
            layer(head_rows=(), positions="explicit"),
            DENSE,
            "layout[3].head_rows",
            "()",
            "2 heads of at most 96 rows",
            id="no heads",
        ),
        *(
            pytest.param(
                layer(head_rows=(96, 1), positions=kind),
                DENSE,
                "layout[3].positions",
                kind,
                "explicit ones, in a ragged layer",
                id=f"ragged and {kind}",
            )
            for kind in ("contiguous", "renumbered", "shared")
        ),
        pytest.param(
            layer(packed_keys=97),
            BY_TOKEN,
            "layout[3].packed_keys",
            "97",
            "96 rows of 3 bits",
            id="more packed than there are",
        ),
        pytest.param(
            layer(packed_values=1), DENSE, "layout[3].packed_values", "1", "96 rows of no bits", id="packed, no bits"
        ),
        pytest.param(
            layer(packed_keys=1),
            replace(BY_TOKEN, key_bits=None, key_group=None, key_axis=None),
            "layout[3].packed_keys",
            "1",
            "96 rows of no bits",
            id="packed keys, bits for values only",
        ),
        pytest.param(
            layer(head_rows=(96, 1), positions="explicit", packed_keys=95),
            BY_TOKEN,
            "layout[3].packed_keys",
            "95 by token",
            "all 96 by token, in a ragged layer",
            id="ragged and packed in part",
        ),
        pytest.param(
            layer(head_rows=(96, 1), positions="explicit", packed_keys=96),
            BY_CHANNEL,
            "layout[3].packed_keys",
            "96 by channel",
            "all 96 by token, in a ragged layer",
            id="ragged and by channel",
        ),
        pytest.param(
            layer(),
            replace(BY_TOKEN, key_group=None),
            "encoding.key_group",
            "None",
            "keys of 3 bits",
            id="bits without a group",
        ),
        pytest.param(
            layer(),
            replace(BY_TOKEN, value_bits=None),
            "encoding.value_group",
            "64",
            "values of None bits",
            id="a group without bits",
        ),
        pytest.param(
            layer(),
            replace(BY_TOKEN, key_axis=None),
            "encoding.key_axis",
            "None",
            "keys of 3 bits",
            id="bits without an axis",
        ),
        pytest.param(
            layer(),
            replace(DENSE, key_axis="channel"),
            "encoding.key_axis",
            "channel",
            "keys of None bits",
            id="an axis without bits",
        ),
        pytest.param(
            layer(),
            replace(BY_TOKEN, key_group=64),
            "encoding.key_group",
            "64",
            "96 numbers of 3 bits by token",
            id="a group that does not divide the dimension",
        ),
        pytest.param(
            layer(packed_keys=48),
            BY_CHANNEL,
            "encoding.key_group",
            "32",
            "48 numbers of 2 bits by channel",
            id="a group that does not divide the rows",
        ),
        pytest.param(
            layer(key_dim=48),
            replace(BY_TOKEN, key_group=16),
            "encoding.key_group",
            "16",
            "48 numbers of 3 bits by token",
            id="codes that do not fill words",
        ),
    ],
)
def test_contradictions_name_the_field_and_both_values(
    given: LayerLayout, encoding: Encoding, field: str, value: str, expected: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        layouts.check(3, given, encoding)
    assert caught.value.message == f"{field}: {value}, but the artifact has {expected}"
    assert caught.value.fields == {"field": field, "value": value, "expected": expected}


def test_a_contradiction_is_found_when_the_plan_is_made(packed_example: Callable[..., Any]) -> None:
    whole: Manifest = packed_example().manifest
    assert whole.layout is not None
    wrong = (*whole.layout[:2], replace(whole.layout[2], head_rows=(24, 25)))
    with pytest.raises(ManifestError, match=r"^layout\[2\]\.head_rows: \(24, 25\)"):
        make_plan(replace(whole, layout=wrong))
    # Counts that agree with the layout, but not with the sections.
    other = (*whole.layout[:2], replace(whole.layout[2], head_rows=(24, 8)))
    with pytest.raises(ManifestError, match=r"layers\.2\.positions.*\(33,\).*\(32,\)"):
        make_plan(replace(whole, layout=other))
