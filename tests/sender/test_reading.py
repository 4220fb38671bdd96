"""One document being read: progress, the cache that is kept, and work that is given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvferry.core.digests import digest
from kvferry.core.errors import ModelError
from kvferry.core.progress import Progress, finish
from kvferry.engine.model import LoadedModel, load

DOCUMENT = "The south warehouse opens at 7:30. Größe: 12 m². " * 6
CHUNK = 32


@pytest.fixture(scope="module")
def model(tiny_model_dir: Callable[..., Any]) -> LoadedModel:
    return load(str(tiny_model_dir("llama")), prefill_chunk=CHUNK)


def progress_of(reading: Any) -> tuple[list[Progress], Any]:
    """Read a document and return its progress with the cache."""
    steps = reading.prefill()
    seen: list[Progress] = []
    made = finish(steps, seen.append)
    return seen, made


def test_the_document_is_described_by_its_bytes_and_characters(
    workshop: Callable[..., Any], model: LoadedModel
) -> None:
    reading = workshop(model).reading(DOCUMENT)
    assert reading.document.digest == digest(DOCUMENT.encode())
    assert reading.document.bytes == len(DOCUMENT.encode()) > reading.document.characters == len(DOCUMENT)


def test_the_prefix_is_the_prompts_and_its_digest_that_of_little_endian_words(
    workshop: Callable[..., Any], model: LoadedModel
) -> None:
    reading = workshop(model).reading(DOCUMENT, "Answer.")
    assert reading.ids == model.prompt.prefix(DOCUMENT, "Answer.")
    words = b"".join(number.to_bytes(4, "little") for number in reading.ids)
    assert (reading.prefix.tokens, reading.prefix.ids) == (len(reading.ids), digest(words))


def test_progress_counts_tokens_chunk_by_chunk(workshop: Callable[..., Any], model: LoadedModel) -> None:
    reading = workshop(model).reading(DOCUMENT)
    seen, cache = progress_of(reading)
    total = len(reading.ids)
    steps = [*range(0, total, CHUNK), total]
    assert seen[0] == Progress("tokenise", 0, len(DOCUMENT))
    assert seen[1:] == [Progress("prefill", done, total) for done in steps]
    assert len(steps) > 4
    assert cache.offset == total
    assert reading.prefill_tokens == total
    assert reading.prefill_ms > 0


def test_a_cache_at_hand_is_used_and_costs_nothing(workshop: Callable[..., Any], model: LoadedModel) -> None:
    shop = workshop(model)
    _, first = progress_of(shop.reading(DOCUMENT))
    again = shop.reading(DOCUMENT)
    seen, second = progress_of(again)
    assert second is first
    assert (again.prefill_tokens, again.prefill_ms) == (0, 0.0)
    assert seen[-1] == Progress("prefill", len(again.ids), len(again.ids))


def test_another_system_prompt_is_another_prefix(workshop: Callable[..., Any], model: LoadedModel) -> None:
    shop = workshop(model)
    _, first = progress_of(shop.reading(DOCUMENT))
    other = shop.reading(DOCUMENT, "Be brief.")
    _, second = progress_of(other)
    assert second is not first
    assert other.prefill_tokens == len(other.ids)


def test_without_a_budget_every_reading_is_a_new_one(workshop: Callable[..., Any], model: LoadedModel) -> None:
    shop = workshop(model, budget=0)
    _, first = progress_of(shop.reading(DOCUMENT))
    again = shop.reading(DOCUMENT)
    _, second = progress_of(again)
    assert second is not first
    assert again.prefill_tokens == len(again.ids)
    assert shop.residency.nbytes == 0


def test_held_bytes_stay_within_the_budget_over_many_documents(
    workshop: Callable[..., Any], model: LoadedModel
) -> None:
    texts = [f"{number}. {DOCUMENT}" for number in range(20)]
    _, cache = progress_of(workshop(model).reading(texts[0]))
    budget = 3 * cache.nbytes + 100
    shop = workshop(model, budget=budget)
    held = []
    for text in texts:
        progress_of(shop.reading(text))
        held.append(shop.residency.nbytes)
    assert max(held) <= budget
    assert held[-1] > 2 * cache.nbytes
    last = shop.reading(texts[-1])
    progress_of(last)
    assert last.prefill_tokens == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_work_that_is_given_up_leaves_nothing(workshop: Callable[..., Any], model: LoadedModel, steps: int) -> None:
    shop = workshop(model)
    making = shop.steps("B1", DOCUMENT)
    for _ in range(steps):
        next(making)
    making.close()
    assert shop.residency.nbytes == 0
    assert shop.store.ids() == []
    assert list((shop.store.root / "made").iterdir()) == []
    assert not shop.make("B1", DOCUMENT).reused


def test_closing_a_reading_closes_the_models_own_generator(
    workshop: Callable[..., Any], model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    prefill = LoadedModel.prefill

    def watched(self: LoadedModel, ids: list[int]) -> Any:
        try:
            yield from prefill(self, ids)
        finally:
            closed.append(len(ids))

    monkeypatch.setattr(LoadedModel, "prefill", watched)
    reading = workshop(model).reading(DOCUMENT)
    steps = reading.prefill()
    for _ in range(4):
        next(steps)
    assert closed == []
    steps.close()
    assert closed == [len(reading.ids)]


def test_stages_come_in_the_protocols_order_and_never_go_back(workshop: Callable[..., Any], model: LoadedModel) -> None:
    seen = list(workshop(model).steps("B1", DOCUMENT))
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["tokenise", "prefill", "method", "encode"]
    for stage in stages:
        done = [progress.done for progress in seen if progress.stage == stage]
        assert done == sorted(done)
        assert all(progress.done <= progress.total for progress in seen)
    assert seen[-1] == Progress("encode", 1, 1)


def test_two_readings_take_turns_and_keep_their_own_caches(workshop: Callable[..., Any], model: LoadedModel) -> None:
    shop = workshop(model)
    texts = [DOCUMENT, DOCUMENT[::-1]]
    alone = [workshop(model).make("B1", text).stored.artifact_id for text in texts]
    live = {number: shop.steps("B1", text) for number, text in enumerate(texts)}
    together = {}
    while live:
        for number, steps in list(live.items()):
            try:
                next(steps)
            except StopIteration as end:
                together[number] = end.value.stored.artifact_id
                del live[number]
    assert [together[number] for number in range(2)] == alone


def test_a_model_whose_cache_cannot_be_carried_is_refused_before_it_reads(
    workshop: Callable[..., Any], tiny_model: Callable[..., LoadedModel]
) -> None:
    sliding = tiny_model("gemma3_text", config={"sliding_window": 32, "sliding_window_pattern": 2})
    reading = workshop(sliding).reading(DOCUMENT)
    with pytest.raises(ModelError, match=r"its cache cannot be sent: .*RotatingKVCache") as caught:
        next(reading.prefill())
    assert sliding.profile.model.id in caught.value.message
