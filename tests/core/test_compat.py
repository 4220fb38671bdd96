from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvferry.core.compat import Profile, Reason, ReasonCode, Verdict, judge
from kvferry.core.manifest import Encoding, Manifest, Mapper, Quantization
from kvferry.proto.v1 import common_pb2

change = msgspec.structs.replace
OTHER = b"\xee" * 32

# What each field of a group decides. A field that is not in its table makes the test fail: someone must say what a
# difference means. None: a difference is no reason to refuse.
MODEL = {
    "id": None,
    "revision": None,
    "type": ReasonCode.CONFIG_MISMATCH,
    "weights": ReasonCode.WEIGHTS_MISMATCH,
    "config": ReasonCode.CONFIG_MISMATCH,
    "quantization": ReasonCode.QUANTIZATION_MISMATCH,
    "adapter": ReasonCode.ADAPTER_MISMATCH,
}
TOKENIZER = {"vocab": ReasonCode.TOKENIZER_MISMATCH, "chat_template": ReasonCode.CHAT_TEMPLATE_MISMATCH}
PROMPT = {"version": ReasonCode.PROMPT_MISMATCH, "system": None}
ROPE = dict.fromkeys(["kind", "dims", "traditional", "base", "scale", "freqs", "mscale"], ReasonCode.ROPE_MISMATCH)
LAYOUT = {
    "cache_class": ReasonCode.LAYOUT_UNSUPPORTED,
    "kv_heads": ReasonCode.LAYOUT_MISMATCH,
    "key_dim": ReasonCode.LAYOUT_MISMATCH,
    "value_dim": ReasonCode.LAYOUT_MISMATCH,
    "dtype": ReasonCode.DTYPE_UNSUPPORTED,
    "rows": ReasonCode.LAYOUT_MISMATCH,
    "head_rows": None,
    "offset": ReasonCode.LAYOUT_MISMATCH,
    "positions": None,
    "packed_keys": None,
    "packed_values": None,
}
# What a stored layer is like; whether it agrees with itself is judged with the sections.
SHAPES = {"head_rows": (3, 2), "positions": "shared", "packed_keys": 7, "packed_values": 7}


@pytest.fixture
def manifest(kv_example: Callable[..., Any]) -> Manifest:
    found: Manifest = kv_example().manifest
    return found


@pytest.fixture
def profile(profile_of: Callable[[Manifest], Profile], manifest: Manifest) -> Profile:
    return profile_of(manifest)


def another(value: Any) -> Any:
    """A different value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    if isinstance(value, bytes):
        return OTHER
    if isinstance(value, str):
        return {"rope": "none", "F32": "BF16"}.get(value, "Another")
    if isinstance(value, Quantization):
        return change(value, bits=8)
    assert value is None
    return OTHER


def text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Quantization):
        return f"bits={value.bits}, group_size={value.group_size}, mode={value.mode}"
    return str(value)


def with_rope(manifest: Manifest, index: int, **changes: Any) -> Manifest:
    assert manifest.positions is not None
    rope = list(manifest.positions.rope)
    rope[index] = change(rope[index], **changes)
    return change(manifest, positions=change(manifest.positions, rope=tuple(rope)))


def with_layer(manifest: Manifest, index: int, **changes: Any) -> Manifest:
    layout = list(manifest.layout or ())
    layout[index] = change(layout[index], **changes)
    return change(manifest, layout=tuple(layout))


def check(verdict: Verdict, code: ReasonCode | None, field: str, artifact: Any, receiver: Any) -> None:
    if code is None:
        assert verdict.accepted, field
        assert verdict.reasons == ()
        return
    assert not verdict.accepted, field
    assert verdict.reasons == (Reason(code, field, text(artifact), text(receiver)),)


def test_what_the_profile_itself_made_is_accepted(
    kv_example: Callable[..., Any], profile_of: Callable[[Manifest], Profile]
) -> None:
    for dtype in ("F32", "F16", "BF16"):
        for rows in (1, 24, 40):
            one = kv_example(dtype=dtype, rows=rows).manifest
            verdict = judge(one, profile_of(one))
            assert verdict == Verdict(())
            assert verdict.accepted
            assert str(verdict) == "accepted"


@pytest.mark.parametrize(
    ("group", "table"),
    [("model", MODEL), ("tokenizer", TOKENIZER), ("prompt", PROMPT)],
    ids=["model", "tokenizer", "prompt"],
)
def test_each_field_of_the_model_the_tokenizer_and_the_prompt(
    manifest: Manifest, profile: Profile, group: str, table: dict[str, ReasonCode | None]
) -> None:
    struct = getattr(manifest, group)
    assert list(table) == list(struct.__struct_fields__)
    for name, code in table.items():
        was = getattr(struct, name)
        now = another(was)
        wrong = change(manifest, **{group: change(struct, **{name: now})})
        check(judge(wrong, profile), code, f"{group}.{name}", now, was)


@pytest.mark.parametrize("index", [0, 1])
def test_each_field_of_each_layers_rope(manifest: Manifest, profile: Profile, index: int) -> None:
    assert manifest.positions is not None
    rope = manifest.positions.rope[index]
    assert list(ROPE) == list(rope.__struct_fields__)
    for name, code in ROPE.items():
        was = getattr(rope, name)
        now = 500000.0 if name == "base" and was is None else another(was)
        verdict = judge(with_rope(manifest, index, **{name: now}), profile)
        check(verdict, code, f"positions.rope[{index}].{name}", now, was)


def test_the_last_bit_of_a_rope_base_counts(manifest: Manifest, profile: Profile) -> None:
    verdict = judge(with_rope(manifest, 0, base=10000.000000000002), profile)
    assert [reason.artifact for reason in verdict.reasons] == ["10000.000000000002"]


@pytest.mark.parametrize("index", [0, 1])
def test_each_field_of_each_layer(manifest: Manifest, profile: Profile, index: int) -> None:
    layer = (manifest.layout or ())[index]
    assert list(LAYOUT) == list(layer.__struct_fields__)
    for name, code in LAYOUT.items():
        was = getattr(layer, name)
        now = SHAPES[name] if name in SHAPES else another(was)
        verdict = judge(with_layer(manifest, index, **{name: now}), profile)
        # An evicted layer may hold fewer rows than the prefix, but not more.
        expected = "at most 40" if (name, index) == ("rows", 1) else was
        check(verdict, code, f"layout[{index}].{name}", now, expected)


def test_rows_and_positions(manifest: Manifest, profile: Profile) -> None:
    assert judge(with_layer(manifest, 0, positions="explicit"), profile).accepted
    assert judge(with_layer(manifest, 1, rows=40), profile).accepted
    check(
        judge(with_layer(manifest, 1, rows=41), profile), ReasonCode.LAYOUT_MISMATCH, "layout[1].rows", 41, "at most 40"
    )
    verdict = judge(with_layer(manifest, 1, positions="contiguous"), profile)
    check(verdict, ReasonCode.LAYOUT_MISMATCH, "layout[1].rows", 24, 40)
    check(judge(with_layer(manifest, 0, rows=39), profile), ReasonCode.LAYOUT_MISMATCH, "layout[0].rows", 39, 40)


@pytest.fixture
def renumbered(packed_example: Callable[..., Any]) -> Manifest:
    found: Manifest = packed_example("renumbered").manifest
    return found


def test_renumbered_rows_end_where_the_question_begins(
    renumbered: Manifest, profile_of: Callable[[Manifest], Profile]
) -> None:
    profile = profile_of(renumbered)

    def reasons(one: Manifest) -> list[tuple[str, str, str]]:
        found = judge(one, profile).reasons
        assert {reason.code for reason in found} <= {ReasonCode.LAYOUT_MISMATCH}
        return [(reason.field.removeprefix("layout[1]."), reason.artifact, reason.receiver) for reason in found]

    assert reasons(renumbered) == []
    assert reasons(with_layer(renumbered, 1, rows=23)) == [("rows", "23", "24")]
    # One position for all layers, and it is that of the first row that is not there.
    shorter = [("offset", "23", "24"), ("rows", "23", "24")]
    assert reasons(with_layer(renumbered, 1, rows=23, offset=23)) == shorter
    assert reasons(with_layer(renumbered, 1, positions="contiguous")) == [("offset", "24", "40"), ("rows", "24", "40")]
    # Rows at their true positions beside renumbered ones, with either logical length.
    for kind in ("explicit", "shared"):
        assert reasons(with_layer(renumbered, 1, positions=kind, offset=40)) == [("offset", "40", "24")]
        assert reasons(with_layer(renumbered, 1, positions=kind)) == [("offset", "24", "40")]
    # The prefix has 40 tokens; nobody can hold more rows.
    longer = with_layer(with_layer(renumbered, 0, rows=41, offset=41), 1, rows=41, offset=41)
    assert reasons(longer) == [("layout[0].rows", "41", "at most 40"), ("rows", "41", "at most 40")]


@pytest.mark.parametrize("name", ["bits", "group_size", "mode"])
def test_each_field_of_the_weights_quantisation(manifest: Manifest, profile: Profile, name: str) -> None:
    assert manifest.model is not None
    assert manifest.model.quantization is not None
    was = manifest.model.quantization
    now = change(was, **{name: another(getattr(was, name))})
    verdict = judge(change(manifest, model=change(manifest.model, quantization=now)), profile)
    check(verdict, ReasonCode.QUANTIZATION_MISMATCH, "model.quantization", now, was)


def test_quantised_against_not_quantised(manifest: Manifest, profile: Profile) -> None:
    assert manifest.model is not None
    plain = change(manifest, model=change(manifest.model, quantization=None))
    check(
        judge(plain, profile), ReasonCode.QUANTIZATION_MISMATCH, "model.quantization", None, profile.model.quantization
    )
    bare = replace(profile, model=change(profile.model, quantization=None))
    was = manifest.model.quantization
    check(judge(manifest, bare), ReasonCode.QUANTIZATION_MISMATCH, "model.quantization", was, None)


def test_an_adapter_on_either_side(manifest: Manifest, profile: Profile) -> None:
    adapted = replace(profile, model=change(profile.model, adapter=OTHER))
    check(judge(manifest, adapted), ReasonCode.ADAPTER_MISMATCH, "model.adapter", None, OTHER)


def test_the_receivers_side_counts_as_well(manifest: Manifest, profile: Profile) -> None:
    """The same tables, with the receiver changed: both values, the other way round."""
    for name, code in MODEL.items():
        was = getattr(profile.model, name)
        wrong = replace(profile, model=change(profile.model, **{name: another(was)}))
        check(judge(manifest, wrong), code, f"model.{name}", was, another(was))
    for name in ("kv_heads", "key_dim", "value_dim"):
        was = getattr(profile.layers[1], name)
        layers = (profile.layers[0], change(profile.layers[1], **{name: was + 1}))
        verdict = judge(manifest, replace(profile, layers=layers))
        check(verdict, ReasonCode.LAYOUT_MISMATCH, f"layout[1].{name}", was, was + 1)


# Layers missing, added, reordered


def with_layers(manifest: Manifest, order: tuple[int, ...]) -> Manifest:
    assert manifest.positions is not None
    rope, layout = manifest.positions.rope, manifest.layout or ()
    return change(
        manifest,
        positions=change(manifest.positions, rope=tuple(rope[index] for index in order)),
        layout=tuple(layout[index] for index in order),
    )


@pytest.mark.parametrize(("order", "count"), [((0,), 1), ((0, 1, 1), 3)], ids=["missing", "extra"])
def test_another_number_of_layers_is_refused(
    manifest: Manifest, profile: Profile, order: tuple[int, ...], count: int
) -> None:
    assert judge(with_layers(manifest, order), profile).reasons == (
        Reason(ReasonCode.ROPE_MISMATCH, "positions.rope", f"{count} layers", "2 layers"),
        Reason(ReasonCode.LAYOUT_MISMATCH, "layout", f"{count} layers", "2 layers"),
    )


def test_layout_and_rope_are_counted_apart(manifest: Manifest, profile: Profile) -> None:
    short = with_layers(manifest, (0,))
    for one, field in (
        (change(manifest, layout=short.layout), "layout"),
        (change(manifest, positions=short.positions), "positions.rope"),
    ):
        assert [reason.field for reason in judge(one, profile).reasons] == [field]


def test_reordered_layers_are_refused(manifest: Manifest, profile: Profile) -> None:
    verdict = judge(with_layers(manifest, (1, 0)), profile)
    assert {reason.field for reason in verdict.reasons} == {
        "positions.rope[0].base",
        "positions.rope[0].freqs",
        "positions.rope[1].base",
        "positions.rope[1].freqs",
        "layout[0].value_dim",
        "layout[1].value_dim",
    }


# The rest of the manifest


def test_every_difference_is_reported_in_the_manifests_order(manifest: Manifest, profile: Profile) -> None:
    assert manifest.model is not None
    assert manifest.tokenizer is not None
    wrong = change(
        with_rope(with_layer(manifest, 1, dtype="F16", kv_heads=7), 0, base=1.0),
        model=change(manifest.model, weights=OTHER, config=OTHER),
        tokenizer=change(manifest.tokenizer, vocab=OTHER),
        prompt=change(manifest.prompt, version=9),
        mapper=Mapper(OTHER, OTHER, OTHER, "L2"),
        encoding=Encoding(7, 4, 64, 48, "token", "range", None),
    )
    verdict = judge(wrong, replace(profile, context_length=40, max_payload_bytes=1))
    assert [(reason.code.name, reason.field) for reason in verdict.reasons] == [
        ("WEIGHTS_MISMATCH", "model.weights"),
        ("CONFIG_MISMATCH", "model.config"),
        ("TOKENIZER_MISMATCH", "tokenizer.vocab"),
        ("PROMPT_MISMATCH", "prompt.version"),
        ("TOO_LARGE", "prefix.tokens"),
        ("ROPE_MISMATCH", "positions.rope[0].base"),
        ("LAYOUT_MISMATCH", "layout[1].kv_heads"),
        ("DTYPE_UNSUPPORTED", "layout[1].dtype"),
        ("NO_MAPPER", "mapper.digest"),
        ("ENCODING_UNSUPPORTED", "encoding.key_bits"),
        ("ENCODING_UNSUPPORTED", "encoding.value_group"),
        ("ENCODING_UNSUPPORTED", "encoding.entropy"),
        ("TOO_LARGE", "payload.length"),
    ]
    groups = [reason.field.partition(".")[0].partition("[")[0] for reason in verdict.reasons]
    assert groups == sorted(groups, key=Manifest.__struct_fields__.index)
    assert str(verdict).count("; ") == 12
    assert f"WEIGHTS_MISMATCH model.weights: artifact {OTHER.hex()}, receiver {profile.model.weights.hex()}" in str(
        verdict
    )


def test_a_mapped_cache_is_refused(manifest: Manifest, profile: Profile) -> None:
    for level in ("L0.5", "L2"):
        verdict = judge(change(manifest, mapper=Mapper(OTHER, OTHER, OTHER, level)), profile)
        check(verdict, ReasonCode.NO_MAPPER, "mapper.digest", OTHER, "no mapper installed")


WIDTHS, GROUPS = "one of 2, 3, 4, 5, 6, 8", "one of 32, 64, 128"


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("key_bits", 7, WIDTHS),
        ("key_bits", 1, WIDTHS),
        ("value_bits", 16, WIDTHS),
        ("key_group", 48, GROUPS),
        ("value_group", 256, GROUPS),
        ("entropy", "range", None),
    ],
)
def test_encodings_that_nobody_here_decodes_are_refused(
    manifest: Manifest, profile: Profile, name: str, value: object, known: object
) -> None:
    verdict = judge(change(manifest, encoding=change(manifest.encoding, **{name: value})), profile)
    check(verdict, ReasonCode.ENCODING_UNSUPPORTED, f"encoding.{name}", value, known)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_every_known_encoding_is_accepted(
    manifest: Manifest, profile: Profile, bits: int, group: int, axis: Any
) -> None:
    for encoding in (
        Encoding(bits, bits, group, group, axis, None, None),
        Encoding(bits, None, group, None, axis, None, None),
        Encoding(None, bits, None, group, None, None, None),
    ):
        assert judge(change(manifest, encoding=encoding), profile).accepted


@pytest.mark.parametrize("which", ["token", "channel", "renumbered"])
def test_every_layout_is_accepted_by_its_own_receiver(
    packed_example: Callable[..., Any], profile_of: Callable[[Manifest], Profile], which: str
) -> None:
    for dtype in ("F32", "F16", "BF16"):
        one = packed_example(which, dtype).manifest
        assert judge(one, profile_of(one)) == Verdict()


def test_a_receiver_without_attention_of_its_own_refuses_packed_rows_and_ragged_heads(
    packed_example: Callable[..., Any], kv_example: Callable[..., Any], profile_of: Callable[[Manifest], Profile]
) -> None:
    why = "model type gemma2: its attention does not go through mlx-lm's function"

    def reasons(one: Manifest) -> list[tuple[str, str, str, str]]:
        verdict = judge(one, replace(profile_of(one), attention=why))
        return [(reason.code.value, reason.field, reason.artifact, reason.receiver) for reason in verdict.reasons]

    keys = ("ENCODING_UNSUPPORTED", "encoding.key_bits", "packed rows of 3 bits", why)
    values = ("ENCODING_UNSUPPORTED", "encoding.value_bits", "packed rows of 4 bits", why)
    ragged = ("LAYOUT_UNSUPPORTED", "layout[2].head_rows", "ragged heads", why)
    uneven = ("LAYOUT_UNSUPPORTED", "layout[1].rows", "24, and 40 in the first layer", why)
    assert reasons(kv_example(rows=24).manifest) == [uneven]
    whole = packed_example().manifest
    assert reasons(whole) == [uneven, keys, values]
    for index in (0, 1):
        rows = {"rows": 24, "positions": "explicit"}
        whole = with_layer(whole, index, **rows, packed_keys=24, packed_values=24)
    assert reasons(whole) == [ragged, keys, values]
    assert reasons(with_layer(whole, 2, head_rows=None)) == [keys, values]
    dense = {"packed_keys": 0, "packed_values": 0}
    parted = whole
    for index in range(3):
        parted = with_layer(parted, index, packed_keys=0)
    assert reasons(with_layer(parted, 2, head_rows=None)) == [values]
    for index in range(3):
        parted = with_layer(parted, index, **dense)
    assert reasons(parted) == [ragged]
    # Whatever is dense and as long in every head is mlx-lm's own business.
    assert reasons(with_layer(parted, 2, head_rows=None)) == []
    assert reasons(packed_example("renumbered").manifest) == []
    assert reasons(kv_example(rows=40).manifest) == []


def test_the_payload_limit_is_inclusive(manifest: Manifest, profile: Profile) -> None:
    length = manifest.payload.length
    assert judge(manifest, replace(profile, max_payload_bytes=length)).accepted
    verdict = judge(manifest, replace(profile, max_payload_bytes=length - 1))
    check(verdict, ReasonCode.TOO_LARGE, "payload.length", length, f"at most {length - 1}")


def test_the_prefix_must_leave_room_in_the_context(manifest: Manifest, profile: Profile) -> None:
    # The probe's suffix has two tokens, and an answer has one.
    assert judge(manifest, replace(profile, context_length=43)).accepted
    for context in (42, 41, 40):
        verdict = judge(manifest, replace(profile, context_length=context))
        told = f"context of {context}, 3 of it for question and answer"
        check(verdict, ReasonCode.TOO_LARGE, "prefix.tokens", 40, told)
    bare = change(manifest, parity=None)
    assert judge(bare, replace(profile, context_length=42)).accepted
    assert not judge(bare, replace(profile, context_length=41)).accepted


def test_a_model_whose_cache_cannot_be_carried_refuses_kv(manifest: Manifest, profile: Profile) -> None:
    verdict = judge(manifest, replace(profile, unsupported="layer 3 is a RotatingKVCache"))
    check(verdict, ReasonCode.LAYOUT_UNSUPPORTED, "layout", "2 layers of KVCache", "layer 3 is a RotatingKVCache")


def test_what_only_describes_is_no_reason_to_refuse(manifest: Manifest, profile: Profile) -> None:
    assert manifest.positions is not None
    for one in (
        change(manifest, runtime=change(manifest.runtime, kvferry="9", mlx="9", mlx_lm="9", device="gpu")),
        change(manifest, positions=change(manifest.positions, probe_error=1e-3)),
        change(manifest, document=change(manifest.document, digest=OTHER)),
        change(manifest, method=change(manifest.method, params={"budget": 1})),
    ):
        assert judge(one, profile).accepted


# Text


def strangers(profile: Profile) -> Iterator[Profile]:
    yield profile
    yield replace(
        profile,
        model=change(profile.model, type="gemma3", weights=OTHER, config=OTHER, quantization=None, adapter=OTHER),
        tokenizer=change(profile.tokenizer, vocab=OTHER, chat_template=OTHER),
        rope=(),
        layers=(),
        context_length=1,
        unsupported="every layer slides",
    )


def test_text_is_accepted_by_any_model(
    text_example: Callable[..., Any], zstd_example: Callable[..., Any], profile: Profile
) -> None:
    for receiver in strangers(profile):
        for manifest in (text_example().manifest, zstd_example().manifest):
            anew = change(manifest, method=change(manifest.method, consume="prefill"))
            assert judge(anew, receiver) == Verdict(())


def test_text_that_is_read_once_needs_a_cache_that_can_be_kept(
    text_example: Callable[..., Any], profile: Profile
) -> None:
    manifest = text_example().manifest
    once = change(manifest, method=change(manifest.method, consume="prefill_once"))
    assert judge(once, profile) == Verdict(())
    verdict = judge(once, replace(profile, unsupported="layer 3 is a RotatingKVCache"))
    check(verdict, ReasonCode.LAYOUT_UNSUPPORTED, "method.consume", "prefill_once", "layer 3 is a RotatingKVCache")


def test_text_is_refused_for_its_prompt_and_its_size_only(text_example: Callable[..., Any], profile: Profile) -> None:
    one = text_example().manifest
    verdict = judge(change(one, prompt=change(one.prompt, version=2)), profile)
    check(verdict, ReasonCode.PROMPT_MISMATCH, "prompt.version", 2, 1)
    verdict = judge(one, replace(profile, max_payload_bytes=10))
    check(verdict, ReasonCode.TOO_LARGE, "payload.length", one.payload.length, "at most 10")


@pytest.mark.parametrize("form", ["evidence", "references"])
def test_messages_fit_every_model_that_knows_the_prompt(
    message_example: Callable[..., Any], profile: Profile, form: str
) -> None:
    one = message_example(form).manifest
    assert judge(one, profile).accepted
    verdict = judge(change(one, prompt=change(one.prompt, version=2)), profile)
    check(verdict, ReasonCode.PROMPT_MISMATCH, "prompt.version", 2, 1)


# Names and sizes


def test_the_names_are_those_of_the_protocol() -> None:
    names = set(common_pb2.ReasonCode.DESCRIPTOR.values_by_name)
    assert names == {"REASON_CODE_UNSPECIFIED"} | {f"REASON_CODE_{code.name}" for code in ReasonCode}
    assert all(code.name == code.value for code in ReasonCode)


def test_dense_bytes_are_those_of_a_bf16_cache(profile: Profile) -> None:
    # Per layer: heads x (key + value dimensions) x 2 bytes.
    assert profile.dense_bytes_per_token == 2 * (8 + 8) * 2 + 2 * (8 + 4) * 2
