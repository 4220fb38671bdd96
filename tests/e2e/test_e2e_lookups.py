"""References: the passages that a question needs come from the sender at answer time, and every byte is counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvferry.client import Answer, CancelledError, Client, ConfigError, IntegrityError, LookUpError
from kvferry.core import addresses, authority, channel, container, tokens
from kvferry.core.digests import digest
from kvferry.core.evidence import Reference, References
from kvferry.core.ledger import SenderAccount
from kvferry.core.metrics import SenderMetrics
from kvferry.core.progress import Progress, finish
from kvferry.core.store import ArtifactStore
from kvferry.core.stored import Stored
from kvferry.core.tls import PeerSecurity
from kvferry.core.wire import MethodInfo
from kvferry.engine.backend import runtime_versions
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import DEFAULT_SYSTEM
from kvferry.engine.residency import Residency
from kvferry.proto.v1 import sender_service_pb2 as sender_pb
from kvferry.sender.artifacts import ArtifactMaker
from kvferry.sender.method import EvidenceMaterial, NoParameters
from kvferry.sender.reading import Reading
from kvferry.sender.transfer import Transfer

FILLER = "Every crate that arrives is weighed, counted and entered in the ledger before noon. Größe: 12 m², 門 🚢. "
FACTS = {
    ("north warehouse", "access code"): "4417",
    ("south warehouse", "opening hours"): "7:30 to 18:00",
    ("ferry", "departure"): "at dawn",
}
DOCUMENT = "".join(
    f"{FILLER * 4}The {attribute} of the {entity}: {value}. " for (entity, attribute), value in FACTS.items()
)
DOCUMENT += FILLER * 4
CODE = "What is the access code of the north warehouse?"
BOTH = "Which warehouse has an access code?"
NOTHING = "Wer?"
ACCOUNT = SenderAccount(77, 100_000, 1.5, 2.5, 3.5, 4.5)
METHOD = ("kvferry.proto.v1.SenderService", "FetchSpans")
SECONDS = 60.0


def place(entity: str, attribute: str) -> tuple[int, int]:
    """Where a fact's value stands."""
    value = FACTS[entity, attribute]
    start = DOCUMENT.index(f"The {attribute} of the {entity}: ") + len(f"The {attribute} of the {entity}: ")
    assert DOCUMENT[start : start + len(value)] == value
    return start, start + len(value)


MESSAGE = References(tuple(Reference(*name, *place(*name)) for name in FACTS), complete=True, stop="stop")


def windows(*names: tuple[str, str]) -> list[str]:
    """The oracle: what is fetched for these references, whose windows do not meet."""
    ranges = sorted(place(*name) for name in names)
    return [DOCUMENT[max(start - 40, 0) : end + 160] for start, end in ranges]


def passages(*names: tuple[str, str]) -> str:
    """The oracle: what is read for these references. The outermost words may have been cut."""
    return "\n".join(window[window.index(" ") : window.rindex(" ") + 1] for window in windows(*names))


@pytest.fixture(scope="module")
def local(own_answer: Callable[..., tuple[int, ...]]) -> Callable[..., tuple[int, ...]]:
    """Return a function: what a model itself answers from excerpts."""

    def answer(model: LoadedModel, text: str, question: str, max_tokens: int = 8) -> tuple[int, ...]:
        prefix = model.prompt.prefix(text, DEFAULT_SYSTEM, container.EXCERPTS)
        return own_answer(model, prefix, model.prompt.fresh(question), max_tokens)

    return answer


class Given:
    """A method that sends the references above, whatever the document."""

    info = MethodInfo("A6", "references", "references", "custom", aware=False, source="a test", summary="")
    parameters = NoParameters

    def make(self, reading: Reading, parameters: NoParameters) -> Generator[Progress, None, EvidenceMaterial]:
        yield Progress("method", 1, 1)
        return EvidenceMaterial(MESSAGE)


@pytest.fixture
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model()


@pytest.fixture
def stored(tmp_path: Path, model: LoadedModel) -> Iterator[Stored]:
    """An artifact of references that no receiver has seen."""
    store = ArtifactStore(tmp_path / "made")
    maker = ArtifactMaker(model, store, 1024, runtime_versions())
    reading = Reading(model, Residency(0), DOCUMENT, DEFAULT_SYSTEM, None)
    yield finish(maker.make(Given(), reading, NoParameters())).stored
    store.close()


async def deliver(stored: Stored, receiver: str, security: PeerSecurity) -> None:
    metrics = SenderMetrics("tiny", runtime_versions())
    transfer = Transfer(stored, ACCOUNT, addresses.parse(receiver, "receiver"), SECONDS, metrics, security=security)
    async with contextlib.aclosing(transfer.run()) as steps:
        async for _ in steps:
            pass


@dataclass
class Ferry:
    """A receiver that holds references, and a client of it."""

    client: Client
    receiver: Any
    artifact: str
    store: Path

    def ask(self, question: str = CODE, **options: Any) -> Answer:
        return self.client.ask(self.artifact, question, **{"max_tokens": 8, **options})


@pytest.fixture
def ferry(
    here: Callable[..., Any], tiny_model_dir: Callable[..., Path], stored: Stored, tmp_path: Path
) -> Iterator[Callable[..., Ferry]]:
    """Return a factory: ``ferry(sender's address, look_up_at=…, **options of the receiver)``."""
    clients: list[Client] = []

    def build(address: str, /, look_up_at: str | None = None, **options: Any) -> Ferry:
        receiver = here("receiver", tiny_model_dir(), **options)
        asyncio.run(deliver(stored, receiver.address, PeerSecurity()))
        clients.append(Client(sender=address, receiver=receiver.address, look_up_at=look_up_at))
        return Ferry(clients[-1], receiver, stored.artifact_id.hex(), tmp_path / "receiver")

    yield build
    for client in clients:
        client.close()


@pytest.fixture
def sender(here: Callable[..., Any], tiny_model_dir: Callable[..., Path]) -> Any:
    """A sender that does not know the document yet."""
    return here("sender", tiny_model_dir())


@pytest.fixture
def knowing(sender: Any, ferry: Callable[..., Ferry]) -> Ferry:
    """Both daemons; the sender has read the document."""
    pair = ferry(sender.address)
    pair.client.send(text=DOCUMENT, method="A1")
    return pair


@dataclass
class Proxy:
    """Stands between receiver and sender, and counts what crosses. ``hold`` keeps calls back."""

    address: str = ""
    calls: int = 0
    bytes: int = 0
    spans: list[int] = field(default_factory=list)
    hold: bool = False
    begun: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)

    async def serve(self, sender: str, ready: threading.Event, stop: asyncio.Event) -> None:
        server = grpc.aio.server()
        async with channel.open_async(addresses.parse(sender, "sender")) as opened:
            forward: Any = opened.unary_unary("/" + "/".join(METHOD))

            async def call(request: bytes, context: Any) -> bytes:
                self.calls += 1
                self.bytes += len(request)
                self.spans.append(len(sender_pb.FetchSpansRequest.FromString(request).spans))
                self.begun.set()
                try:
                    while self.hold:  # noqa: ASYNC110  (another thread lets go)
                        await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise
                response: bytes = await forward(request)
                self.bytes += len(response)
                return response

            handler: Any = grpc.unary_unary_rpc_method_handler(call)
            server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(METHOD[0], {METHOD[1]: handler})])
            self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            ready.set()
            await stop.wait()
            await server.stop(0)


@pytest.fixture
def proxy(sender: Any, background: Callable[[Coroutine[Any, Any, Any]], Any]) -> Iterator[Proxy]:
    """A proxy before the sender."""
    standing, ready, stop = Proxy(), threading.Event(), asyncio.Event()
    future = background(standing.serve(sender.address, ready, stop))
    assert ready.wait(SECONDS)
    yield standing
    standing.hold = False

    async def end() -> None:
        stop.set()

    background(end()).result(SECONDS)
    future.result(SECONDS)


# Answers


def test_the_answer_is_that_of_the_same_passages_read_locally(
    knowing: Ferry, model: LoadedModel, local: Callable[..., tuple[int, ...]]
) -> None:
    north, south = ("north warehouse", "access code"), ("south warehouse", "opening hours")
    asked = {CODE: (north, south), BOTH: (north, south), "When is the departure?": (("ferry", "departure"),)}
    texts = {question: passages(*names) for question, names in asked.items()}
    for question, text in texts.items():
        answer = knowing.ask(question)
        assert answer.token_ids == local(model, text, question)
        assert answer.ledger.lookups.text_bytes == len("".join(windows(*asked[question])).encode())
    answers = {local(model, text, question) for question, text in texts.items()}
    assert len(answers) == 3
    assert len({local(model, text, CODE) for text in texts.values()}) == 2


def test_the_ledger_counts_what_crossed(
    sender: Any, proxy: Proxy, ferry: Callable[..., Ferry], model: LoadedModel
) -> None:
    pair = ferry(sender.address, look_up_at=proxy.address)
    pair.client.send(text=DOCUMENT, method="A1")
    first = pair.ask().ledger
    assert (first.form, first.lookups.calls, first.lookups.count, first.lookups.hit) == ("references", 1, 2, True)
    assert first.lookups.missing == ()
    assert (proxy.calls, proxy.spans) == (1, [2])
    assert first.lookups.bytes == proxy.bytes > first.lookups.text_bytes > 400
    # Each answer pays for its own look-up, and for the artifact.
    second = pair.ask("When is the departure?").ledger
    assert first.lookups.bytes + second.lookups.bytes == proxy.bytes
    carried = first.manifest_bytes + first.payload_bytes + first.resent_bytes + first.control_bytes
    for ledger in (first, second):
        assert ledger.wire_bytes == carried + ledger.lookups.bytes
        assert ledger.ratio == pytest.approx(ACCOUNT.dense_bf16_bytes / ledger.wire_bytes)
        assert ledger.fallback is None
        assert ledger.ms.first_token is not None
        assert 0 < ledger.lookups.ms < ledger.ms.first_token
    text = passages(("ferry", "departure"))
    prefix = model.prompt.prefix(text, DEFAULT_SYSTEM, container.EXCERPTS)
    fresh = model.prompt.fresh("When is the departure?")
    assert second.tokens.receiver_prefill == len(prefix) + len(fresh)
    assert (second.tokens.reused, second.rows.min) == (0, len(prefix))


def test_a_question_without_a_hit_asks_nobody(
    sender: Any, proxy: Proxy, ferry: Callable[..., Ferry], model: LoadedModel, local: Callable[..., tuple[int, ...]]
) -> None:
    answer = ferry(sender.address, look_up_at=proxy.address).ask(NOTHING)
    assert answer.token_ids == local(model, "", NOTHING)
    lookups = answer.ledger.lookups
    assert (lookups.hit, lookups.count, lookups.calls, lookups.bytes, lookups.ms) == (False, 0, 0, 0, 0.0)
    assert answer.ledger.fallback is None
    assert proxy.calls == 0


def test_other_artifacts_have_no_look_ups(knowing: Ferry) -> None:
    ledger = knowing.client.send(text=DOCUMENT, method="A1").ask(CODE, max_tokens=2).ledger
    assert (ledger.lookups.hit, ledger.lookups.calls) == (None, 0)


def test_the_configured_sender_is_asked_when_none_is_named(sender: Any, ferry: Callable[..., Ferry]) -> None:
    pair = ferry(sender.address, look_up_at="", sender=sender.address)
    pair.client.send(text=DOCUMENT, method="A1")
    assert pair.ask().ledger.lookups.count == 2


def test_a_sender_that_is_no_address_is_refused(
    sender: Any, ferry: Callable[..., Ferry], peers: Callable[..., Any]
) -> None:
    pair = ferry(sender.address)
    with pytest.raises(ConfigError, match="sender: 'tcp://studio:9'"):
        peers(receiver=pair.receiver.address).ask(bytes.fromhex(pair.artifact), CODE, sender="tcp://studio:9")


def test_over_tls_with_a_token(
    here: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    tmp_path: Path,
    stored: Stored,
    model: LoadedModel,
    local: Callable[..., tuple[int, ...]],
) -> None:
    own, secrets = authority.create(), {name: tokens.new_secret() for name in ("me", "desk")}
    (tmp_path / "authority.pem").write_bytes(own.certificate)
    for name in ("sender", "receiver"):
        pair = authority.issue(own, name, ("127.0.0.1",))
        (tmp_path / f"{name}.pem").write_bytes(pair.certificate)
        (tmp_path / f"{name}.key").write_bytes(pair.key)
        (tmp_path / f"{name}.key").chmod(0o600)
    for name, secret in secrets.items():
        tokens.append(tmp_path / "tokens.toml", tokens.Token(name=name, digest=tokens.digest_of(secret)))
    (tmp_path / "desk.token").write_text(secrets["desk"])

    def start(role: str, **options: Any) -> Any:
        files = {
            "certificate": f"{role}.pem",
            "key": f"{role}.key",
            "authority": "authority.pem",
            "tokens": "tokens.toml",
        }
        given = {key: str(tmp_path / name) for key, name in files.items()}
        return here(role, tiny_model_dir(), client_certificates=True, **{**given, **options})

    sender = start("sender")
    receiver = start("receiver", token_file=str(tmp_path / "desk.token"))
    security = PeerSecurity(
        tmp_path / "authority.pem", tmp_path / "receiver.pem", tmp_path / "receiver.key", secrets["me"]
    )
    asyncio.run(deliver(stored, receiver.address, security))
    with Client(
        sender=sender.address,
        receiver=receiver.address,
        **{key: getattr(security, key) for key in ("authority", "certificate", "key", "token")},
    ) as client:
        keep(tmp_path / "sender", DOCUMENT)
        answer = client.ask(stored.artifact_id.hex(), CODE, max_tokens=8)
        north, south = ("north warehouse", "access code"), ("south warehouse", "opening hours")
        assert answer.token_ids == local(model, passages(north, south), CODE)
        # Without a token of its own the receiver is turned away, and says so.
        (tmp_path / "desk.token").write_text(tokens.new_secret())
        with pytest.raises(LookUpError, match="not one that this daemon accepts") as caught:
            client.ask(stored.artifact_id.hex(), CODE, max_tokens=8)
        assert caught.value.fields["reason"] == "AUTHENTICATION"
        assert not caught.value.retryable


def keep(store: Path, text: str) -> None:
    """Give a sender's store a document, as a send does."""
    (store / "documents" / f"{digest(text.encode()).hex()}.txt").write_bytes(text.encode())


# Failures


def failed(error: LookUpError, sender: str, reason: str) -> None:
    assert error.fields == {
        "references": "north warehouse access code; south warehouse opening hours",
        "sender": sender,
        "reason": reason,
    }
    assert f"passages cannot be had from {sender}: " in error.message
    assert error.message.endswith("; missing: north warehouse access code; south warehouse opening hours")


def test_a_sender_that_is_gone(
    knowing: Ferry, sender: Any, model: LoadedModel, local: Callable[..., tuple[int, ...]]
) -> None:
    text = knowing.client.send(text=DOCUMENT, method="A1")
    assert knowing.ask().ledger.lookups.count == 2
    sender.stop()
    with pytest.raises(LookUpError) as caught:
        knowing.ask()
    failed(caught.value, sender.address, "UNAVAILABLE")
    assert caught.value.retryable
    # The daemon serves on: other questions of the same artifact, and other artifacts.
    assert knowing.ask(NOTHING).token_ids == local(model, "", NOTHING)
    assert len(text.ask(CODE, max_tokens=3).token_ids) == 3
    answer = knowing.ask(fallback=True)
    assert answer.token_ids == local(model, "", CODE)
    ledger = answer.ledger
    assert ledger.fallback == "fallback_without_passages"
    assert ledger.fallback_reason == caught.value.message
    assert ledger.lookups.missing == ("north warehouse access code", "south warehouse opening hours")
    assert (ledger.lookups.count, ledger.lookups.text_bytes, ledger.lookups.hit) == (0, 0, True)
    assert ledger.lookups.calls == 2


def test_a_document_that_the_sender_has_not_read(sender: Any, ferry: Callable[..., Ferry]) -> None:
    pair = ferry(sender.address)
    with pytest.raises(LookUpError, match=f"document {digest(DOCUMENT.encode()).hex()}: not read here") as caught:
        pair.ask()
    failed(caught.value, sender.address, "NOT_FOUND")
    assert not caught.value.retryable
    assert pair.ask(fallback=True).ledger.lookups.missing
    pair.client.send(text=DOCUMENT, method="A1")
    assert pair.ask(fallback=True).ledger.fallback is None


def test_a_document_that_the_sender_let_go(
    here: Callable[..., Any], tiny_model_dir: Callable[..., Path], ferry: Callable[..., Ferry], tmp_path: Path
) -> None:
    sender = here("sender", tiny_model_dir(), max_store_bytes=20_000)
    pair = ferry(sender.address)
    pair.client.send(text=DOCUMENT, method="A1")
    file = tmp_path / "sender" / "documents" / f"{digest(DOCUMENT.encode()).hex()}.txt"
    for number in range(30):
        # What answers need is used all the time, and stays.
        assert pair.ask().ledger.lookups.count == 2
        pair.client.send(text=f"{number}. {FILLER * 4}", method="A1")
    assert file.exists()
    for number in range(30, 60):
        pair.client.send(text=f"{number}. {FILLER * 4}", method="A1")
    assert not file.exists()
    with pytest.raises(LookUpError, match="not read here, or no longer kept") as caught:
        pair.ask()
    failed(caught.value, sender.address, "NOT_FOUND")
    assert not caught.value.retryable
    pair.client.send(text=DOCUMENT, method="A1")
    assert pair.ask().ledger.lookups.count == 2


def test_a_receiver_in_the_place_of_a_sender(knowing: Ferry, peers: Callable[..., Any]) -> None:
    driver, address = peers(receiver=knowing.receiver.address), knowing.receiver.address
    with pytest.raises(LookUpError) as caught:
        driver.ask(bytes.fromhex(knowing.artifact), CODE, sender=address)
    failed(caught.value, address, "PEER")


def test_references_that_went_bad_on_the_disk_are_put_aside(knowing: Ferry) -> None:
    path = knowing.store / "artifacts" / knowing.artifact / "payload.safetensors"
    data = bytearray(path.read_bytes())
    data[-10] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"document\.references"):
        knowing.ask()
    assert {item.artifact_id: item.quarantined is not None for item in knowing.client.artifacts()}[knowing.artifact]


def test_a_question_that_is_given_up_ends_its_look_up(sender: Any, proxy: Proxy, ferry: Callable[..., Ferry]) -> None:
    pair = ferry(sender.address, look_up_at=proxy.address)
    pair.client.send(text=DOCUMENT, method="A1")
    proxy.hold = True
    stream = pair.client.stream(pair.artifact, CODE)
    caught: list[BaseException] = []

    def read() -> None:
        try:
            list(stream)
        except CancelledError as error:
            caught.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert proxy.begun.wait(SECONDS)
    stream.cancel()
    reader.join(SECONDS)
    assert len(caught) == 1
    assert proxy.cancelled.wait(SECONDS)
    proxy.hold = False
    assert pair.ask().ledger.lookups.count == 2


def test_a_slow_sender_holds_nobody_else_up(
    sender: Any, proxy: Proxy, ferry: Callable[..., Ferry], peers: Callable[..., Any]
) -> None:
    pair = ferry(sender.address, look_up_at=proxy.address)
    text = pair.client.send(text=DOCUMENT, method="A1")
    proxy.hold = True
    waiting = [pair.client.stream(pair.artifact, CODE, max_tokens=2) for _ in range(20)]
    threads = [threading.Thread(target=stream.finish) for stream in waiting]
    for thread in threads:
        thread.start()
    assert proxy.begun.wait(SECONDS)
    assert text.ask(CODE, max_tokens=2).token_ids
    assert peers().healthy(pair.receiver.address)
    assert all(thread.is_alive() for thread in threads)
    proxy.hold = False
    for thread in threads:
        thread.join(SECONDS)
    assert {stream.answer.token_ids for stream in waiting} == {waiting[0].answer.token_ids}
    assert proxy.calls == 20


@pytest.mark.slow
def test_a_frozen_sender_ends_at_the_deadline(
    process: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    ferry: Callable[..., Ferry],
    peers: Callable[..., Any],
) -> None:
    frozen = process("sender", tiny_model_dir())
    pair = ferry(frozen.address, lookup_seconds=1.0)
    text = pair.client.send(text=DOCUMENT, method="A1")
    assert pair.ask().ledger.lookups.count == 2
    os.kill(frozen.popen.pid, signal.SIGSTOP)
    for _ in range(2):
        before = time.monotonic()
        with pytest.raises(LookUpError) as caught:
            pair.ask()
        assert 0.8 < time.monotonic() - before < 10
        failed(caught.value, frozen.address, "DEADLINE")
        assert caught.value.retryable
    assert text.ask(CODE, max_tokens=2).token_ids
    answer = pair.ask(fallback=True)
    assert answer.ledger.lookups.missing
    assert 800 < answer.ledger.lookups.ms < (answer.ledger.ms.first_token or 0)
    os.kill(frozen.popen.pid, signal.SIGCONT)
    assert pair.ask().ledger.lookups.count == 2
    # And one that is killed, and started again where it was.
    frozen.end(signal.SIGKILL)
    with pytest.raises(LookUpError) as caught:
        pair.ask()
    failed(caught.value, frozen.address, "UNAVAILABLE")
    process("sender", tiny_model_dir(), listen=frozen.address).address  # noqa: B018  (waits until it listens)
    assert pair.ask().ledger.lookups.count == 2


def test_the_ledger_file_says_what_is_missing(knowing: Ferry, sender: Any) -> None:
    sender.stop()
    knowing.ask(fallback=True)
    line = json.loads((knowing.store / "ledger.jsonl").read_text().splitlines()[-1])
    assert line["lookups"]["missing"] == ["north warehouse access code", "south warehouse opening hours"]
    assert line["fallback"] == "fallback_without_passages"
