"""The parity probe: what was rebuilt rightly passes and nothing else does, once a node, and its figures are true.

The oracle runs mlx-lm on its own cache, takes whole distributions over the vocabulary, and does the rest in numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kvferry.core import manifest
from kvferry.core.config import ReceiverConfig
from kvferry.core.errors import ManifestError, NotFoundError, ParityError, QuarantinedError
from kvferry.core.manifest import Parity
from kvferry.core.metrics import ReceiverMetrics
from kvferry.core.stored import Stored
from kvferry.engine.backend import runtime_versions
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer
from kvferry.engine.model import LoadedModel
from kvferry.engine.residency import Residency
from kvferry.engine.worker import Worker
from kvferry.receiver import answering, parity, reconstruct
from kvferry.receiver.answering import Answerer
from kvferry.receiver.looking_up import Question
from kvferry.receiver.preparing import Preparer
from kvferry.receiver.span_client import SpanClient

DOCUMENT = "The access code of the north warehouse is 4417. " * 5
SHAPE: dict[str, Any] = {"heads": 6, "kv_heads": 3, "head_dim": 8, "layers": 3}
THETA = 10000.0
FLOOR = 1e-4
Change = Callable[[PrefixCache], PrefixCache]
replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model(**SHAPE)


@pytest.fixture
def stored(bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel) -> Stored:
    """An artifact at a receiver."""
    taken: Stored = bench(model).take(artifact(model, "B1", DOCUMENT))
    return taken


def rebuilt(stored: Stored) -> PrefixCache:
    return reconstruct.prefix_cache(stored.manifest, stored.sections)


# The oracle


def distribution(model: LoadedModel, suffix: tuple[int, ...], change: Change = lambda cache: cache) -> Any:
    """What plain mlx-lm gives after document and suffix, over the whole vocabulary; optionally on a changed cache."""
    ids = model.prompt.prefix(DOCUMENT)
    cache = make_prompt_cache(model.model)
    mx.eval(model.model(mx.array([ids]), cache=cache))
    changed = change(PrefixCache(tuple(DenseLayer(*layer.keys_and_values()) for layer in cache), len(ids)))
    for layer, rows in zip(cache, changed.layers, strict=True):
        layer.keys, layer.values, layer.offset = rows.keys, rows.values, changed.offset
    logits = np.array(model.model(mx.array([list(suffix)]), cache=cache)[0, -1], dtype=np.float64)
    shifted = np.exp(logits - logits.max())
    return shifted / shifted.sum()


def divergence(p: Any, q: Any) -> float:
    return float(np.sum(p * (np.log(p) - np.log(q))))


def listed(p: Any, ids: tuple[int, ...]) -> Any:
    """The distribution over the ids that are named, and all others as one."""
    return np.append(p[list(ids)], 1 - p[list(ids)].sum())


# Caches that were rebuilt wrongly. Every digest is right: only the model can tell.


def with_layer(cache: PrefixCache, index: int, **arrays: mx.array) -> PrefixCache:
    layers = list(cache.layers)
    layers[index] = DenseLayer(**{"keys": layers[index].keys, "values": layers[index].values, **arrays})
    return PrefixCache(tuple(layers), cache.offset)


def one_sign_flipped(cache: PrefixCache) -> PrefixCache:
    keys = np.array(cache.layers[0].keys)
    keys[0, 1, 0, 3] *= -1
    return with_layer(cache, 0, keys=mx.array(keys))


def one_exponent_bit_flipped(cache: PrefixCache) -> PrefixCache:
    keys = np.array(cache.layers[1].keys)
    keys.view(np.uint32)[0, 1, 5, 3] ^= 1 << 27
    return with_layer(cache, 1, keys=mx.array(keys))


def not_a_number(cache: PrefixCache) -> PrefixCache:
    values = np.array(cache.layers[2].values)
    values[0, 0, 7, 0] = np.nan
    return with_layer(cache, 2, values=mx.array(values))


def layers_swapped(cache: PrefixCache) -> PrefixCache:
    first, second, *rest = cache.layers
    return PrefixCache((second, first, *rest), cache.offset)


def keys_for_values(cache: PrefixCache) -> PrefixCache:
    return PrefixCache(tuple(DenseLayer(layer.values, layer.keys) for layer in cache.layers), cache.offset)


def heads_swapped(cache: PrefixCache) -> PrefixCache:
    order = mx.array([1, 0, 2])
    return PrefixCache(
        tuple(DenseLayer(layer.keys[:, order], layer.values[:, order]) for layer in cache.layers), cache.offset
    )


def moved(by: int) -> Change:
    """The question stands ``by`` positions further on than it should."""

    def change(cache: PrefixCache) -> PrefixCache:
        positions = mx.broadcast_to(mx.arange(cache.offset, dtype=mx.int32), (3, cache.offset))
        layers = tuple(DenseLayer(layer.keys, layer.values, positions) for layer in cache.layers)
        return PrefixCache(layers, cache.offset + by)

    return change


def rotated_with(theta: float) -> Change:
    """The keys are turned back, and on again with another base."""

    def turn(keys: mx.array) -> mx.array:
        back = mx.fast.rope(keys, 8, traditional=False, base=THETA, scale=-1.0, offset=0)
        return mx.fast.rope(back, 8, traditional=False, base=theta, scale=1.0, offset=0)

    return lambda cache: PrefixCache(
        tuple(DenseLayer(turn(layer.keys), layer.values) for layer in cache.layers), cache.offset
    )


WRONG: dict[str, Change] = {
    "one sign flipped": one_sign_flipped,
    "one exponent bit flipped": one_exponent_bit_flipped,
    "not a number": not_a_number,
    "layers swapped": layers_swapped,
    "keys for values": keys_for_values,
    "heads swapped": heads_swapped,
    "one position late": moved(1),
    "one position early": moved(-1),
    "another theta": rotated_with(500000.0),
}


# Figures


def test_an_intact_cache_is_nothing_away_from_the_senders(model: LoadedModel, stored: Stored) -> None:
    figures = parity.check(model, rebuilt(stored), stored)
    assert figures is not None
    assert figures.kl < 1e-9
    assert figures.top1
    assert figures.bound == FLOOR


def test_turning_keys_back_and_forth_is_within_the_bound(model: LoadedModel, stored: Stored) -> None:
    """A check that only bit-equal caches pass would refuse another back end."""
    turned = rotated_with(THETA)(rebuilt(stored))
    assert not mx.array_equal(turned.layers[0].keys, rebuilt(stored).layers[0].keys)
    figures = parity.check(model, turned, stored)
    assert figures is not None
    assert 0 < figures.kl < FLOOR


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_cache_is_told_with_the_true_figures(model: LoadedModel, stored: Stored, name: str) -> None:
    change = WRONG[name]
    probe = stored.manifest.parity
    assert probe is not None
    with pytest.raises(ParityError, match=r"^parity: the rebuilt cache is \S+ nats from the sender's") as caught:
        parity.check(model, change(rebuilt(stored)), stored)
    fields = caught.value.fields
    assert fields["bound"] == FLOOR
    assert isinstance(fields["kl"], float)
    assert fields["kl"] > FLOOR
    assert not (stored.path / "parity.json").exists()
    if name == "not a number":
        assert fields["kl"] == float("inf")
        return
    ours, theirs = distribution(model, probe.suffix, change), distribution(model, probe.suffix)
    assert fields["kl"] == pytest.approx(divergence(listed(theirs, probe.ids), listed(ours, probe.ids)), rel=2e-2)
    # What is measured never exceeds the divergence over the whole vocabulary.
    assert fields["kl"] <= divergence(theirs, ours) * 1.01
    assert bool(fields["top1"]) == (int(np.argmax(ours)) == int(np.argmax(theirs)))


def test_the_methods_own_bound_is_added(model: LoadedModel, stored: Stored) -> None:
    assert stored.manifest.parity is not None
    changed = one_sign_flipped(rebuilt(stored))
    with pytest.raises(ParityError):
        parity.check(model, changed, stored)
    wide = replace(stored.manifest.parity, bound=0.5)
    generous = Stored(
        stored.artifact_id, replace(stored.manifest, parity=wide), stored.encoded, stored.record, stored.path
    )
    figures = parity.check(model, changed, generous)
    assert figures is not None
    assert figures.bound == 0.5 + FLOOR
    assert FLOOR < figures.kl < 0.5


@pytest.mark.parametrize("ids", [(), (10**6, 1)])
def test_ids_that_have_no_logit_are_infinitely_far(model: LoadedModel, stored: Stored, ids: tuple[int, ...]) -> None:
    assert stored.manifest.parity is not None
    probe = replace(stored.manifest.parity, ids=ids, log_probabilities=tuple(-1.0 for _ in ids))
    assert parity.divergence(model, rebuilt(stored), probe) == (float("inf"), False)


# When it is measured


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count how often the model is asked."""
    calls: list[str] = []
    measure = parity.divergence

    def count(*arguments: Any) -> Any:
        calls.append("measured")
        return measure(*arguments)

    monkeypatch.setattr(parity, "divergence", count)
    return calls


def answerer(model: LoadedModel, mode: str) -> Answerer:
    """One that keeps nothing at hand, so that every question rebuilds the cache."""
    return Answerer(model, Residency(0), runtime_versions(), mode)


@pytest.mark.parametrize(("mode", "expected"), [("first", [1, 1, 1]), ("always", [1, 2, 3]), ("never", [0, 0, 0])])
def test_it_is_measured_as_often_as_was_asked_for(
    drain: Any, model: LoadedModel, stored: Stored, counted: list[str], mode: str, expected: list[int]
) -> None:
    seen = []
    for _ in range(3):
        # A new answerer each time: what is remembered is remembered on disk.
        preparation = drain(answerer(model, mode).prepare(stored))
        seen.append(len(counted))
        assert (preparation.parity is None) is (mode == "never")
    assert seen == expected
    if mode != "never":
        assert preparation.parity.kl < 1e-9
        assert preparation.parity.top1


def test_every_node_measures_for_itself(
    bench: Callable[..., Any], artifact: Callable[..., Any], drain: Any, model: LoadedModel, counted: list[str]
) -> None:
    made = artifact(model, "B1", DOCUMENT)
    for number in (1, 2):
        drain(answerer(model, "first").prepare(bench(model).take(made)))
        assert len(counted) == number


@pytest.mark.parametrize("content", [b"", b"{}", b'{"kl": "small", "top1": true, "bound": 1}', b"\xff"])
def test_a_note_that_cannot_be_read_is_measured_again(
    drain: Any, model: LoadedModel, stored: Stored, counted: list[str], content: bytes
) -> None:
    (stored.path / "parity.json").write_bytes(content)
    preparation = drain(answerer(model, "first").prepare(stored))
    assert counted == ["measured"]
    assert preparation.parity.bound == FLOOR


def test_a_note_that_cannot_be_written_costs_only_time(
    drain: Any, model: LoadedModel, stored: Stored, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parity, "write_atomic", refuse)
    for number in (1, 2):
        assert drain(answerer(model, "first").prepare(stored)).parity.kl < 1e-9
        assert len(counted) == number


def test_text_has_nothing_to_measure(
    bench: Callable[..., Any], artifact: Callable[..., Any], drain: Any, model: LoadedModel, counted: list[str]
) -> None:
    taken = bench(model).take(artifact(model, "B0", DOCUMENT))
    assert drain(answerer(model, "always").prepare(taken)).parity is None
    assert counted == []


def test_what_is_at_hand_is_not_measured_again(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel, counted: list[str]
) -> None:
    receiver = bench(model)
    taken = receiver.take(artifact(model, "B1", DOCUMENT))
    for _ in range(3):
        _, ledger = receiver.ask(taken, "Which code?", 2)
        assert ledger.parity is not None
        assert (ledger.parity.kl < 1e-9, ledger.parity.bound) == (True, FLOOR)
    assert counted == ["measured"]


# At service level


@pytest.mark.parametrize("mode", ["first", "always"])
async def test_a_wrong_cache_is_put_aside_and_never_answered_from(
    bench: Callable[..., Any],
    artifact: Callable[..., Any],
    model: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    receiver = bench(model)
    taken = receiver.take(artifact(model, "B1", DOCUMENT))
    worker, metrics = Worker(), ReceiverMetrics("tiny", runtime_versions())
    residency = Residency(2**30)
    answerer, spans = Answerer(model, residency, runtime_versions(), mode), SpanClient(ReceiverConfig())
    preparer = Preparer(receiver.store, answerer, worker, metrics, spans)
    strict, lenient = Question("Which?"), Question("Which?", allow_fallback=True)
    try:
        with monkeypatch.context() as patch:
            build = reconstruct.prefix_cache
            patch.setattr(answering.reconstruct, "prefix_cache", lambda *given: layers_swapped(build(*given)))
            with pytest.raises(ParityError, match="nats from the sender's"):
                await preparer.prepare(taken.artifact_id, strict)
        assert receiver.store.ids() == []
        (reason,) = receiver.store.quarantined().values()
        assert "nats from the sender's, the bound is 0.0001" in reason
        assert residency.nbytes == 0
        with pytest.raises(QuarantinedError, match="nats from the sender's"):
            await preparer.prepare(taken.artifact_id, strict)
        _, preparation = await preparer.prepare(taken.artifact_id, lenient)
        assert preparation.fallback_reason == reason
        assert preparation.parity is None
        assert preparation.reused_tokens == 0
        # Sent again, it is judged again.
        receiver.take(artifact(model, "B1", DOCUMENT))
        _, preparation = await preparer.prepare(taken.artifact_id, strict)
        assert preparation.parity is not None
        assert preparation.parity.top1
    finally:
        worker.close()


# Malformed probes


def probes(good: Parity) -> dict[str, tuple[Parity, str]]:
    ids, given = good.ids, good.log_probabilities
    return {
        "no suffix": (replace(good, suffix=()), r"^parity\.suffix: 0 entries"),
        "a long suffix": (replace(good, suffix=(1,) * 257), r"^parity\.suffix: 257 entries, there are 1 to 256"),
        "no ids": (replace(good, ids=(), log_probabilities=()), r"^parity\.ids: 0 entries"),
        "many ids": (
            replace(good, ids=tuple(range(1025)), log_probabilities=(-9.0,) * 1025),
            r"^parity\.ids: 1025 entries",
        ),
        "an id more": (replace(good, ids=(*ids, 379)), r"^parity\.log_probabilities: 32 for 33 ids"),
        "an id less": (replace(good, ids=ids[:-1]), r"^parity\.log_probabilities: 32 for 31 ids"),
        "an id twice": (replace(good, ids=(ids[1], *ids[1:])), r"^parity\.ids: one of them appears twice"),
        "out of order": (replace(good, log_probabilities=given[::-1]), r"^parity\.log_probabilities: not in descend"),
        "above certainty": (replace(good, log_probabilities=(0.01, *given[1:])), "probabilities add up to"),
        "far above certainty": (replace(good, log_probabilities=(1e300, *given[1:])), "probabilities add up to inf"),
        "more than everything": (replace(good, log_probabilities=(-1.0,) * 32), r"probabilities add up to 11\.77"),
    }


@pytest.mark.parametrize("name", probes(Parity((1,), tuple(range(32)), (-9.0,) * 32, 0.0)))
def test_a_malformed_probe_is_refused_at_offer(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel, name: str
) -> None:
    receiver, made = bench(model), artifact(model, "B1", DOCUMENT)
    assert made.manifest.parity is not None
    probe, message = probes(made.manifest.parity)[name]
    with pytest.raises(ManifestError, match=message) as caught:
        receiver.intake.offer(manifest.encode(replace(made.manifest, parity=probe)))
    assert str(caught.value.fields["field"]).startswith("parity.")
    assert list((receiver.store.root / "partial").iterdir()) == []


@pytest.mark.parametrize("field", ["suffix", "ids"])
def test_a_probe_with_tokens_of_another_vocabulary_is_refused_at_offer(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel, field: str
) -> None:
    receiver, made = bench(model), artifact(model, "B1", DOCUMENT)
    good = made.manifest.parity
    assert good is not None
    vocabulary = int(model.model(mx.array([[0]])).shape[-1])
    assert receiver.intake.offer(made.encoded).verdict.accepted
    receiver.store.drop(made.artifact_id)
    for token, fits in ((vocabulary, False), (2**32 - 1, False), (vocabulary - 1, True)):
        others = [item for item in getattr(good, field) if item != token][1:]
        probe = replace(good, **{field: (token, *others), "log_probabilities": good.log_probabilities})
        if len(probe.ids) != len(probe.log_probabilities):
            probe = replace(probe, log_probabilities=probe.log_probabilities[: len(probe.ids)])
        encoded = manifest.encode(replace(made.manifest, parity=probe))
        verdict = receiver.intake.offer(encoded).verdict
        assert verdict.accepted is fits
        if not fits:
            (reason,) = verdict.reasons
            assert (reason.code, reason.field) == ("TOKENIZER_MISMATCH", f"parity.{field}")
            assert (reason.artifact, reason.receiver) == (str(token), f"vocabulary of {vocabulary}")
            with pytest.raises(NotFoundError):
                receiver.store.partial(manifest.artifact_id(encoded))


def test_what_another_runtime_measured_does_not_count(
    drain: Any, model: LoadedModel, stored: Stored, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drain(answerer(model, "first").prepare(stored))
    monkeypatch.setattr(parity, "_runtime", lambda: ("0.0", "another device"))
    drain(answerer(model, "first").prepare(stored))
    assert counted == ["measured", "measured"]
