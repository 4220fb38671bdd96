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
from kvferry.core.compat import Profile, Reason, ReasonCode, Verdict, refusal
from kvferry.core.errors import (
    InvalidRequestError,
    KvferryError,
    ModelError,
    QuotaError,
    RefusedError,
    TooLargeError,
)
from kvferry.core.metrics import SenderMetrics
from kvferry.core.wire import NodeInfo
from kvferry.sender.auto import candidates, choosing
from kvferry.sender.auto.candidates import ALLOWED, FORMS, Candidate
from kvferry.sender.auto.decision import Decision
from kvferry.sender.auto.estimates import Text
from kvferry.sender.auto.fitting import Ends
from kvferry.sender.link import Survey

VERSIONS = {"kvferry": "0.1.0", "mlx": "1", "mlx_lm": "1", "device": "cpu", "blas": ""}
TOKENS = 100
QUESTION = 7
TEXT = Text(
    prefix_tokens=TOKENS,
    tokens=80,
    around_tokens=24,
    question_tokens=QUESTION,
    probe_tokens=6,
    bytes=400,
    characters=400,
    system_bytes=40,
    zstd_bytes=200,
    zstd_ms=1.0,
)


@pytest.fixture(scope="module")
def profile(tiny_model: Callable[..., Any]) -> Profile:
    found: Profile = tiny_model(heads=4, kv_heads=2, head_dim=64).profile
    return found


@pytest.fixture(scope="module")
def node(profile: Profile) -> NodeInfo:
    return wire.node_from_message(wire.node_to_message("receiver", profile, VERSIONS, 50.0))


def of(quality: Any, form: str) -> list[Candidate]:
    return [item for item in candidates.allowed(quality) if item.form == form]


def misfit(candidate: Candidate, ours: Profile, theirs: NodeInfo, text: Text = TEXT) -> str:
    return Ends(ours, theirs, text).misfit(candidate)


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
    assert [misfit(item, profile, node) for item in candidates.allowed(quality)] == [""] * len(ALLOWED[quality])


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
        why = misfit(item, profile, other)
        expected = f"{reason}: artifact {getattr(node, field)}, receiver another"
        assert why == (expected if item.form == "kv" else "")


def test_every_difference_is_named(profile: Profile, node: NodeInfo) -> None:
    other = dataclasses.replace(node, weights="w", tokenizer="t", chat_template="c", dtype="d")
    why = misfit(of("exact", "kv")[0], profile, other)
    assert [part.split()[0] for part in why.split("; ")] == [
        "WEIGHTS_MISMATCH",
        "TOKENIZER_MISMATCH",
        "CHAT_TEMPLATE_MISMATCH",
        "DTYPE_UNSUPPORTED",
    ]


def needed(candidate: Candidate, text: Text) -> int:
    """The oracle: tokens before the question."""
    if candidate.id not in {"A3", "A5"}:
        return text.prefix_tokens
    return text.around_tokens + text.tokens // 4


@pytest.mark.parametrize("item", candidates.allowed("reduced"), ids=lambda item: f"{item.id} {item.written}")
def test_what_the_receiver_has_no_room_to_ask_about_is_passed_over_with_both_values(
    profile: Profile, node: NodeInfo, item: Candidate
) -> None:
    before = needed(item, TEXT)
    for context in (before + QUESTION + 1, before + QUESTION, before, 1):
        small = dataclasses.replace(node, context_length=context)
        told = f"TOO_LARGE prefix.tokens: artifact {before}, receiver context of {context}"
        told += ", 8 of it for question and answer"
        assert misfit(item, profile, small) == (told if context <= before + QUESTION else "")
        # Another tokenizer may make fewer tokens of it.
        if item.form != "kv":
            assert misfit(item, profile, dataclasses.replace(small, tokenizer="another")) == ""


def test_of_a_very_long_document_only_what_has_an_end_of_its_own_fits(profile: Profile, node: NodeInfo) -> None:
    long = dataclasses.replace(TEXT, prefix_tokens=100_020, tokens=100_000, bytes=400_000, characters=400_000)
    ours, theirs = (dataclasses.replace(one, context_length=size) for one, size in ((profile, 131_072), (node, 8192)))
    found = {item.id: Ends(ours, theirs, long).misfit(item) for item in candidates.allowed("reduced")}  # type: ignore[arg-type]
    assert "artifact 25024, receiver context of 8192" in found["A3"]
    assert "artifact 100020, receiver context of 8192" in found["A1"]
    # There are 64 facts at most, however large the budget.
    assert {name for name, why in found.items() if not why} == {"A5"}
    # In a script that takes more tokens a character these may be too long as well.
    dense = dataclasses.replace(long, characters=100_000)
    assert "receiver context of 8192" in Ends(ours, theirs, dense).misfit(of("reduced", "evidence")[0])  # type: ignore[arg-type]


def stored(form: str, **outcome: Any) -> Any:
    return SimpleNamespace(manifest=SimpleNamespace(form=form, method=SimpleNamespace(outcome=outcome)))


def test_what_was_made_and_is_of_no_use_says_why(profile: Profile, node: NodeInfo) -> None:
    ends = Ends(profile, dataclasses.replace(node, context_length=TEXT.around_tokens + 50 + QUESTION + 1), TEXT)
    assert ends.useless(stored("kv")) == ""
    assert ends.useless(stored("text")) == ""
    assert ends.useless(stored("evidence", confirmed=1, facts=3, tokens=50)) == ""
    assert "confirms none of the 3 facts" in ends.useless(stored("evidence", confirmed=0, facts=3, tokens=50))
    for made in (stored("evidence", confirmed=1, facts=3, tokens=51), stored("text", tokens=51)):
        assert ends.useless(made).startswith("TOO_LARGE prefix.tokens: artifact 75, receiver context of 82, 8 of it")


def test_a_document_over_the_senders_context_is_not_read_here(profile: Profile, node: NodeInfo) -> None:
    small = dataclasses.replace(profile, context_length=TOKENS)
    for item in candidates.allowed("reduced"):
        why = misfit(item, small, node)
        assert why == ("" if item.form == "text" else "the document makes 100 tokens, and the sender's model takes 100")


def test_a_model_that_cannot_attend_packed_rows_can_send_dense_ones(profile: Profile, node: NodeInfo) -> None:
    limited = dataclasses.replace(profile, attention="its attention is its own")
    reasons = {(item.id, item.written): misfit(item, limited, node) for item in of("reduced", "kv")}
    assert reasons.pop(("B1", "")) == ""
    assert all("its attention is its own" in why for why in reasons.values())
    bare = dataclasses.replace(profile, unsupported="a sliding window")
    assert all("a sliding window" in misfit(item, bare, node) for item in of("reduced", "kv"))


def test_a_width_that_does_not_divide_is_passed_over(tiny_model: Callable[..., Any]) -> None:
    narrow: Profile = tiny_model(heads=4, kv_heads=2, head_dim=16).profile
    same = wire.node_from_message(wire.node_to_message("receiver", narrow, VERSIONS, 50.0))
    reasons = {(item.id, item.written): misfit(item, narrow, same) for item in of("near", "kv")}
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
        found.consider(item)
        found.price(item, priced(item, 100.0 - index))
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
    (cache, *other_caches), (facts,), texts = (of("reduced", form) for form in FORMS)
    assert decision.give_way(cache, "refused: WEIGHTS", 40.0) == tuple(other_caches)
    # The cheapest text would be quicker, and is not next.
    assert decision.best().id == facts.id
    names = ", ".join(f"{item.id} {item.written}".strip() for item in other_caches)
    told = f"B1: refused: WEIGHTS; {names}: gave way with B1: refused: WEIGHTS"
    assert decision.fallback(facts) == ("B1", told)
    assert decision.give_way(facts, "no fact", 2.0) == ()
    chosen = decision.best()
    assert chosen.id == texts[-1].id
    assert decision.fallback(chosen) == ("B1", f"{told}; A5: no fact")
    passed = decision.choice(chosen).passed_over
    assert [(item.method, item.spent_ms) for item in passed if item.spent_ms] == [("B1", 40.0), ("A5", 2.0)]
    decision.give_way(chosen, "broken", 1.0)
    assert decision.open == ()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("to_smaller", [False, True])
def test_everything_that_the_bound_allows_is_open_or_passed_over_with_a_reason(
    decision: Decision,
    form: str,
    to_smaller: bool,  # noqa: FBT001  (a column)
) -> None:
    everything = candidates.allowed("reduced")
    failed = of("reduced", form)[0]
    decision.give_way(failed, "too large", 1.0, to_smaller=to_smaller)
    passed = decision.choice(everything[0]).passed_over
    assert {(item.method, item.parameters) for item in passed}.isdisjoint(
        (item.id, item.written) for item in decision.open
    )
    assert len(passed) + len(decision.open) == len(everything)
    assert all("too large" in item.reason for item in passed)


def test_what_is_too_large_gives_way_to_what_is_smaller_of_its_form(decision: Decision, node: NodeInfo) -> None:
    found = Decision("reduced", Survey(node, LinkSpeed(1.0, 1e6), 0), 1.0)
    listed = candidates.allowed("reduced")
    sizes = {
        ("B1", ""): 100,
        ("B2", "bits=8"): 50,
        ("B2", "key_bits=8 value_bits=4"): 100,
        ("B9", "budget=0.25 bits=8"): 13,
    }
    for index, item in enumerate(listed):
        found.consider(item)
        found.price(
            item, msgspec.structs.replace(priced(item, 100.0 + index), bytes=sizes.get((item.id, item.written), 120))
        )
    failed = next(item for item in listed if item.id == "B1")
    with_it = found.give_way(failed, "TOO_LARGE", 1.0, to_smaller=True)
    assert {(item.id, item.written) for item in with_it} == {("B2", "key_bits=8 value_bits=4"), ("B5", "budget=0.25")}
    # Text is as quick as anything here, and is not next while a cache may do.
    chosen = found.best()
    assert (chosen.id, chosen.written) == ("B2", "bits=8")
    assert found.fallback(chosen) == ("", "")


def test_without_evidence_a_cache_gives_way_to_text(node: NodeInfo) -> None:
    link = LinkSpeed(1.0, 1e6)
    found = Decision("exact", Survey(node, link, 0), 1.0)
    for index, item in enumerate(candidates.allowed("exact")):
        found.consider(item)
        found.price(item, priced(item, float(index)))
    assert found.best().id == "B1"
    assert found.give_way(found.best(), "refused", 0.0) == ()
    assert found.best().id == "A7"


@pytest.mark.parametrize("form", FORMS[:-1])
def test_a_form_that_was_only_slower_is_replaced_by_nothing(decision: Decision, form: str) -> None:
    texts = of("reduced", "text")
    *others, last = of("reduced", form)
    for item in others:
        decision.pass_over(item, "cannot be used")
        assert all(decision.fallback(text) == ("", "") for text in texts)
    # Another of the same form stands in for no form.
    assert decision.fallback(last) == ("", "")
    decision.pass_over(last, "nor this")
    replaced, why = decision.fallback(texts[0])
    assert replaced == (others or [last])[0].id
    assert why.endswith("nor this")
    # What comes before a form does not stand in for it.
    assert all(decision.fallback(item) == ("", "") for item in of("reduced", "kv")[:1])


def test_what_fails_for_its_budget_leaves_the_others_of_its_form_and_those_before(decision: Decision) -> None:
    chosen = decision.best()
    assert (chosen.id, chosen.form) == ("A3", "text")
    decision.pass_over(chosen, "budget: 3 tokens do not suffice", 5.0)
    assert decision.best().id == "A5"
    assert {item.form for item in decision.open} == set(FORMS)
    (passed,) = decision.choice(decision.best()).passed_over
    assert (passed.method, passed.spent_ms) == ("A3", 5.0)


def refused(code: str, field: str) -> KvferryError:
    return refusal(Verdict((Reason(ReasonCode(code), field, "1", "0"),)))


@pytest.mark.parametrize(
    ("error", "goes_on", "left"),
    [
        (InvalidRequestError("budget: 3 tokens", field="budget", value=3), True, {"A1", "A7"}),
        (InvalidRequestError("question: none", field="question"), False, {"A1", "A3", "A7"}),
        (RefusedError("refused: TOO_LARGE"), False, set()),
        (refused("TOO_LARGE", "prefix.tokens"), False, set()),
        (refused("PROMPT_MISMATCH", "prompt.version"), False, set()),
        (refused("TOO_LARGE", "payload.length"), True, {"A7"}),
        (TooLargeError("payload: too large"), True, {"A7"}),
        (QuotaError("max_bytes: too much"), True, {"A7"}),
        (ModelError("no"), False, set()),
    ],
)
def test_what_an_error_leaves(node: NodeInfo, error: KvferryError, goes_on: bool, left: set[str]) -> None:  # noqa: FBT001  (a column)
    found = Decision("reduced", Survey(node, LinkSpeed(1.0, 1e6), 0), 1.0)
    texts = of("reduced", "text")
    for item in texts:
        found.consider(item)
        found.price(item, msgspec.structs.replace(priced(item, 1.0), bytes=5 if item.id == "A7" else 10))
    parts: Any = SimpleNamespace(metrics=SenderMetrics("tiny", {"kvferry": "1", "device": "cpu"}))
    assert choosing.Choosing(parts, parts)._goes_on(found, texts[-1], error, 1.0) is goes_on
    assert {item.id for item in found.open} == left


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
