"""What the quality bound allows, what fits both ends, and what comes next when a form fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvferry.core import wire
from kvferry.core.addresses import parse_receiver
from kvferry.core.choice import MAX_REASON_CHARACTERS, QUALITIES, Estimate, LinkSpeed
from kvferry.core.compat import Profile
from kvferry.core.errors import InvalidRequestError, RefusedError
from kvferry.core.metrics import SenderMetrics
from kvferry.core.wire import NodeInfo
from kvferry.sender.auto import candidates, choosing
from kvferry.sender.auto.candidates import ALLOWED, FORMS, Candidate, misfit
from kvferry.sender.auto.decision import Decision
from kvferry.sender.link import Survey

VERSIONS = {"kvferry": "0.1.0", "mlx": "1", "mlx_lm": "1", "device": "cpu", "blas": ""}
TOKENS = 100


@pytest.fixture(scope="module")
def profile(tiny_model: Callable[..., Any]) -> Profile:
    found: Profile = tiny_model(heads=4, kv_heads=2, head_dim=64).profile
    return found


@pytest.fixture(scope="module")
def node(profile: Profile) -> NodeInfo:
    return wire.node_from_message(wire.node_to_message("receiver", profile, VERSIONS, 50.0))


def of(quality: Any, form: str) -> list[Candidate]:
    return [item for item in candidates.allowed(quality) if item.form == form]


# What is allowed


def test_each_bound_allows_what_the_narrower_one_does_and_more() -> None:
    exact, near, reduced = (ALLOWED[quality] for quality in QUALITIES)
    assert [name for name, _ in exact] == ["B1", "A7", "A1"]
    assert near[: len(exact)] == exact
    assert near[len(exact) :] == (("B2", {"bits": 8}), ("B2", {"key_bits": 8, "value_bits": 4}))
    assert reduced[: len(near)] == near
    assert [name for name, _ in reduced[len(near) :]] == ["B9", "B5", "A5", "A3"]


def test_nothing_that_is_allowed_looks_at_the_question() -> None:
    found = candidates.allowed("reduced")
    assert not any(item.method.info.aware for item in found)
    assert {item.form for item in found} == set(FORMS)
    assert len({(item.id, item.written) for item in found}) == len(found)


@pytest.mark.parametrize("given", [{}, {"quality": "exact"}])
def test_exact_is_the_default(given: dict[str, Any]) -> None:
    assert choosing.check(given, parse_receiver("127.0.0.1", "receiver")) == "exact"


def test_a_tcp_worker_is_refused_by_field() -> None:
    with pytest.raises(InvalidRequestError, match=r"^receiver: tcp://mini:9: ") as caught:
        choosing.check({}, parse_receiver("tcp://mini:9", "receiver"))
    assert caught.value.fields == {"field": "receiver", "value": "tcp://mini:9"}


# What fits


@pytest.mark.parametrize("quality", QUALITIES)
def test_the_same_model_at_both_ends_fits_everything(profile: Profile, node: NodeInfo, quality: Any) -> None:
    assert [misfit(item, profile, node, TOKENS) for item in candidates.allowed(quality)] == [""] * len(ALLOWED[quality])


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("weights", "WEIGHTS_MISMATCH model.weights"),
        ("tokenizer", "TOKENIZER_MISMATCH tokenizer.vocab"),
        ("chat_template", "CHAT_TEMPLATE_MISMATCH tokenizer.chat_template"),
        ("dtype", "DTYPE_UNSUPPORTED layout[0].dtype"),
    ],
)
def test_a_cache_needs_the_same_model_and_text_does_not(
    profile: Profile, node: NodeInfo, field: str, reason: str
) -> None:
    other = dataclasses.replace(node, **{field: "another"})
    for item in candidates.allowed("reduced"):
        why = misfit(item, profile, other, TOKENS)
        expected = f"{reason}: artifact {getattr(node, field)}, receiver another"
        assert why == (expected if item.form == "kv" else "")


def test_every_difference_is_named(profile: Profile, node: NodeInfo) -> None:
    other = dataclasses.replace(node, weights="w", tokenizer="t", chat_template="c", dtype="d")
    why = misfit(of("exact", "kv")[0], profile, other, TOKENS)
    assert [part.split()[0] for part in why.split("; ")] == [
        "WEIGHTS_MISMATCH",
        "TOKENIZER_MISMATCH",
        "CHAT_TEMPLATE_MISMATCH",
        "DTYPE_UNSUPPORTED",
    ]


def test_a_document_over_the_receivers_context_fits_only_in_parts(profile: Profile, node: NodeInfo) -> None:
    small = dataclasses.replace(node, context_length=TOKENS)
    expected = f"TOO_LARGE prefix.tokens: artifact {TOKENS}, receiver context of {TOKENS}"
    whole = {"B1", "B2", "B9", "B5", "A1", "A7"}
    for item in candidates.allowed("reduced"):
        assert misfit(item, profile, small, TOKENS) == (expected if item.id in whole else "")
        assert misfit(item, profile, small, TOKENS - 1) == ""
    # Another tokenizer may make fewer tokens of it.
    other = dataclasses.replace(small, tokenizer="another")
    assert [misfit(item, profile, other, TOKENS) for item in of("exact", "text")] == ["", ""]


def test_a_document_over_the_senders_context_is_not_read_here(profile: Profile, node: NodeInfo) -> None:
    small = dataclasses.replace(profile, context_length=TOKENS)
    for item in candidates.allowed("reduced"):
        why = misfit(item, small, node, TOKENS)
        assert why == ("" if item.form == "text" else "the document makes 100 tokens, and the sender's model takes 100")


def test_a_model_that_cannot_attend_packed_rows_can_send_dense_ones(profile: Profile, node: NodeInfo) -> None:
    limited = dataclasses.replace(profile, attention="its attention is its own")
    reasons = {(item.id, item.written): misfit(item, limited, node, TOKENS) for item in of("reduced", "kv")}
    assert reasons.pop(("B1", "")) == ""
    assert all("its attention is its own" in why for why in reasons.values())
    bare = dataclasses.replace(profile, unsupported="a sliding window")
    assert all("a sliding window" in misfit(item, bare, node, TOKENS) for item in of("reduced", "kv"))


def test_a_width_that_does_not_divide_is_passed_over(tiny_model: Callable[..., Any]) -> None:
    narrow: Profile = tiny_model(heads=4, kv_heads=2, head_dim=16).profile
    same = wire.node_from_message(wire.node_to_message("receiver", narrow, VERSIONS, 50.0))
    reasons = {(item.id, item.written): misfit(item, narrow, same, TOKENS) for item in of("near", "kv")}
    assert reasons["B1", ""] == ""
    assert "group" in reasons["B2", "bits=8"]


# What comes next


def priced(candidate: Candidate, milliseconds: float) -> Estimate:
    return Estimate(candidate.id, candidate.form, candidate.written, 10, milliseconds, 0.0, 0.0, milliseconds)


@pytest.fixture
def decision(node: NodeInfo) -> Decision:
    """Every method of "reduced", each cheaper than the one before."""
    link = LinkSpeed(1.0, 1e6)
    found = Decision("reduced", Survey(node, link, 77), 10.0)
    listed = candidates.allowed("reduced")
    for index, item in enumerate(listed):
        found.add(item, priced(item, 100.0 - index))
    return found


def test_the_quickest_of_all_comes_first_whatever_its_form(decision: Decision) -> None:
    chosen = decision.best()
    assert chosen.id == "A3"
    assert decision.fallback(chosen) == ("", "")
    choice = decision.choice(chosen)
    assert (choice.chosen.method, choice.quality, choice.probe_bytes) == ("A3", "reduced", 77)
    assert (choice.sender_tokens_per_second, choice.receiver_tokens_per_second) == (10.0, 50.0)
    assert len(choice.estimates) == len(ALLOWED["reduced"])


def test_a_cache_gives_way_to_evidence_and_evidence_to_text(decision: Decision) -> None:
    (cache, *_), (facts,), texts = (of("reduced", form) for form in FORMS)
    assert decision.give_way(cache, "refused: TOO_LARGE", 40.0)
    # The cheapest text would be quicker, and is not next.
    assert decision.best().id == facts.id
    assert decision.fallback(facts) == ("B1", "B1: refused: TOO_LARGE")
    assert decision.give_way(facts, "no fact", 2.0)
    chosen = decision.best()
    assert chosen.id == texts[-1].id
    assert decision.fallback(chosen) == ("B1", "B1: refused: TOO_LARGE; A5: no fact")
    passed = decision.choice(chosen).passed_over
    assert [(item.method, item.form, item.spent_ms) for item in passed] == [("B1", "kv", 40.0), ("A5", "evidence", 2.0)]
    assert not decision.give_way(chosen, "broken", 1.0)


def test_without_evidence_a_cache_gives_way_to_text(node: NodeInfo) -> None:
    link = LinkSpeed(1.0, 1e6)
    found = Decision("exact", Survey(node, link, 0), 1.0)
    for index, item in enumerate(candidates.allowed("exact")):
        found.add(item, priced(item, float(index)))
    assert found.best().id == "B1"
    assert found.give_way(found.best(), "refused", 0.0)
    assert found.best().id == "A7"


def test_what_is_slower_for_its_own_sake_is_no_fallback(decision: Decision) -> None:
    packed = of("near", "kv")[1]
    decision.pass_over(packed, "cannot be packed")
    # Another cache stands in for no form.
    assert decision.fallback(of("exact", "kv")[0]) == ("", "")
    assert decision.fallback(of("exact", "text")[0]) == ("B2", "B2 bits=8: cannot be packed")


def test_a_reason_that_several_have_is_told_once(node: NodeInfo) -> None:
    link = LinkSpeed(1.0, 1e6)
    found = Decision("near", Survey(node, link, 0), 1.0)
    for item in of("near", "kv"):
        found.pass_over(item, "WEIGHTS")
    with pytest.raises(RefusedError) as caught:
        found.best()
    told = "B1, B2 bits=8, B2 key_bits=8 value_bits=4: WEIGHTS"
    assert caught.value.message == f"auto: nothing of quality near can be used: {told}"
    assert found.fallback(of("near", "text")[0]) == ("B1", told)


def test_a_reason_without_end_is_cut(decision: Decision) -> None:
    decision.pass_over(of("exact", "kv")[0], "x" * 100_000)
    choice = decision.choice(decision.best())
    assert len(choice.passed_over[0].reason) == MAX_REASON_CHARACTERS
    assert msgspec.json.decode(msgspec.json.encode(choice), type=type(choice)) == choice


def test_what_is_passed_over_is_counted_and_told(decision: Decision) -> None:
    metrics = SenderMetrics("tiny", {"kvferry": "1", "device": "cpu"})
    parts: Any = SimpleNamespace(metrics=metrics)
    for _ in range(2):
        choosing.Choosing(parts, parts)._pass_over(decision, of("exact", "kv")[0], "too large")
    assert metrics.registry.get_sample_value("kvferry_auto_passed_over_total", {"method": "B1"}) == 2
    assert [item.reason for item in decision.choice(decision.best()).passed_over] == ["too large"] * 2
