"""Real daemons over real sockets, and a small driver on the raw stubs.

============  ========================================================================================================
process       factory of daemons as processes of their own, through the command line; ended with the test
pair          a sender and a receiver as processes, shared by all tests of a run: leave them as they are
running_pair  the same with another model, as a context manager
here          factory of daemons in this process, on an event loop of their own: quick to start, and can be watched
peers         factory of drivers: what a client says on the wire, and what it gets, in our own errors
artifact      factory of artifacts that no receiver has seen
local_answer  what plain mlx-lm answers to the whole prompt, greedily
============  ========================================================================================================

The stubs are blocking ones: gRPC's asyncio client loses the status of a call that ends while it writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvferry.engine  # noqa: F401  (a real BLAS, before MLX)
from kvferry.core import addresses, channel, config, rpc, serving, wire
from kvferry.core.config import ReceiverConfig, SenderConfig
from kvferry.core.digests import digest
from kvferry.core.manifest import Scalar
from kvferry.core.progress import finish
from kvferry.core.store import ArtifactStore, Stored
from kvferry.engine import node
from kvferry.engine.backend import runtime_versions
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import DEFAULT_SYSTEM
from kvferry.engine.residency import Residency
from kvferry.proto.v1 import receiver_service_pb2 as receiver_pb
from kvferry.proto.v1 import receiver_service_pb2_grpc as receiver_grpc
from kvferry.proto.v1 import sender_service_pb2 as sender_pb
from kvferry.proto.v1 import sender_service_pb2_grpc as sender_grpc
from kvferry.receiver import daemon as receiver_daemon
from kvferry.sender import daemon as sender_daemon
from kvferry.sender import registry
from kvferry.sender.artifacts import ArtifactMaker
from kvferry.sender.reading import Reading

SECONDS = 60.0
PAIR_MODEL: Mapping[str, Any] = {"heads": 6, "kv_heads": 3, "head_dim": 8, "layers": 3}
PAIR_CHUNK = 32
TEXT_PIECE = 50_000
OUR_FRAME = re.compile(r'File "[^"]*kvferry/')


@dataclass
class Process:
    """A daemon in a process of its own."""

    role: str
    popen: subprocess.Popen[str]
    log: IO[str]

    @cached_property
    def address(self) -> str:
        """host:port, once it listens."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"{self.role} ended before it listened: {self.logged()}"
        return str(json.loads(line)["address"])

    def logged(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        code = self.popen.wait(SECONDS)
        if self.popen.stdout is not None:
            self.popen.stdout.close()
        return code


def start_process(role: str, model: Path, store: Path, **options: object) -> Process:
    given = {"listen": "127.0.0.1:0", "model": model, "store": store, **options}
    arguments = [item for name, value in given.items() for item in (f"--{name.replace('_', '-')}", str(value))]
    log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  (lives as long as the daemon)
    popen = subprocess.Popen(
        [sys.executable, "-m", "kvferry.cli", role, "--json", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    return Process(role, popen, log)


@contextlib.contextmanager
def ending() -> Iterator[list[Process]]:
    """Keep a list of processes; at the end, end them and look for what they did not mean to say."""
    started: list[Process] = []
    try:
        yield started
    finally:
        logs = []
        for one in started:
            one.end(signal.SIGKILL)
            logs.append(one.logged())
            one.log.close()
    # gRPC logs a traceback of its own for a call that the end of a daemon cuts off; none may pass through our code.
    assert not [log for log in logs if OUR_FRAME.search(log)]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Return a factory: ``process("receiver", model_dir, store="a name", listen=…, prefill_chunk=…)``."""
    with ending() as started:

        def start(role: str, model: Path, store: str = "", **options: object) -> Process:
            started.append(start_process(role, model, tmp_path / (store or role), **options))
            return started[-1]

        yield start


@dataclass(frozen=True)
class Pair:
    """The shared daemons."""

    sender: str
    receiver: str
    model_dir: Path
    folder: Path


@pytest.fixture(scope="session")
def running_pair() -> Callable[..., contextlib.AbstractContextManager[Pair]]:
    """Return a context manager: a sender and a receiver as processes, for tests that share them."""

    @contextlib.contextmanager
    def run(model: Path, folder: Path, *, chunk_bytes: int = 2**20, **options: object) -> Iterator[Pair]:
        with ending() as started:
            started.append(start_process("receiver", model, folder / "receiver", **options))
            own = {"receiver": started[0].address, "chunk_bytes": chunk_bytes}
            started.append(start_process("sender", model, folder / "sender", **own, **options))
            yield Pair(started[1].address, started[0].address, model, folder)
            assert [one.end() for one in started] == [0, 0]

    return run


@pytest.fixture(scope="session")
def pair(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model_dir: Callable[..., Path],
    running_pair: Callable[..., contextlib.AbstractContextManager[Pair]],
) -> Iterator[Pair]:
    folder, model = tmp_path_factory.mktemp("pair"), tiny_model_dir(**PAIR_MODEL)
    with running_pair(model, folder, chunk_bytes=4096, prefill_chunk=PAIR_CHUNK) as running:
        yield running


@pytest.fixture(scope="session")
def pair_model(tiny_model_dir: Callable[..., Path]) -> LoadedModel:
    """The model of the shared daemons, read in the same chunks."""
    from kvferry.engine.model import load

    return load(str(tiny_model_dir(**PAIR_MODEL)), prefill_chunk=PAIR_CHUNK)


class QuietLoop(asyncio.SelectorEventLoop):
    """An event loop in a thread: signals are the main thread's, so a daemon here is stopped by its task."""

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        """Take no signal."""

    def remove_signal_handler(self, sig: int) -> bool:
        return False


@pytest.fixture(scope="session")
def background() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Return a function that starts a coroutine on one event loop for the whole run, and returns its future."""
    loop = QuietLoop()
    thread = threading.Thread(target=loop.run_forever, name="daemons", daemon=True)
    thread.start()
    yield lambda work: asyncio.run_coroutine_threadsafe(work, loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(SECONDS)
    loop.close()


@dataclass
class Here:
    """A daemon in this process. ``tcp`` is where its TCP worker listens, if it has one."""

    address: str
    tcp: str
    future: Any
    finished: threading.Event

    def stop(self) -> None:
        """Stop at once, calls in flight are cut off, and wait until the store is closed."""
        self.future.cancel()
        assert self.finished.wait(SECONDS)


@pytest.fixture
def here(
    tmp_path: Path, background: Callable[[Coroutine[Any, Any, Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Here]]:
    """Return a factory: ``here("receiver", model_dir, store="a name", wrap=function of the loaded model, …)``."""
    started: list[Here] = []
    announced: queue.Queue[tuple[str, str]] = queue.Queue()

    def announce(_: str, address: object, __: object, tcp: object, **___: object) -> None:
        announced.put((str(address), f"{addresses.TCP_SCHEME}{tcp}" if tcp else ""))

    monkeypatch.setattr(serving, "_announce", announce)

    def start(
        role: str,
        model: Path,
        store: str = "",
        wrap: Callable[[LoadedModel], LoadedModel] = lambda loaded: loaded,
        **options: object,
    ) -> Here:
        kind, module = {"sender": (SenderConfig, sender_daemon), "receiver": (ReceiverConfig, receiver_daemon)}[role]
        load = node.load
        given = {"listen": "127.0.0.1:0", "model": str(model), "store": str(tmp_path / (store or role)), **options}
        loaded = config.load(kind, None, {}, {"grace_seconds": 0.0, **given})  # type: ignore[type-var]
        with monkeypatch.context() as patch:
            patch.setattr(node, "load", lambda *args, **keywords: wrap(load(*args, **keywords)))
            finished = threading.Event()
            future = background(_supervise(module.run(loaded), finished))
            started.append(Here(*_first(announced, future), future, finished))
        return started[-1]

    yield start
    for one in started:
        one.stop()


async def _supervise(work: Coroutine[Any, Any, None], finished: threading.Event) -> None:
    try:
        await work
    finally:
        finished.set()


def _first(announced: queue.Queue[tuple[str, str]], future: Any) -> tuple[str, str]:
    while True:
        try:
            return announced.get(timeout=0.02)
        except queue.Empty:
            if future.done():
                future.result()


@dataclass
class Sent:
    """A send that reached its end."""

    end: sender_pb.SendEnd
    progress: list[tuple[str, int, int]]

    @property
    def artifact_id(self) -> bytes:
        return self.end.artifact_id


@dataclass
class Asked:
    """An answer that reached its end."""

    end: receiver_pb.AnswerEnd
    pieces: list[receiver_pb.AnswerPiece]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.end.token_ids)

    @property
    def ledger(self) -> dict[str, Any]:
        return dict(json.loads(self.end.ledger_json))


@dataclass
class Peers:
    """What a client says to a sender and a receiver. Calls are blocking and may come from several threads."""

    sender: str = ""
    receiver: str = ""
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def _open(self, address: str) -> grpc.Channel:
        opened: grpc.Channel = self._stack.enter_context(channel.open_blocking(addresses.parse(address, "peer")))
        return opened

    @cached_property
    def sending(self) -> Any:
        return sender_grpc.SenderServiceStub(self._open(self.sender))

    @cached_property
    def receiving(self) -> Any:
        return receiver_grpc.ReceiverServiceStub(self._open(self.receiver))

    def close(self) -> None:
        self._stack.close()

    def send_call(self, text: bytes, method: str = "B1", **start: Any) -> Any:
        """Begin a send and return gRPC's call."""
        fields = {"text_bytes": len(text), "text_digest": digest(text), "receiver": self.receiver, **start}
        fields["parameters"] = wire.parameters_to_message(fields.get("parameters", {}))

        def requests() -> Iterator[sender_pb.SendRequest]:
            yield sender_pb.SendRequest(start=sender_pb.SendStart(method=method, **fields))
            for at in range(0, len(text), TEXT_PIECE):
                yield sender_pb.SendRequest(text=text[at : at + TEXT_PIECE])

        return self.sending.Send(requests(), timeout=SECONDS)

    def send(self, text: str | bytes, method: str = "B1", **start: Any) -> Sent:
        data = text.encode() if isinstance(text, str) else text
        return self.finish_send(self.send_call(data, method, **start))

    def finish_send(self, call: Iterable[sender_pb.SendResponse]) -> Sent:
        progress: list[tuple[str, int, int]] = []
        with rpc.translating(self.sender, "Send"):
            for response in call:
                if response.WhichOneof("event") == "end":
                    return Sent(response.end, progress)
                progress.append((response.progress.stage, response.progress.done, response.progress.total))
        raise AssertionError("the send has no end")

    def ask_call(self, artifact_id: bytes, question: str, max_tokens: int = 8, **options: Any) -> Any:
        """Begin an answer and return gRPC's call."""
        fields = {"artifact_id": artifact_id, "question": question, "max_tokens": max_tokens, "top_p": 1.0, **options}
        return self.receiving.Ask(receiver_pb.AskRequest(**fields), timeout=SECONDS)

    def ask(self, artifact_id: bytes, question: str, max_tokens: int = 8, **options: Any) -> Asked:
        return self.finish_ask(self.ask_call(artifact_id, question, max_tokens, **options))

    def finish_ask(self, call: Iterable[receiver_pb.AskResponse]) -> Asked:
        pieces: list[receiver_pb.AnswerPiece] = []
        with rpc.translating(self.receiver, "Ask"):
            for response in call:
                if response.WhichOneof("event") == "end":
                    return Asked(response.end, pieces)
                pieces.append(response.piece)
        raise AssertionError("the answer has no end")

    def offer(self, encoded: bytes) -> receiver_pb.OfferResponse:
        with rpc.translating(self.receiver, "Offer"):
            return self.receiving.Offer(receiver_pb.OfferRequest(manifest=encoded), timeout=SECONDS)  # type: ignore[no-any-return]

    def put(self, requests: Iterable[receiver_pb.PutRequest]) -> list[int]:
        """Send chunks and return the acknowledged indices; an error carries them as ``acknowledged``."""
        acknowledged: list[int] = []
        try:
            with rpc.translating(self.receiver, "Put"):
                acknowledged.extend(response.index for response in self.receiving.Put(iter(requests), timeout=SECONDS))
        except Exception as error:
            error.acknowledged = acknowledged  # type: ignore[attr-defined]
            raise
        return acknowledged

    def commit(self, artifact_id: bytes, account_json: str = "") -> receiver_pb.Receipt:
        account = account_json or json.dumps(
            dict.fromkeys(("prefill_tokens", "dense_bf16_bytes"), 1)
            | dict.fromkeys(("prefill_ms", "method_ms", "encode_ms", "transfer_ms"), 1.0)
        )
        request = receiver_pb.CommitRequest(artifact_id=artifact_id, account_json=account)
        with rpc.translating(self.receiver, "Commit"):
            return self.receiving.Commit(request, timeout=SECONDS).receipt  # type: ignore[no-any-return]

    def drop(self, artifact_id: bytes) -> None:
        with rpc.translating(self.receiver, "Drop"):
            self.receiving.Drop(receiver_pb.DropRequest(artifact_id=artifact_id), timeout=SECONDS)

    def listed(self) -> set[bytes]:
        with rpc.translating(self.receiver, "List"):
            response = self.receiving.List(receiver_pb.ListRequest(), timeout=SECONDS)
        return {artifact.artifact_id for artifact in response.artifacts}

    def healthy(self, address: str) -> bool:
        with channel.open_blocking(addresses.parse(address, "peer")) as opened:
            stub = health_pb2_grpc.HealthStub(opened)
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture
def peers() -> Iterator[Callable[..., Peers]]:
    """Return a factory: ``peers(sender=address, receiver=address)``."""
    opened: list[Peers] = []

    def connect(sender: str = "", receiver: str = "") -> Peers:
        opened.append(Peers(sender, receiver))
        return opened[-1]

    yield connect
    for one in opened:
        one.close()


@pytest.fixture
def both(pair: Pair, peers: Callable[..., Peers]) -> Peers:
    """The driver of the shared daemons."""
    return peers(pair.sender, pair.receiver)


@pytest.fixture
def artifact(tmp_path: Path) -> Iterator[Callable[..., Stored]]:
    """Return a factory: ``artifact(model, "B1", text, chunk_bytes=1024, **parameters)``."""
    stores: list[ArtifactStore] = []
    numbers = itertools.count()

    def make(model: LoadedModel, method: str, text: str, chunk_bytes: int = 1024, **parameters: Scalar) -> Stored:
        stores.append(ArtifactStore(tmp_path / f"made-{next(numbers)}"))
        maker = ArtifactMaker(model, stores[-1], chunk_bytes, runtime_versions())
        found = registry.find(method)
        reading = Reading(model, Residency(0), text, DEFAULT_SYSTEM, None)
        stored: Stored = finish(maker.make(found, reading, registry.check_parameters(found, parameters))).stored
        return stored

    yield make
    for store in stores:
        store.close()


@pytest.fixture(scope="session")
def local_answer(own_answer: Callable[..., tuple[int, ...]]) -> Callable[..., tuple[int, ...]]:
    """Return a function: the ids that a model chooses greedily after document and question, on mlx-lm's caches."""

    def answer(model: LoadedModel, text: str, question: str, max_tokens: int = 8) -> tuple[int, ...]:
        return own_answer(model, model.prompt.prefix(text), model.prompt.fresh(question), max_tokens)

    return answer
