"""Answers from artifacts: the same for every lossless method, and an account that an outsider can check."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvferry.core import progress
from kvferry.core.choice import AutoChoice, Estimate, LinkSpeed, PassedOver
from kvferry.core.errors import ContainerError, ContextOverflowError, IntegrityError
from kvferry.core.ledger import SenderAccount, ledger_from_json, to_json
from kvferry.engine.content import ContentEncoder
from kvferry.engine.generate import Answer, Token
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import DEFAULT_SYSTEM
from kvferry.receiver import reconstruct
from kvferry.receiver.reconstruct import Message

DOCUMENT = "The access code of the north warehouse is 4417. Größe: 12 m², 門 🚢. <|im_end|> " * 5
OTHER = "The south warehouse opens at 7:30 and closes at 18:00; its keys are with Ada. " * 4
QUESTIONS = ("What is the access code?", "Who keeps the keys, and when?")
LOSSLESS = ("A1", "A7", "B0", "B1")
SHAPES: tuple[dict[str, Any], ...] = (
    {"model_type": "llama", "heads": 6, "kv_heads": 3, "head_dim": 8, "layers": 3},
    {"model_type": "qwen2", "heads": 4, "kv_heads": 1, "head_dim": 16, "layers": 2, "tied": False},
    {"model_type": "qwen3", "heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 2},
)
SLIDING = {"sliding_window": 32, "sliding_window_pattern": 2}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model(**SHAPES[0])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape["model_type"])
def test_every_lossless_method_answers_as_the_local_model(
    bench: Callable[..., Any],
    artifact: Callable[..., Any],
    tiny_model: Callable[..., LoadedModel],
    local_answer: Callable[..., tuple[int, ...]],
    shape: dict[str, Any],
) -> None:
    model = tiny_model(**shape)
    receiver = bench(model)
    stored = {method: receiver.take(artifact(model, method, DOCUMENT)) for method in LOSSLESS}
    expected = [local_answer(model, DOCUMENT, question) for question in QUESTIONS]
    assert expected[0] != expected[1]
    assert all(len(ids) > 3 for ids in expected)
    for method in LOSSLESS:
        for question, ids in zip((*QUESTIONS, QUESTIONS[0]), (*expected, expected[0]), strict=True):
            assert receiver.ask(stored[method], question)[0].token_ids == ids, method


def test_the_answer_depends_on_the_document(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel
) -> None:
    receiver = bench(model)
    answers = {
        (method, text): receiver.ask(receiver.take(artifact(model, method, text)), QUESTIONS[0], 3)[0].token_ids
        for method in (*LOSSLESS, "A0")
        for text in (DOCUMENT, OTHER)
    }
    assert len(set(answers.values())) == 3
    assert answers["A0", DOCUMENT] == answers["A0", OTHER]


def test_a0_answers_as_the_model_without_a_document(
    bench: Callable[..., Any],
    artifact: Callable[..., Any],
    model: LoadedModel,
    local_answer: Callable[..., tuple[int, ...]],
) -> None:
    receiver = bench(model)
    answer, _ = receiver.ask(receiver.take(artifact(model, "A0", DOCUMENT)), QUESTIONS[0])
    assert answer.token_ids == local_answer(model, "", QUESTIONS[0])


@pytest.mark.parametrize("method", LOSSLESS)
def test_the_system_prompt_travels(
    bench: Callable[..., Any],
    artifact: Callable[..., Any],
    model: LoadedModel,
    local_answer: Callable[..., tuple[int, ...]],
    method: str,
) -> None:
    receiver = bench(model)
    stored = receiver.take(artifact(model, method, DOCUMENT, "Réponds en français."))
    expected = local_answer(model, DOCUMENT, QUESTIONS[0], system="Réponds en français.")
    assert receiver.ask(stored, QUESTIONS[0])[0].token_ids == expected
    assert expected != local_answer(model, DOCUMENT, QUESTIONS[0])


@pytest.mark.parametrize("method", ["A1", "A7", "B1"])
def test_what_others_do_in_between_is_no_part_of_a_reading(
    bench: Callable[..., Any],
    artifact: Callable[..., Any],
    model: LoadedModel,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += 1
        return now

    def elsewhere(_: int) -> None:
        nonlocal now
        now += 1_000_000

    receiver = bench(model)
    stored = receiver.take(artifact(model, method, DOCUMENT))
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=tick))
    steps = receiver.answerer.reread(stored, "damaged") if method == "B1" else receiver.answerer.prepare(stored)
    prepared = progress.finish(steps, elsewhere)
    assert now > 1_000_000
    assert 1000 <= prepared.prefill_ms < 1_000_000


def test_a_sliding_window_model_answers_from_text(
    bench: Callable[..., Any],
    artifact: Callable[..., Any],
    tiny_model: Callable[..., LoadedModel],
    local_answer: Callable[..., tuple[int, ...]],
) -> None:
    model = tiny_model("gemma3_text", config=SLIDING)
    assert len(model.prompt.prefix(DOCUMENT)) > 4 * SLIDING["sliding_window"]
    receiver = bench(model)
    for method in ("A1", "A7"):
        stored = receiver.take(artifact(model, method, DOCUMENT))
        for question in QUESTIONS:
            assert receiver.ask(stored, question)[0].token_ids == local_answer(model, DOCUMENT, question)


def test_a_sliding_window_model_refuses_caches_by_name(
    bench: Callable[..., Any],
    artifact: Callable[..., Any],
    tiny_model: Callable[..., LoadedModel],
    model: LoadedModel,
) -> None:
    receiver = bench(tiny_model("gemma3_text", config=SLIDING))
    for offered, field in ((artifact(model, "B1", DOCUMENT), "layout"), (artifact(model, "B0", DOCUMENT), "consume")):
        verdict = receiver.intake.offer(offered.encoded).verdict
        reasons = [reason for reason in verdict.reasons if reason.code == "LAYOUT_UNSUPPORTED"]
        assert any(field in reason.field and "RotatingKVCache" in reason.receiver for reason in reasons)
    assert list((receiver.store.root / "partial").iterdir()) == []


def rows_of(ledger: Any) -> tuple[int, float, int]:
    return ledger.rows.min, ledger.rows.mean, ledger.rows.max


@pytest.mark.parametrize("method", ["A0", *LOSSLESS])
def test_the_ledger_counts_tokens_and_rows(
    bench: Callable[..., Any],
    artifact: Callable[..., Any],
    model: LoadedModel,
    local_answer: Callable[..., tuple[int, ...]],
    method: str,
) -> None:
    receiver = bench(model)
    stored = receiver.take(artifact(model, method, DOCUMENT))
    prefix = len(model.prompt.prefix("" if method == "A0" else DOCUMENT))
    for first, question in zip((True, False), QUESTIONS, strict=True):
        answer, ledger = receiver.ask(stored, question)
        fresh = len(model.prompt.fresh(question))
        reads = method in ("A0", "A1", "A7") or (method == "B0" and first)
        assert ledger.tokens.receiver_prefill == fresh + (prefix if reads else 0)
        assert ledger.tokens.reused == (0 if reads else prefix)
        assert ledger.tokens.sender_prefill == 77
        assert ledger.tokens.generated == len(answer.token_ids)
        assert rows_of(ledger) == (prefix, prefix, prefix)
        assert (ledger.ms.receiver_prefill > 0) is reads
        assert (ledger.ms.reconstruct > 0) is (reads or (method == "B1" and first))
        kept = method in ("B0", "B1")
        # fp32 K and V of 3 layers, 3 heads of 8.
        assert ledger.resident_bytes == (prefix * 2 * 3 * 3 * 8 * 4 if kept else 0)


@pytest.mark.parametrize("method", ["A0", *LOSSLESS])
def test_the_ledger_counts_bytes(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel, method: str
) -> None:
    receiver = bench(model)
    made = artifact(model, method, DOCUMENT)
    _, ledger = receiver.ask(receiver.take(made), QUESTIONS[0])
    payload = made.payload_path.stat().st_size
    control = 7 * (made.plan.count + 1)
    assert (ledger.manifest_bytes, ledger.payload_bytes) == (len(made.encoded), payload)
    assert (ledger.resent_bytes, ledger.control_bytes) == (0, control)
    assert ledger.wire_bytes == len(made.encoded) + payload + control
    assert ledger.dense_bf16_bytes == 1000
    assert ledger.ratio == 1000 / ledger.wire_bytes
    assert ledger.lookups.count == ledger.lookups.bytes == 0


def test_chunks_that_came_twice_are_on_the_bill(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel
) -> None:
    receiver = bench(model)
    made = artifact(model, "B1", DOCUMENT)
    receiver.intake.offer(made.encoded)
    for _ in range(3):
        receiver.intake.put(made.artifact_id, 5, made.read_chunk(5), 7)
    with pytest.raises(IntegrityError):
        receiver.intake.put(made.artifact_id, 6, bytes(len(made.read_chunk(6))), 7)
    _, ledger = receiver.ask(receiver.take(made), QUESTIONS[0])
    assert ledger.resent_bytes == 2 * len(made.read_chunk(5)) + len(made.read_chunk(6))
    payload = made.manifest.payload.length
    # Four extra puts and the commit beside one put a chunk, chunk 5 excepted.
    assert ledger.control_bytes == 7 * (made.plan.count - 1 + 4 + 1)
    assert ledger.wire_bytes == len(made.encoded) + payload + ledger.resent_bytes + ledger.control_bytes


def test_the_ledger_says_what_was_answered(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel
) -> None:
    receiver = bench(model)
    made = artifact(model, "B1", DOCUMENT)
    answer, ledger = receiver.ask(receiver.take(made), QUESTIONS[0])
    assert ledger.artifact_id == made.artifact_id.hex()
    assert (ledger.method, ledger.form, ledger.verdict, ledger.fallback) == ("B1", "kv", "accepted", None)
    assert ledger.finish_reason == answer.finish_reason
    assert (ledger.ms.prefill, ledger.ms.method, ledger.ms.encode, ledger.ms.transfer) == (1.5, 2.5, 3.5, 4.5)
    assert ledger.ms.verify > 0
    assert ledger.prompt_version == made.manifest.prompt.version
    assert ledger.system == made.manifest.prompt.system.hex()
    assert set(ledger.runtime) >= {"kvferry", "mlx", "mlx_lm", "device"}
    assert ledger_from_json(to_json(ledger)) == ledger


CACHE, FACTS = PassedOver("B1", "kv", "", "no"), PassedOver("A5", "evidence", "", "no fact")


@pytest.mark.parametrize(
    ("method", "passed_over", "expected"),
    [
        # The whole document in place of a cache, asked for by name or chosen.
        ("A1", None, "fallback_reprefill"),
        ("A1", [CACHE], "fallback_reprefill"),
        ("A7", [CACHE, FACTS], "fallback_reprefill"),
        # A part of it, or facts; and any text in place of facts, also where another cache was passed over as well.
        ("A3", [CACHE], "fallback_text"),
        ("A2", None, "fallback_text"),
        ("A1", [FACTS], "fallback_text"),
        ("A3", [FACTS, CACHE], "fallback_text"),
        ("A5", [CACHE], "fallback_evidence"),
    ],
)
def test_what_was_sent_in_place_of_another_is_called_what_it_is(
    bench: Callable[..., Any],
    artifact: Callable[..., Any],
    model: LoadedModel,
    method: str,
    passed_over: list[PassedOver] | None,
    expected: str,
) -> None:
    chosen = Estimate(method, "text", "", 1, 0.0, 0.0, 0.0, 0.0)
    auto = passed_over and AutoChoice(
        "reduced", chosen, (chosen,), tuple(passed_over), LinkSpeed(1.0, 1.0), 1.0, 1.0, 0, 0.0
    )
    replaced = passed_over[0].method if passed_over else "B1"
    account = SenderAccount(0, 1000, 0.0, 0.0, 0.0, 0.0, fallback_reason="no", auto=auto or None)
    receiver = bench(model)
    given = {"budget": 200} if method in {"A2", "A3", "A5"} else {}
    stored = receiver.take(artifact(model, method, DOCUMENT, fallback_for=replaced, **given), account)
    _, ledger = receiver.ask(stored, QUESTIONS[0], 1)
    assert (ledger.fallback, ledger.fallback_reason) == (expected, "no")
    assert expected in (Path(__file__).parents[2] / "docs" / "ledger.md").read_text("utf-8")
    # Without a reason the same artifact is nobody's substitute.
    plain = bench(model)
    again = plain.take(artifact(model, method, DOCUMENT, **given))
    assert plain.ask(again, QUESTIONS[0], 1)[1].fallback is None


@pytest.mark.parametrize(("method", "expected"), [("A1", "fallback_reprefill"), ("A2", "fallback_text")])
def test_a_substitute_that_came_without_an_account_says_what_it_is(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel, method: str, expected: str
) -> None:
    """As one does that was written to a file at the sender's and taken in from there."""
    given = {"budget": 200} if method == "A2" else {}
    receiver = bench(model)
    stored = receiver.take(artifact(model, method, DOCUMENT, fallback_for="B1", **given))
    _, ledger = receiver.ask(stored, QUESTIONS[0], 1)
    assert ledger.fallback == expected
    assert ledger.fallback_reason == "sent in place of B1; why, the artifact does not say"


def test_the_ledger_says_what_became_of_the_method(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel
) -> None:
    receiver = bench(model)
    stored = receiver.take(artifact(model, "A3", DOCUMENT, budget=60))
    _, ledger = receiver.ask(stored, QUESTIONS[0], 1)
    params = stored.manifest.method.params
    assert ledger.outcome == {
        name.removeprefix("outcome."): value for name, value in params.items() if name.startswith("outcome.")
    }
    assert set(ledger.outcome) >= {"tokens", "tokenizer", "sentences"}
    assert params["budget"] == 60
    assert receiver.ask(receiver.take(artifact(model, "B1", DOCUMENT)), QUESTIONS[0], 1)[1].outcome == {}
    assert ledger_from_json(to_json(ledger)) == ledger


def test_times_are_in_order(bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel) -> None:
    receiver = bench(model)
    _, ledger = receiver.ask(receiver.take(artifact(model, "A1", DOCUMENT)), QUESTIONS[0], 20)
    assert ledger.ms.first_token is not None
    assert ledger.ms.receiver_prefill < ledger.ms.first_token < ledger.ms.total


def test_an_answer_without_text_has_no_first_token(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.engine.generate import Answer

    def silent(*_: object) -> Any:
        yield from ()
        return Answer("", (), "stop")

    receiver = bench(model)
    stored = receiver.take(artifact(model, "B1", DOCUMENT))
    monkeypatch.setattr(LoadedModel, "answer", silent)
    _, ledger = receiver.ask(stored, QUESTIONS[0])
    assert ledger.ms.first_token is None
    assert ledger.tokens.generated == 0
    assert msgspec.json.decode(to_json(ledger))["ms"]["first_token"] is None


@pytest.mark.parametrize("method", LOSSLESS)
def test_without_a_budget_every_question_is_answered_anew_and_rightly(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel, method: str
) -> None:
    kept, unkept = bench(model), bench(model, budget=0)
    made = artifact(model, method, DOCUMENT)
    stored, again = kept.take(made), unkept.take(made)
    for question in QUESTIONS:
        answer, ledger = unkept.ask(again, question)
        assert answer == kept.ask(stored, question)[0]
        assert ledger.resident_bytes == 0
        assert ledger.ms.reconstruct > 0


def test_resident_bytes_stay_under_the_budget_over_many_artifacts(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel
) -> None:
    probe = bench(model)
    size = probe.ask(probe.take(artifact(model, "B1", f"1. {OTHER}")), QUESTIONS[0], 1)[1].resident_bytes
    budget = 2 * size + size // 2
    receiver = bench(model, budget)
    stored = [receiver.take(artifact(model, "B1", f"{number}. {OTHER}")) for number in range(6)]
    resident = [receiver.ask(one, QUESTIONS[0], 1)[1].resident_bytes for one in stored]
    assert max(resident) <= budget
    assert resident[-1] == 2 * size
    # The last two are at hand; the first has to be rebuilt.
    assert receiver.prepare(stored[-1]).reconstruct_ms == 0
    assert receiver.prepare(stored[0]).reconstruct_ms > 0


def test_interleaved_questions_are_answered_as_each_alone(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel
) -> None:
    receiver = bench(model)
    stored = [receiver.take(artifact(model, method, text)) for method in ("A1", "B1") for text in (DOCUMENT, OTHER)]
    runs = [(one, question) for one in stored for question in QUESTIONS]
    alone = [receiver.ask(*run)[0] for run in runs]
    live = {number: receiver.start(*run) for number, run in enumerate(runs)}
    together: dict[int, Any] = {}
    while live:
        for number, steps in list(live.items()):
            try:
                next(steps)
            except StopIteration as end:
                together[number] = end.value[0]
                del live[number]
    assert [together[number] for number in range(len(runs))] == alone
    assert len({answer.token_ids for answer in alone}) == 4


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_answer_that_is_given_up_leaves_the_cache_as_it_was(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel, steps: int
) -> None:
    receiver = bench(model)
    stored = receiver.take(artifact(model, "B1", DOCUMENT))
    expected = receiver.ask(stored, QUESTIONS[0])[0]
    abandoned = receiver.start(stored, QUESTIONS[1])
    for _ in range(steps):
        next(abandoned)
    abandoned.close()
    answer, ledger = receiver.ask(stored, QUESTIONS[0])
    assert answer == expected
    assert ledger.tokens.reused == len(model.prompt.prefix(DOCUMENT))


def test_reading_a_text_that_is_given_up_keeps_nothing(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel
) -> None:
    receiver = bench(model)
    stored = receiver.take(artifact(model, "B0", OTHER * 8))
    steps = receiver.answerer.prepare(stored)
    assert next(steps) == model.prefill_chunk
    steps.close()
    assert receiver.residency.nbytes == 0


@pytest.mark.parametrize("method", LOSSLESS)
def test_prompt_and_answer_must_fit_the_context(
    bench: Callable[..., Any],
    artifact: Callable[..., Any],
    tiny_model: Callable[..., LoadedModel],
    method: str,
) -> None:
    model = tiny_model("llama", context=512)
    receiver = bench(model)
    stored = receiver.take(artifact(model, method, OTHER))
    room = 512 - len(model.prompt.prefix(OTHER)) - len(model.prompt.fresh(QUESTIONS[0]))
    assert room > 0
    answer, _ = receiver.ask(stored, QUESTIONS[0], room)
    assert len(answer.token_ids) <= room
    with pytest.raises(ContextOverflowError, match=f"{room + 1} answer tokens = 513, the model takes 512"):
        receiver.ask(stored, QUESTIONS[0], room + 1)


def test_a_text_that_does_not_fit_the_context_is_refused_with_its_length(
    bench: Callable[..., Any], artifact: Callable[..., Any], tiny_model: Callable[..., LoadedModel]
) -> None:
    model = tiny_model("llama", context=512)
    receiver = bench(model)
    tokens = len(model.prompt.prefix(OTHER * 9))
    for method in ("A1", "B0"):
        stored = receiver.take(artifact(model, method, OTHER * 9))
        with pytest.raises(ContextOverflowError, match=f"{tokens} prefix .* the model takes 512"):
            receiver.ask(stored, QUESTIONS[0])


@pytest.mark.parametrize("part", ["text", "system"])
def test_what_certainly_does_not_fit_is_refused_before_it_is_encoded(
    bench: Callable[..., Any],
    model: LoadedModel,
    artifact: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    part: str,
) -> None:
    receiver, long = bench(model), "x" * 500_000
    encode = ContentEncoder.encode

    def short(self: ContentEncoder, text: str) -> list[int]:
        assert len(text) < len(long)
        return encode(self, text)

    stored = receiver.take(artifact(model, "A1", OTHER))
    monkeypatch.setattr(ContentEncoder, "encode", short)
    message = Message(long, OTHER) if part == "system" else Message(DEFAULT_SYSTEM, long)
    with pytest.raises(ContextOverflowError, match=r"^context: 500\d\d\d characters are \d+ tokens at least, "):
        list(receiver.answerer.prepare(stored, message))


@pytest.mark.parametrize("method", LOSSLESS)
def test_a_payload_that_changed_on_disk_is_never_answered_from(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel, method: str
) -> None:
    receiver = bench(model, budget=0)
    stored = receiver.take(artifact(model, method, DOCUMENT))
    data = bytearray(stored.payload_path.read_bytes())
    data[-3] ^= 0x40
    stored.payload_path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"^section (layers\.2\.values|document\.text): chunk \d+: digest"):
        receiver.ask(stored, QUESTIONS[0])
    assert receiver.residency.nbytes == 0


def test_ids_that_the_model_lacks_are_not_read_again(
    bench: Callable[..., Any],
    artifact: Callable[..., Any],
    drain: Callable[..., Any],
    model: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiver, size = bench(model), model.profile.vocabulary
    stored = receiver.take(artifact(model, "B1", DOCUMENT))
    monkeypatch.setattr(reconstruct, "prefix_ids", lambda *_: [0, size])
    with pytest.raises(ContainerError, match=rf"^section prefix\.ids: token {size}, the vocabulary has {size}$"):
        drain(receiver.answerer.reread(stored, "damaged"))
    monkeypatch.setattr(reconstruct, "prefix_ids", lambda *_: [0, size - 1])
    assert drain(receiver.answerer.reread(stored, "damaged")).prefix_tokens == 2


def test_the_first_token_is_the_first_that_has_text(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: object) -> Generator[Token, None, Answer]:
        yield Token(None, "")
        yield Token(5, "")
        time.sleep(0.4)
        yield Token(6, "a")
        return Answer("a", (5, 6), "stop")

    receiver = bench(model)
    stored = receiver.take(artifact(model, "B1", DOCUMENT))
    monkeypatch.setattr(LoadedModel, "answer", slow)
    _, ledger = receiver.ask(stored, QUESTIONS[0])
    assert ledger.ms.first_token is not None
    assert ledger.ms.first_token >= 400
