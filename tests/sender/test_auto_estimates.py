"""What each method is expected to take: against arithmetic of its own, and what must hold whatever the figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.choice import QUALITIES, Estimate, LinkSpeed
from kvferry.core.compat import Profile
from kvferry.core.errors import UnknownMethodError
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import LABELS
from kvferry.sender import registry
from kvferry.sender.auto import candidates, choosing
from kvferry.sender.auto.candidates import Candidate
from kvferry.sender.auto.estimates import Conditions, Text, estimate, prompt_tokens, quickest

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 64
TEXT = Text(
    prefix_tokens=1000,
    tokens=960,
    around_tokens=44,
    question_tokens=32,
    probe_tokens=20,
    bytes=4000,
    characters=3900,
    system_bytes=100,
    zstd_bytes=1500,
    zstd_ms=2.0,
)
# A safetensors header says name, type, shape and offsets of each section.
HEADER = 160


@pytest.fixture(scope="module")
def profile(tiny_model: Callable[..., Any]) -> Profile:
    found: Profile = tiny_model(heads=4, kv_heads=KV_HEADS, head_dim=HEAD_DIM, layers=LAYERS).profile
    return found


def conditions(profile: Profile, **changes: Any) -> Conditions:
    given = {
        "link": LinkSpeed(10.0, 1e6),
        "sender_tokens_per_second": 500.0,
        "receiver_tokens_per_second": 100.0,
        "sender_decode_tokens_per_second": 50.0,
        "profile": profile,
    }
    return Conditions(**(given | changes))


def one(method: str, **given: Any) -> Candidate:
    found = registry.find(method)
    written = " ".join(f"{name}={value}" for name, value in given.items())
    return Candidate(found, registry.check_parameters(found, given), written)


def total(found: Estimate) -> float:
    return found.sender_ms + found.transfer_ms + found.receiver_ms


# Against arithmetic


def test_a_dense_cache(profile: Profile) -> None:
    found = estimate(one("B1"), TEXT, conditions(profile))
    rows = LAYERS * 2 * KV_HEADS * 1000
    size = rows * HEAD_DIM * 4 + 4 * 1000
    assert size < found.bytes < size + HEADER * (1 + 2 * LAYERS)
    # 1000 tokens and the probe at 500 a second, then writing.
    assert found.sender_ms == pytest.approx(2040 + found.bytes / 250e3)
    assert found.transfer_ms == pytest.approx(30 + found.bytes / 1e3)
    # The probe and the question at 100 a second, and the cache from disk.
    assert found.receiver_ms == pytest.approx(520 + found.bytes / 500e3)
    assert found.first_token_ms == pytest.approx(total(found))


@pytest.mark.parametrize(
    ("given", "bytes_a_row_pair"),
    [
        # Of a row's 64 keys and 64 values: codes, and a scale and a bias in float32 for each group of 64.
        ({"bits": 8}, 2 * (64 + 8)),
        ({"key_bits": 8, "value_bits": 4}, (64 + 8) + (32 + 8)),
    ],
)
def test_a_packed_cache(profile: Profile, given: dict[str, int], bytes_a_row_pair: int) -> None:
    found = estimate(one("B2", **given), TEXT, conditions(profile))
    size = LAYERS * KV_HEADS * 1000 * bytes_a_row_pair + 4 * 1000
    assert size < found.bytes < size + HEADER * (1 + 6 * LAYERS)
    assert found.parameters == " ".join(f"{name}={value}" for name, value in given.items())


def test_a_quarter_of_the_rows_with_where_they_stood(profile: Profile) -> None:
    now = conditions(profile)
    found = estimate(one("B5", budget=0.25), TEXT, now)
    size = LAYERS * KV_HEADS * 250 * (2 * HEAD_DIM * 4 + 4) + 4 * 1000
    assert size < found.bytes < size + HEADER * (1 + 3 * LAYERS)
    # Beside prefix and probe the window of 32 tokens.
    assert found.sender_ms == pytest.approx((1000 + 20 + 32) * 2 + found.bytes / 250e3)


def test_a_text_and_its_compressed_form(profile: Profile) -> None:
    now = conditions(profile)
    plain, packed = estimate(one("A1"), TEXT, now), estimate(one("A7"), TEXT, now)
    assert 4100 < plain.bytes < 4100 + 2 * HEADER
    assert plain.bytes - packed.bytes == pytest.approx(2500, abs=10)
    assert (plain.sender_ms, packed.sender_ms) == (0.0, 2.0)
    # Everything is read: 1000 tokens of the prefix, and the question.
    assert plain.receiver_ms == packed.receiver_ms == pytest.approx(10_320)


def test_a_quarter_of_the_text(profile: Profile) -> None:
    found = estimate(one("A3", budget=0.25), TEXT, conditions(profile))
    assert 1100 < found.bytes < 1100 + 2 * HEADER
    # 40 tokens around the document, 240 of it, 32 of the question.
    assert found.receiver_ms == pytest.approx(3120)
    assert found.sender_ms == pytest.approx(3900 / 100)


def test_facts_cost_a_reading_and_a_writing(profile: Profile) -> None:
    found = estimate(one("A5"), TEXT, conditions(profile))
    # A quarter of 960 tokens at 50 a second, four times as many of form and quotes at 500.
    assert found.sender_ms == pytest.approx(2000 + 240 * 20 + 4 * 240 * 2)
    assert found.receiver_ms == pytest.approx((40 + 32 + 240) * 10)
    assert 1100 < found.bytes < 1100 + 2 * HEADER


def test_a_long_document_has_no_more_facts_than_there_may_be(profile: Profile) -> None:
    long = dataclasses.replace(TEXT, prefix_tokens=100_040, tokens=100_000, bytes=400_000, characters=400_000)
    read = estimate(one("A5"), long, conditions(profile)).receiver_ms / 10 - 40 - 32
    # 64 of at most 80 + 80 + 100 characters, four a token, and no further than the model's context.
    assert read == min(64 * 260 / 4, profile.context_length)
    assert prompt_tokens(one("A5"), long) == 44 + 64 * 260 / 4


def test_every_method_that_is_allowed_is_known_and_no_other_is_taken_for_one(profile: Profile) -> None:
    for candidate in candidates.allowed("reduced"):
        assert prompt_tokens(candidate, TEXT) > 0
        assert estimate(candidate, TEXT, conditions(profile)).bytes > 0
    ids = {candidate.id for candidate in candidates.allowed("reduced")}
    others = [method.info.id for method in registry.METHODS if method.info.id not in ids]
    assert {"A2", "A4", "A6", "B0", "snapkv"} & set(others)
    for name in others:
        for ask in (
            lambda item: prompt_tokens(item, TEXT),
            lambda item: estimate(item, TEXT, conditions(profile)),
        ):
            with pytest.raises(UnknownMethodError, match=f"auto cannot tell what {name} takes"):
                ask(one(name))


def test_a_cache_at_hand_is_not_read_again(profile: Profile) -> None:
    read, at_hand = (estimate(one("B1"), TEXT, conditions(profile, cached=cached)) for cached in (False, True))
    assert read.sender_ms - at_hand.sender_ms == pytest.approx(2000)
    assert (read.bytes, read.transfer_ms, read.receiver_ms) == (at_hand.bytes, at_hand.transfer_ms, at_hand.receiver_ms)


def test_what_was_made_before_has_its_real_size_and_costs_the_sender_nothing(profile: Profile) -> None:
    candidate = one("A5")
    found = estimate(candidate, TEXT, conditions(profile, made={candidate: 77}))
    assert (found.bytes, found.sender_ms) == (77, 0.0)
    assert found.transfer_ms == pytest.approx(30.077)


def test_an_empty_document_can_be_estimated(profile: Profile) -> None:
    empty = dataclasses.replace(TEXT, prefix_tokens=40, tokens=0, bytes=0, characters=0)
    for candidate in candidates.allowed("reduced"):
        assert estimate(candidate, empty, conditions(profile)).first_token_ms > 0


@pytest.mark.parametrize("question", [None, "", "Who keeps the keys of the north warehouse?"])
def test_a_request_is_measured_in_the_senders_tokens(
    workshop: Callable[..., Any], tiny_model: Callable[..., LoadedModel], question: str | None
) -> None:
    prompt, text, system = tiny_model("llama").prompt, "Zoë keeps the keys. ", "Be briéf."
    found = choosing._measured(workshop(tiny_model("llama")).reading(text, system, question), 9, 1.5)
    whole, bare = (len(prompt.prefix(part, system)) for part in (text, ""))
    assert found == Text(
        prefix_tokens=whole,
        tokens=whole - bare,
        around_tokens=max(len(prompt.prefix("", system, kind)) for kind in LABELS),
        question_tokens=len(prompt.fresh(question)) if question else 32,
        probe_tokens=len(prompt.fresh("What is this document about?")),
        bytes=len(text.encode()),
        characters=len(text),
        system_bytes=len(system.encode()),
        zstd_bytes=9,
        zstd_ms=1.5,
    )


# Whatever the figures


RATES = st.floats(1, 1e6)
LINKS = st.builds(LinkSpeed, st.floats(0, 1000), st.floats(1e3, 1e10))
SITUATIONS = st.fixed_dictionaries(
    {
        "link": LINKS,
        "sender_tokens_per_second": RATES,
        "receiver_tokens_per_second": RATES,
        "sender_decode_tokens_per_second": RATES,
        "cached": st.booleans(),
    }
)
TEXTS = st.builds(
    lambda tokens, per_token, ratio: dataclasses.replace(
        TEXT,
        prefix_tokens=tokens + 40,
        tokens=tokens,
        bytes=tokens * per_token,
        characters=tokens * per_token,
        zstd_bytes=round(tokens * per_token * ratio),
    ),
    st.integers(1, 20_000),
    st.integers(1, 6),
    st.floats(0.1, 1.0),
)


def weighed(quality: Any, text: Text, now: Conditions) -> list[tuple[Candidate, Estimate]]:
    return [(item, estimate(item, text, now)) for item in candidates.allowed(quality)]


@settings(max_examples=40)
@given(st.sampled_from(QUALITIES), TEXTS, SITUATIONS)
def test_nothing_that_is_allowed_is_quicker_than_what_is_taken(
    profile: Profile, quality: Any, text: Text, situation: dict[str, Any]
) -> None:
    found = weighed(quality, text, conditions(profile, **situation))
    chosen = quickest(found)[1]
    assert min(total(item) for _, item in found) == pytest.approx(chosen.first_token_ms)
    # A wider bound never makes the first token later.
    narrower = [weighed(name, text, conditions(profile, **situation)) for name in QUALITIES[: QUALITIES.index(quality)]]
    assert all(chosen.first_token_ms <= quickest(items)[1].first_token_ms for items in narrower)


@settings(max_examples=40)
@given(st.sampled_from(QUALITIES), TEXTS, SITUATIONS, st.floats(1, 1000))
def test_a_faster_link_never_leads_to_fewer_bytes(
    profile: Profile, quality: Any, text: Text, situation: dict[str, Any], factor: float
) -> None:
    link = situation["link"]
    faster = msgspec.structs.replace(link, bytes_per_second=link.bytes_per_second * factor)
    slow, fast = (
        quickest(weighed(quality, text, conditions(profile, **{**situation, "link": one})))[1] for one in (link, faster)
    )
    assert fast.bytes >= slow.bytes
    assert fast.first_token_ms <= slow.first_token_ms
    if text.bytes + 1000 < 4 * text.tokens * LAYERS * KV_HEADS * HEAD_DIM // 4:
        assert (slow.form, fast.form) != ("kv", "text")


@settings(max_examples=40)
@given(st.sampled_from(QUALITIES[:2]), TEXTS, SITUATIONS, st.floats(1, 1000))
def test_a_faster_receiver_never_moves_the_choice_from_text_to_a_cache(
    profile: Profile, quality: Any, text: Text, situation: dict[str, Any], factor: float
) -> None:
    speed = situation["receiver_tokens_per_second"]
    slow, fast = (
        quickest(weighed(quality, text, conditions(profile, **{**situation, "receiver_tokens_per_second": one})))[1]
        for one in (speed, speed * factor)
    )
    assert (slow.form, fast.form) != ("text", "kv")


@settings(max_examples=40)
@given(st.sampled_from(QUALITIES[:2]), TEXTS, SITUATIONS, st.floats(1, 1000))
def test_a_faster_sender_never_moves_the_choice_from_a_cache_to_text(
    profile: Profile, quality: Any, text: Text, situation: dict[str, Any], factor: float
) -> None:
    speed = situation["sender_tokens_per_second"]
    slow, fast = (
        quickest(weighed(quality, text, conditions(profile, **{**situation, "sender_tokens_per_second": one})))[1]
        for one in (speed, speed * factor)
    )
    assert (slow.form, fast.form) != ("kv", "text")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # A fast link and a slow receiver: the cache. A slow link, or a slow sender: the text, compressed.
        ({"link": LinkSpeed(1.0, 1e9), "receiver_tokens_per_second": 100.0}, "B1"),
        ({"link": LinkSpeed(1.0, 1e4), "receiver_tokens_per_second": 100.0}, "A7"),
        ({"link": LinkSpeed(1.0, 1e9), "sender_tokens_per_second": 50.0}, "A1"),
        # Unless the cache is there already.
        ({"link": LinkSpeed(1.0, 1e9), "sender_tokens_per_second": 50.0, "cached": True}, "B1"),
        ({"link": LinkSpeed(1.0, 1e9), "receiver_tokens_per_second": 1e6}, "A1"),
    ],
)
def test_what_wins_where(profile: Profile, changes: dict[str, Any], expected: str) -> None:
    assert quickest(weighed("exact", TEXT, conditions(profile, **changes)))[0].id == expected


def test_equals_are_taken_in_order(profile: Profile) -> None:
    found = [(one(name), estimate(one("B1"), TEXT, conditions(profile))) for name in ("A7", "B1", "A1")]
    assert quickest(found)[0].id == "A7"
