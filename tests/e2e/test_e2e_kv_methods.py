"""Every method that sends a cache, through two daemons and the SDK: the receiver answers as the sender would have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import Client
from kvferry.core.errors import InvalidRequestError
from kvferry.core.progress import finish
from kvferry.engine.generate import Sampling
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import DEFAULT_SYSTEM
from kvferry.engine.residency import Residency
from kvferry.sender import registry
from kvferry.sender.method import Method
from kvferry.sender.reading import Reading

MODEL: dict[str, Any] = {"heads": 6, "kv_heads": 2, "head_dim": 32, "layers": 3}
DOCUMENT = "The access code of the north warehouse is 4417. Who keeps the keys, and when does the ferry leave? " * 4
QUESTION = "What is the access code?"
# Calibrated ones need a file of the sender's; the sender's own tests have it.
METHODS = [method for method in registry.METHODS if method.info.form == "kv" and method.info.id != "qfilters"]
PARAMETERS: dict[str, dict[str, Any]] = {"qfilters-svd": {"warmup": 32}}
TOKENS = 8


@pytest.fixture(scope="module")
def client(
    running_pair: Callable[..., Any], tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    with (
        running_pair(tiny_model_dir(**MODEL), tmp_path_factory.mktemp("kv"), chunk_bytes=8192) as running,
        Client(sender=running.sender, receiver=running.receiver) as opened,
    ):
        yield opened


def parameters(method: Method[Any], **given: Any) -> dict[str, Any]:
    known = set(method.parameters.__struct_fields__)
    budget = {"budget": 48} if "budget" in known else {}
    return {**budget, **PARAMETERS.get(method.info.id, {}), **given}


@pytest.mark.parametrize("packing", [{}, {"key_bits": 8, "value_bits": 4}], ids=["as it comes", "packed"])
@pytest.mark.parametrize("method", METHODS, ids=[method.info.id for method in METHODS])
def test_the_receiver_answers_as_the_sender_would(
    client: Client, tiny_model: Callable[..., LoadedModel], method: Method[Any], packing: dict[str, Any]
) -> None:
    if packing and "key_bits" not in method.parameters.__struct_fields__:
        pytest.skip("takes no packing")
    given = parameters(method, **packing)
    question = QUESTION if method.info.aware else None
    model = tiny_model(**MODEL)
    reading = Reading(model, Residency(2**28), DOCUMENT, DEFAULT_SYSTEM, question)
    cache = finish(method.make(reading, registry.check_parameters(method, given))).cache
    fresh = model.prompt.fresh(QUESTION)
    expected = finish(model.answer(fresh, cache, cache.offset, Sampling(max_tokens=TOKENS)))

    report = client.send(text=DOCUMENT, method=method.info.id, question=question, **given)
    answer = report.ask(QUESTION, max_tokens=TOKENS)
    assert tuple(answer.token_ids) == expected.token_ids
    ledger = answer.ledger
    assert (ledger.method, ledger.form, ledger.fallback) == (method.info.id, "kv", None)
    assert ledger.rows.min == min(cache.row_counts)
    assert ledger.rows.max == max(cache.row_counts)
    assert ledger.tokens.receiver_prefill == len(fresh)
    assert ledger.parity is not None
    assert ledger.parity.kl < 1e-4
    # What is counted as kept in memory is the rebuilt cache, to the byte.
    assert ledger.resident_bytes >= cache.nbytes


def test_a_parameter_that_cannot_be_is_refused_and_the_sender_goes_on(client: Client) -> None:
    for given, named in (({"bits": 7}, "bits"), ({"budget": 0}, "budget"), ({"budget": 3}, "budget")):
        with pytest.raises(InvalidRequestError, match=named):
            client.send(text=DOCUMENT, method="B3", **given)
    with pytest.raises(InvalidRequestError, match="question"):
        client.send(text=DOCUMENT, method="snapkv-aware", budget=32)
    assert client.send(text=DOCUMENT, method="B3", budget=32).ask(QUESTION, max_tokens=1).token_ids
