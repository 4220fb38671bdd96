"""Carrying an artifact over TCP: to a scripted worker that misbehaves in every way, and to the real one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import msgpack
import msgspec
import pytest

from kvferry.core import addresses, authority, channel, errors, tls
from kvferry.core.addresses import Address
from kvferry.core.admission import Admission
from kvferry.core.ledger import SenderAccount, Traffic, account_from_json
from kvferry.core.metrics import NodeMetrics, ReceiverMetrics, SenderMetrics
from kvferry.core.progress import Progress
from kvferry.core.store import ArtifactStore, Stored
from kvferry.core.tls import PeerSecurity
from kvferry.core.tokens import TokenFile, digest_of
from kvferry.engine.model import LoadedModel
from kvferry.receiver import intake_service
from kvferry.receiver.intake import Intake
from kvferry.receiver.intake_service import IntakeServicer
from kvferry.receiver.tcp_worker import TcpWorker
from kvferry.sender import transfer
from kvferry.sender.transfer import ATTEMPTS, Transfer

ACCOUNT = SenderAccount(10, 20, 1.0, 2.0, 3.0, 0.0)
SECONDS = 10.0
PROMPT_SECONDS = 3.0
SECRET = "kvf_a-secret"  # noqa: S105
VERSIONS = {"kvferry": "0", "device": "cpu"}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_FIRST_PAUSE_SECONDS", 0.001)


class HangUpError(Exception):
    """Ends a connection from within a hook."""


class FakeWorker:
    """A TCP worker that keeps chunks in memory and does what a test tells it to.

    ``greeting``, ``offering``, ``taking`` and ``committing`` run before the honest part, with the number of the
    connection from 1; ``taking`` gets each index too, and may return False to keep the chunk without acknowledging it.
    """

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.chunks: dict[int, bytes] = {}
        self.hellos: list[list[Any]] = []
        self.offers = 0
        self.puts: list[list[int]] = []
        self.accounts: list[SenderAccount] = []
        self.committed = False
        self.reasons: list[list[str]] = []
        self.ended = threading.Event()
        self.greeting: Callable[[int], Any] = lambda _: None
        self.offering: Callable[[int], Any] = lambda _: None
        self.taking: Callable[[int, int], Any] = lambda *_: None
        self.committing: Callable[[int], Any] = lambda _: None
        self.change: Callable[[list[Any]], Any] = lambda _: None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._here: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self._listener.getsockname()[1], tcp=True)

    @property
    def count(self) -> int:
        return self.stored.plan.count

    def say(self, *body: Any) -> None:
        assert self._here is not None
        answer = list(body)
        self.change(answer)
        data: bytes = msgpack.packb(answer)
        self._here.sendall(struct.pack("<I", len(data)) + data)

    def fail(self, error: errors.KvferryError) -> None:
        self.say(7, error.code, error.message, error.fields)
        raise HangUpError

    def wait_for_the_end(self) -> None:
        """Read whatever is on its way until the sender hangs up; then do so too."""
        assert self._here is not None
        self._here.settimeout(5)
        with contextlib.suppress(ConnectionError):
            while self._here.recv(1 << 16):
                pass
        raise HangUpError

    def close(self) -> None:
        self._listener.close()
        with contextlib.suppress(OSError):
            if self._here is not None:
                self._here.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        for number in range(1, 1000):
            try:
                self._here, _ = self._listener.accept()
            except OSError:
                return
            with self._here, contextlib.suppress(HangUpError, OSError):
                self.puts.append([])
                self.greeting(number)
                while (body := self._hear()) is not None:
                    self._answer(number, *body)
            self.ended.set()

    def _hear(self) -> list[Any] | None:
        head = self._exactly(4)
        if not head:
            return None
        return list(msgpack.unpackb(self._exactly(*struct.unpack("<I", head))))

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            assert self._here is not None
            piece = self._here.recv(count - len(data))
            if not piece:
                return b""
            data += piece
        return data

    def _answer(self, number: int, kind: int, *fields: Any) -> None:
        if kind == 0:
            self.hellos.append(list(fields))
        elif kind == 1:
            self.offers += 1
            assert fields == (self.stored.encoded,)
            self.offering(number)
            absent = [[index, index + 1] for index in range(self.count) if index not in self.chunks]
            here = bool(self.reasons) or self.committed
            self.say(2, self.stored.artifact_id, self.reasons, [] if here else absent, self.committed)
        elif kind == 3:
            artifact_id, index, data = fields
            assert artifact_id == self.stored.artifact_id
            self.puts[-1].append(index)
            said = self.taking(number, index)
            self.stored.plan.check(index, data)
            self.chunks[index] = data
            if said is not False:
                self.say(4, index)
        else:
            assert kind == 5
            self.accounts.append(account_from_json(fields[1]))
            self.committing(number)
            assert self.committed or sorted(self.chunks) == list(range(self.count))
            self.committed = True
            self.say(6, self.stored.artifact_id, self.stored.manifest.payload.digest, 12345, 678)


class Road:
    """One transfer to one worker, and the progress that it reported."""

    def __init__(self, stored: Stored, worker: FakeWorker, seconds: float = SECONDS) -> None:
        self.worker = worker
        self.metrics = SenderMetrics("tiny", VERSIONS)
        self.transfer = Transfer(stored, ACCOUNT, worker.address, seconds, self.metrics)
        self.progress: list[Progress] = []

    def hasty(self, seconds: float = 0.15) -> None:
        self.transfer._seconds = seconds

    async def drive(self) -> None:
        async with asyncio.timeout(60), contextlib.aclosing(self.transfer.run()) as steps:
            async for step in steps:
                self.progress.append(step)


@pytest.fixture
def road(stored: Stored) -> Iterator[Road]:
    worker = FakeWorker(stored)
    yield Road(stored, worker)
    worker.close()


def hang(*_: object) -> None:
    raise HangUpError


class TestSteps:
    async def test_everything_arrives_once_and_in_order(self, road: Road, stored: Stored) -> None:
        await road.drive()
        worker = road.worker
        assert worker.puts == [list(range(worker.count))]
        assert b"".join(worker.chunks[index] for index in range(worker.count)) == stored.payload_path.read_bytes()
        delivery = road.transfer.delivery
        assert delivery.moved_bytes == stored.manifest.payload.length
        assert delivery.traffic is not None
        assert delivery.traffic.wire_bytes == len(stored.encoded) + 12345 + 678
        (account,) = worker.accounts
        assert account.transfer_ms > 0
        assert msgspec.structs.replace(account, transfer_ms=0.0) == ACCOUNT

    async def test_progress_is_that_of_grpc(self, road: Road, stored: Stored) -> None:
        await road.drive()
        assert list(dict.fromkeys(step.stage for step in road.progress)) == ["offer", "transfer", "commit"]
        done = [step.done for step in road.progress if step.stage == "transfer"]
        assert done == [0, *(stored.plan.range(index)[1] for index in range(road.worker.count))]
        assert road.progress[-1] == Progress("commit", 1, 1)

    async def test_what_is_there_already_is_not_sent(self, road: Road) -> None:
        road.worker.committed = True
        await road.drive()
        assert (road.worker.puts, road.worker.accounts) == ([[]], [])
        assert road.transfer.delivery.traffic is None

    async def test_with_every_chunk_there_only_the_commit_is_left(self, road: Road, stored: Stored) -> None:
        road.worker.chunks = {index: stored.read_chunk(index) for index in range(road.worker.count)}
        await road.drive()
        assert road.worker.puts == [[]]
        assert road.worker.committed

    async def test_hello_says_who_calls_and_for_which_request(self, road: Road) -> None:
        from kvferry.core import request_ids

        request_ids.adopt([("x-request-id", "send-17")])
        road.transfer._security = PeerSecurity(token=SECRET)
        await road.drive()
        assert road.worker.hellos == [[SECRET, 1, "send-17"]]


class TestBrokenConnections:
    async def test_a_broken_connection_resumes_where_it_stopped(self, road: Road, stored: Stored) -> None:
        def break_twice(number: int, index: int) -> None:
            if (number, index) in {(1, 7), (2, 15)}:
                raise HangUpError

        road.worker.taking = break_twice
        await road.drive()
        assert [indices[0] for indices in road.worker.puts] == [0, 7, 15]
        assert set(range(7)).isdisjoint(road.worker.puts[1])
        assert set(range(15)).isdisjoint(road.worker.puts[2])
        assert road.worker.committed
        assert road.transfer.delivery.moved_bytes <= stored.manifest.payload.length

    @pytest.mark.parametrize("stage", ["greeting", "offering", "taking", "committing"])
    async def test_a_connection_that_always_ends_early_is_no_success(self, road: Road, stage: str) -> None:
        setattr(road.worker, stage, hang)
        with pytest.raises((errors.TransferError, errors.UnavailableError)):
            await road.drive()
        assert len(road.worker.puts) == ATTEMPTS
        assert road.transfer.delivery.traffic is None

    async def test_one_that_ends_before_a_word_says_what_it_may_be(self, road: Road) -> None:
        road.worker.greeting = hang
        with pytest.raises(errors.UnavailableError, match="it may ask for TLS") as caught:
            await road.drive()
        assert caught.value.fields == {"peer": str(road.worker.address)}

    @pytest.mark.parametrize("stage", ["offering", "taking", "committing"])
    async def test_an_answer_that_is_cut_off_is_no_answer(self, road: Road, stage: str) -> None:
        def half(*_: object) -> None:
            assert road.worker._here is not None
            road.worker._here.sendall(b"\x30\x00\x00\x00\x95\x02")
            raise HangUpError

        setattr(road.worker, stage, half)
        with pytest.raises(
            (errors.TransferError, errors.UnavailableError), match="ended inside a frame|connection broke"
        ):
            await road.drive()

    @pytest.mark.parametrize("stage", ["offering", "taking", "committing"])
    async def test_a_worker_that_never_answers_is_given_up_in_time(self, road: Road, stage: str) -> None:
        road.hasty()

        def hold(*_: object) -> None:
            time.sleep(0.4)
            raise HangUpError

        setattr(road.worker, stage, hold)
        start = time.perf_counter()
        with pytest.raises(errors.DeadlineError, match="no whole frame in 0.15 s"):
            await road.drive()
        assert time.perf_counter() - start < 5
        assert not road.worker.committed

    async def test_a_lost_receipt_is_no_loss(self, road: Road, stored: Stored) -> None:
        def commit_and_vanish(number: int) -> None:
            road.worker.committed = True
            if number <= 2:
                raise HangUpError

        road.worker.committing = commit_and_vanish
        await road.drive()
        assert (road.worker.offers, len(road.worker.accounts)) == (3, 3)
        delivery = road.transfer.delivery
        assert delivery.moved_bytes == stored.manifest.payload.length
        assert delivery.traffic == Traffic(len(stored.encoded), stored.manifest.payload.length, 12345, 678)
        assert set(road.worker.accounts) == {msgspec.structs.replace(ACCOUNT, transfer_ms=delivery.transfer_ms)}

    async def test_nobody_there_is_unavailable_after_a_few_attempts(self, road: Road) -> None:
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            address = Address("127.0.0.1", reserved.getsockname()[1], tcp=True)
            road.transfer._receiver = address
            with pytest.raises(errors.UnavailableError, match=f"{address}: cannot be reached \\(.*refused\\)"):
                await road.drive()

    @pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 100])
    async def test_a_name_that_nobody_has_is_unavailable(self, road: Road, host: str) -> None:
        road.transfer._receiver = Address(host, 1, tcp=True)
        with pytest.raises(errors.UnavailableError, match="cannot be reached"):
            await road.drive()


class TestAnswers:
    @pytest.mark.parametrize("index", [0, 3, 1000, 2**32 - 1])
    async def test_an_acknowledgement_for_nothing_that_was_sent_stops_the_transfer(
        self, road: Road, index: int
    ) -> None:
        def skip_chunk_3(answer: list[Any]) -> None:
            if answer[0] == 2:
                answer[3].remove([3, 4])

        def invent(*_: object) -> None:
            road.worker.say(4, 0)
            road.worker.say(4, index)
            road.worker.wait_for_the_end()

        road.worker.change, road.worker.taking = skip_chunk_3, invent
        with pytest.raises(errors.TransferError, match=f"chunk {index}: acknowledged without being sent"):
            await road.drive()
        assert road.worker.accounts == []

    async def test_an_acknowledgement_before_its_chunk_was_sent_stops_the_transfer(
        self, road: Road, stored: Stored, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = Stored.read_chunk

        def slowly(self: Stored, index: int) -> bytes:
            if index == 9:
                time.sleep(0.2)
            return read(self, index)

        def invent(_: int, index: int) -> None:
            if index == 0:
                road.worker.say(4, 20)
                road.worker.wait_for_the_end()

        monkeypatch.setattr(Stored, "read_chunk", slowly)
        road.worker.taking = invent
        with pytest.raises(errors.TransferError, match="chunk 20: acknowledged without being sent"):
            await road.drive()

    async def test_acknowledgements_that_stay_out_are_waited_for_only_so_long(self, road: Road) -> None:
        road.hasty()
        road.worker.taking = lambda _, index: index not in {4, 9}
        # What was written and not acknowledged is not missing at the next offer.
        await road.drive()
        assert road.worker.offers == 2
        assert sorted(road.worker.puts[0] + road.worker.puts[1]) == list(range(road.worker.count))

    async def test_one_acknowledgement_too_many_is_no_receipt(self, road: Road) -> None:
        road.worker.committing = lambda _: road.worker.say(4, 0)
        with pytest.raises(errors.PeerError, match="Taken came where Committed was due"):
            await road.drive()
        assert road.transfer.delivery.traffic is None

    @pytest.mark.parametrize(
        ("kind", "change", "error", "words"),
        [
            (2, lambda answer: answer.__setitem__(1, b"\x01" * 32), errors.IntegrityError, "read other bytes"),
            (2, lambda answer: answer.__setitem__(3, [[0, 10_000]]), errors.PeerError, "asks for chunks 0..10000"),
            (2, lambda answer: answer.__setitem__(3, [[0, 2**32 - 1]]), errors.PeerError, "asks for chunks"),
            (2, lambda answer: answer.__setitem__(3, [[5, 3]]), errors.PeerError, "asks for chunks 5..3"),
            (2, lambda answer: answer.__setitem__(3, [[3, 5], [4, 6]]), errors.PeerError, "chunks 4..6 after 5"),
            (6, lambda answer: answer.__setitem__(2, b"\x01" * 32), errors.IntegrityError, "names another digest"),
            (2, lambda answer: answer.__setitem__(0, 4), errors.UnavailableError, "frame: "),
            (4, lambda answer: answer.append(1), errors.TransferError, "frame: "),
            (6, lambda answer: answer.__setitem__(3, "5"), errors.TransferError, "frame: "),
        ],
    )
    async def test_an_answer_that_cannot_be_is_not_believed(
        self, road: Road, kind: int, change: Callable[[list[Any]], Any], error: type[errors.KvferryError], words: str
    ) -> None:
        def forge(answer: list[Any]) -> None:
            if answer[0] == kind:
                change(answer)

        def forget(_: int) -> None:
            road.worker.committed = False
            road.worker.chunks.clear()

        road.worker.change, road.worker.offering = forge, forget
        with pytest.raises(error, match=words):
            await road.drive()
        assert road.transfer.delivery.traffic is None

    @pytest.mark.parametrize("count", [1, 4, 40])
    async def test_a_refusal_moves_nothing_and_is_not_tried_again(self, road: Road, count: int) -> None:
        road.worker.reasons = [["WEIGHTS_MISMATCH", f"layout[{n}].dtype", "a" * 64, "b" * 64] for n in range(count)]
        with pytest.raises(errors.RefusedError) as caught:
            await road.drive()
        assert (road.worker.offers, road.worker.puts) == (1, [[]])
        assert caught.value.fields["reasons"] == count
        carried = json.loads(str(caught.value.fields["verdict_json"]))
        assert [reason["field"] for reason in carried] == [f"layout[{n}].dtype" for n in range(min(count, 12))]
        assert {(reason["code"], reason["artifact"]) for reason in carried} == {("WEIGHTS_MISMATCH", "a" * 64)}

    async def test_a_reason_of_a_later_version_is_a_reason(self, road: Road) -> None:
        road.worker.reasons = [["FROM_THE_FUTURE", "field", "1", "2"]]
        with pytest.raises(errors.RefusedError, match="UNKNOWN_METHOD"):
            await road.drive()


class TestErrors:
    @pytest.mark.parametrize("stage", ["greeting", "offering", "taking", "committing"])
    @pytest.mark.parametrize(
        ("error", "attempts"),
        [
            (errors.IntegrityError("chunk 3: digest", chunk=3), ATTEMPTS),
            (errors.TransferError("nothing came"), ATTEMPTS),
            (errors.BusyError("later", retry_after_ms=1), ATTEMPTS),
            (errors.ContainerError("chunk 3: 5 bytes", chunk=3), 1),
            (errors.ManifestError("no"), 1),
            (errors.QuotaError("full", limit=5), 1),
        ],
        ids=lambda value: type(value).__name__,
    )
    async def test_the_workers_own_words_are_heard(
        self, road: Road, stage: str, error: errors.KvferryError, attempts: int
    ) -> None:
        setattr(road.worker, stage, lambda *_: road.worker.fail(error))
        with pytest.raises(type(error)) as caught:
            await road.drive()
        assert (caught.value.message, caught.value.fields) == (error.message, error.fields)
        assert len(road.worker.puts) == attempts

    async def test_they_are_heard_while_chunks_are_being_written(self, road: Road) -> None:
        def fail(_: int, index: int) -> None:
            if index == 3:
                road.worker.fail(errors.ContainerError("chunk 3: 5 bytes", chunk=3))

        road.worker.taking = fail
        for _ in range(10):
            road.worker.chunks.clear()
            with pytest.raises(errors.ContainerError) as caught:
                await road.drive()
            assert caught.value.fields == {"chunk": 3}

    @pytest.mark.parametrize(
        "error",
        [errors.NotFoundError("not offered here"), errors.StoreError("committed meanwhile")],
        ids=lambda e: e.code,
    )
    @pytest.mark.parametrize("stage", ["taking", "committing"])
    async def test_an_artifact_that_another_transfer_committed_meanwhile_is_delivered(
        self, road: Road, stage: str, error: errors.KvferryError
    ) -> None:
        def overtaken(*_: object) -> None:
            if not road.worker.committed:
                road.worker.committed = True
                road.worker.fail(error)

        setattr(road.worker, stage, overtaken)
        await road.drive()
        assert road.worker.offers == 2

    async def test_a_refused_token_says_whose_it_is(self, road: Road) -> None:
        road.worker.offering = lambda _: road.worker.fail(errors.AuthenticationError("token: not accepted"))
        with pytest.raises(errors.AuthenticationError, match="this is about the sender's own token_file"):
            await road.drive()
        assert road.worker.offers == 1

    async def test_a_payload_that_cannot_be_read_here_says_so(self, road: Road, stored: Stored) -> None:
        data = stored.payload_path.read_bytes()
        stored.payload_path.write_bytes(data[: stored.plan.range(10)[1] - 1])
        with pytest.raises(errors.StoreError, match="^chunk 10: ") as caught:
            await road.drive()
        assert caught.value.fields["chunk"] == 10
        assert road.worker.accounts == []
        assert road.worker.offers == 1


class TestGivingUp:
    @pytest.mark.parametrize("stage", ["greeting", "offering", "taking", "committing"])
    async def test_a_cancelled_transfer_ends_its_connection_and_its_threads(self, road: Road, stage: str) -> None:
        reached, release = threading.Event(), threading.Event()

        def hold(*_: object) -> None:
            reached.set()
            with contextlib.suppress(HangUpError):
                road.worker.wait_for_the_end()
            release.set()
            raise HangUpError

        setattr(road.worker, stage, hold)
        task = asyncio.create_task(road.drive())
        assert await asyncio.to_thread(reached.wait, 5)
        start = time.perf_counter()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.perf_counter() - start < 2
        assert await asyncio.to_thread(release.wait, 5)
        assert len(road.worker.puts) == 1
        names = {thread.name for thread in threading.enumerate()}
        assert names.isdisjoint({"kvferry-tcp-send", "kvferry-tcp-read"})

    async def test_closing_between_two_steps_ends_the_connection(self, road: Road) -> None:
        async with contextlib.aclosing(road.transfer.run()) as steps:
            async for step in steps:
                if step.stage == "transfer" and step.done:
                    break
        assert await asyncio.to_thread(road.worker.ended.wait, 5)
        assert road.worker.accounts == []

    async def test_connecting_can_be_given_up_too(self, road: Road) -> None:
        with socket.socket() as full:
            # A listener whose queue is full answers nobody.
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            address = full.getsockname()
            waiting = []
            for _ in range(3):
                waiting.append(socket.socket())
                waiting[-1].settimeout(0)
                with contextlib.suppress(BlockingIOError):
                    waiting[-1].connect(address)
            road.transfer._receiver = Address(*address, tcp=True)
            task = asyncio.create_task(road.drive())
            await asyncio.sleep(0.05)
            start = time.perf_counter()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.perf_counter() - start < 2
            road.hasty(0.05)
            with pytest.raises(errors.UnavailableError, match="timed out"):
                await road.drive()
            for one in waiting:
                one.close()


class TestThreads:
    """asyncio's threads are few and everybody's: what waits for another machine must hold none of them."""

    @pytest.fixture(autouse=True)
    async def _one_thread(self) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

    @contextlib.asynccontextmanager
    async def driving(self, roads: list[Road], reached: list[threading.Event]) -> AsyncIterator[None]:
        """Run the block once every transfer is where it waits; then give all of them up."""
        tasks = [asyncio.create_task(road.drive()) for road in roads]
        loop = asyncio.get_running_loop()
        try:
            with ThreadPoolExecutor(len(reached)) as own:
                waits = [loop.run_in_executor(own, event.wait, PROMPT_SECONDS) for event in reached]
                assert all(await asyncio.gather(*waits))
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @pytest.mark.parametrize("stage", ["offering", "taking", "committing"])
    async def test_receivers_that_say_nothing_hold_none(self, stored: Stored, stage: str) -> None:
        workers = [FakeWorker(stored) for _ in range(3)]
        reached = [threading.Event() for _ in workers]
        for worker, event in zip(workers, reached, strict=True):

            def hold(*_: object, worker: FakeWorker = worker, event: threading.Event = event) -> None:
                event.set()
                worker.wait_for_the_end()

            setattr(worker, stage, hold)
        async with self.driving([Road(stored, worker) for worker in workers], reached):
            async with asyncio.timeout(PROMPT_SECONDS):
                assert await asyncio.to_thread(lambda: "at once") == "at once"
            assert not any(worker.ended.is_set() for worker in workers)
        for worker in workers:
            worker.close()

    async def test_a_name_that_nobody_answers_for_holds_none(self, road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
        asked, release = threading.Event(), threading.Event()

        def hold(host: str, *_: object, **__: object) -> list[Any]:
            asked.set()
            release.wait(10)
            raise socket.gaierror(socket.EAI_AGAIN, host)

        monkeypatch.setattr(socket, "getaddrinfo", hold)
        road.transfer._receiver = Address("far.invalid", 1, tcp=True)
        try:
            async with self.driving([road], [asked]), asyncio.timeout(PROMPT_SECONDS):
                assert await asyncio.to_thread(lambda: "at once") == "at once"
        finally:
            release.set()

    async def test_a_transfer_needs_none(self, road: Road, stored: Stored) -> None:
        release = threading.Event()
        held = asyncio.create_task(asyncio.to_thread(release.wait, 10))
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(PROMPT_SECONDS):
                await road.drive()
        finally:
            release.set()
            await held
        assert road.transfer.delivery.moved_bytes == stored.manifest.payload.length

    async def test_they_end_with_the_connection(self, road: Road) -> None:
        await road.drive()
        left = [thread for thread in threading.enumerate() if thread.name.startswith("kvferry-tcp")]
        for thread in left:
            thread.join(PROMPT_SECONDS)
        assert not any(thread.is_alive() for thread in left)


class CountingProxy:
    """Passes bytes on between a sender and a receiver, counts them, and cuts connections where it is told to."""

    def __init__(self, target: Address) -> None:
        self.target = target
        self.up = self.down = 0
        self.connections: list[tuple[int, int]] = []
        self.cuts: list[int] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1], tcp=True)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more connections, and wait until the last one is counted."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    def _serve(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            before = self.up, self.down
            there = socket.create_connection((self.target.host, self.target.port))
            limit = self.cuts.pop(0) if self.cuts else 1 << 60
            down = threading.Thread(target=self._pass_on, args=(there, here, "down", 1 << 60), daemon=True)
            down.start()
            self._pass_on(here, there, "up", limit)
            down.join()
            here.close()
            there.close()
            self.connections.append((self.up - before[0], self.down - before[1]))

    def _pass_on(self, source: socket.socket, target: socket.socket, direction: str, limit: int) -> None:
        with contextlib.suppress(OSError):
            while limit and (data := source.recv(min(1 << 16, limit))):
                setattr(self, direction, getattr(self, direction) + len(data))
                limit -= len(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


class Real:
    """A real receiver without a model of its own: gRPC and TCP into separate stores, or one."""

    def __init__(self, folder: Path, model: LoadedModel) -> None:
        self.store = ArtifactStore(folder)
        self.metrics = ReceiverMetrics("tiny", VERSIONS)
        self.intake = Intake(self.store, model.profile, self.metrics)
        self._workers: list[TcpWorker] = []

    def worker(self, tokens: TokenFile | None = None, context: Any = None) -> TcpWorker:
        admission = Admission(tokens, 64)
        self._workers.append(TcpWorker(Address("127.0.0.1", 0), self.intake, self.metrics, admission, context))
        return self._workers[-1]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self.store.close()


@pytest.fixture
def real(tmp_path: Path, tiny_model: Callable[..., LoadedModel]) -> Iterator[Callable[[str], Real]]:
    made: list[Real] = []

    def build(name: str) -> Real:
        made.append(Real(tmp_path / name, tiny_model("llama")))
        return made[-1]

    yield build
    for one in made:
        one.close()


async def send(
    stored: Stored, address: Address, security: PeerSecurity | None = None
) -> tuple[Transfer, SenderMetrics]:
    metrics = SenderMetrics("tiny", VERSIONS)
    made = Transfer(stored, ACCOUNT, address, SECONDS, metrics, security=security or PeerSecurity())
    async with asyncio.timeout(60), contextlib.aclosing(made.run()) as steps:
        async for _ in steps:
            pass
    return made, metrics


@contextlib.asynccontextmanager
async def serving(receiver: Real) -> AsyncIterator[Address]:
    """Take artifacts in over gRPC for the block."""
    server = grpc.aio.server(options=channel.server_options())
    servicer: Any = type("Servicer", (IntakeServicer,), {"__abstractmethods__": frozenset()})
    intake_service.register(servicer(receiver.intake, receiver.metrics), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Address("127.0.0.1", port)
    finally:
        await server.stop(None)


def counted(metrics: NodeMetrics, direction: str) -> dict[str, float]:
    kinds = ("manifest", "payload", "resent", "control")
    name = f"kvferry_{direction}_bytes_total"
    return {kind: metrics.registry.get_sample_value(name, {"kind": kind}) or 0.0 for kind in kinds}


def tcp(address: Address) -> Address:
    return Address(address.host, address.port, tcp=True)


class TestRealWorker:
    async def test_every_count_is_what_a_proxy_between_the_two_sees(
        self, stored: Stored, real: Callable[[str], Real]
    ) -> None:
        receiver = real("receiver")
        worker = receiver.worker()
        proxy = CountingProxy(worker.address)
        made, metrics = await send(stored, proxy.address)
        worker.close(5.0)
        proxy.close()
        assert proxy.connections == [(proxy.up, proxy.down)]
        traffic = receiver.store.get(stored.artifact_id).record.traffic
        assert traffic == made.delivery.traffic
        receipt = 4 + len(
            msgpack.packb([6, stored.artifact_id, bytes(32), traffic.received_bytes, traffic.control_bytes])
        )
        assert traffic.wire_bytes == proxy.up + proxy.down - receipt
        assert traffic.resent_bytes == 0
        assert sum(counted(metrics, "sent").values()) == proxy.up
        assert counted(receiver.metrics, "received") == counted(metrics, "sent")
        assert counted(metrics, "received")["control"] == proxy.down
        assert counted(receiver.metrics, "sent") == counted(metrics, "received")

    @pytest.mark.parametrize("cuts", [[20_000], [3], [40_000, 1, 30_000]])
    async def test_a_connection_that_is_cut_moves_what_is_missing_and_every_byte_is_counted(
        self, stored: Stored, real: Callable[[str], Real], cuts: list[int]
    ) -> None:
        receiver = real("receiver")
        worker = receiver.worker()
        proxy = CountingProxy(worker.address)
        proxy.cuts = list(cuts)
        await send(stored, proxy.address)
        worker.close(5.0)
        proxy.close()
        assert len(proxy.connections) == len(cuts) + 1
        kept = receiver.store.get(stored.artifact_id)
        assert kept.payload_path.read_bytes() == stored.payload_path.read_bytes()
        traffic = kept.record.traffic
        receipt = 4 + len(
            msgpack.packb([6, stored.artifact_id, bytes(32), traffic.received_bytes, traffic.control_bytes])
        )
        # Where a connection ends before its offer, there is no artifact yet that it could be charged to.
        unknown = sum(up + down for up, down in proxy.connections if up < len(stored.encoded))
        assert traffic.wire_bytes == proxy.up + proxy.down - receipt - unknown
        # One chunk is cut off each time at most.
        assert traffic.resent_bytes <= len(cuts) * 1100
        assert sum(counted(receiver.metrics, "received").values()) == proxy.up

    @pytest.mark.parametrize("way", ["grpc", "tcp"])
    async def test_a_receipt_that_was_lost_is_given_again_and_is_the_same(
        self, stored: Stored, real: Callable[[str], Real], monkeypatch: pytest.MonkeyPatch, way: str
    ) -> None:
        receiver = real("receiver")
        commit, calls = receiver.intake.commit, []

        def commit_and_vanish(*arguments: Any) -> Stored:
            calls.append(arguments)
            published = commit(*arguments)
            if len(calls) == 1:
                raise errors.UnavailableError("gone")
            return published

        monkeypatch.setattr(receiver.intake, "commit", commit_and_vanish)
        if way == "tcp":
            made, _ = await send(stored, tcp(receiver.worker().address))
        else:
            async with serving(receiver) as address:
                made, _ = await send(stored, address)
        assert len(calls) == 2
        record = receiver.store.get(stored.artifact_id).record
        assert made.delivery.moved_bytes == stored.manifest.payload.length
        assert made.delivery.traffic == record.traffic
        assert record.account == msgspec.structs.replace(ACCOUNT, transfer_ms=made.delivery.transfer_ms)

    async def test_grpc_and_tcp_leave_the_same_behind(self, stored: Stored, real: Callable[[str], Real]) -> None:
        by_grpc, by_tcp = real("grpc"), real("tcp")
        worker = by_tcp.worker()
        async with serving(by_grpc) as address:
            one, _ = await send(stored, address)
        other, _ = await send(stored, tcp(worker.address))
        worker.close(5.0)
        kept = [receiver.store.get(stored.artifact_id) for receiver in (by_grpc, by_tcp)]
        assert kept[0].encoded == kept[1].encoded == stored.encoded
        assert kept[0].payload_path.read_bytes() == kept[1].payload_path.read_bytes()
        for made, stored_there in zip((one, other), kept, strict=True):
            assert made.delivery.traffic == stored_there.record.traffic
            assert made.delivery.moved_bytes == stored.manifest.payload.length
        traffics = [made.delivery.traffic for made in (one, other)]
        assert [t and (t.manifest_bytes, t.payload_bytes, t.received_bytes) for t in traffics] == [
            (len(stored.encoded), stored.manifest.payload.length, stored.manifest.payload.length)
        ] * 2
        accounts = [there.record.account for there in kept]
        assert [a and msgspec.structs.replace(a, transfer_ms=0.0) for a in accounts] == [ACCOUNT, ACCOUNT]

    async def test_a_transfer_may_begin_over_one_and_end_over_the_other(
        self, stored: Stored, real: Callable[[str], Real]
    ) -> None:
        receiver = real("receiver")
        receiver.intake.offer(stored.encoded)
        for index in range(10):
            receiver.intake.put(stored.artifact_id, index, stored.read_chunk(index), 1)
        worker = receiver.worker()
        made, metrics = await send(stored, tcp(worker.address))
        worker.close(5.0)
        left = stored.manifest.payload.length - stored.plan.range(9)[1]
        assert made.delivery.moved_bytes == counted(metrics, "sent")["payload"] == left
        again, _ = await send(stored, tcp(receiver.worker().address))
        assert again.delivery.traffic is None


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    for stem, hosts in {"good": ("127.0.0.1",), "elsewhere": ("mac-studio.local",), "foreign": ("127.0.0.1",)}.items():
        own = authority.create()
        leaf = authority.issue(own, "node", hosts)
        (folder / f"{stem}-authority.pem").write_bytes(own.certificate)
        (folder / f"{stem}.pem").write_bytes(leaf.certificate)
        (folder / f"{stem}.key").write_bytes(leaf.key)
    return folder


def context(pki: Path, stem: str, asks: str = "") -> Any:
    return tls.server_context(pki / f"{stem}.pem", pki / f"{stem}.key", pki / f"{asks}-authority.pem" if asks else None)


def trusting(pki: Path, stem: str, shows: str = "", token: str | None = None) -> PeerSecurity:
    return PeerSecurity(
        authority=pki / f"{stem}-authority.pem",
        certificate=pki / f"{shows}.pem" if shows else None,
        key=pki / f"{shows}.key" if shows else None,
        token=token,
    )


class TestSecurity:
    async def test_an_artifact_arrives_over_mutual_tls_with_a_token(
        self, stored: Stored, real: Callable[[str], Real], pki: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "tokens.toml").write_text(f'[[tokens]]\nname = "studio"\ndigest = "{digest_of(SECRET)}"\n')
        receiver = real("receiver")
        worker = receiver.worker(TokenFile(tmp_path / "tokens.toml"), context(pki, "good", asks="good"))
        await send(stored, tcp(worker.address), trusting(pki, "good", shows="good", token=SECRET))
        worker.close(5.0)
        kept = receiver.store.get(stored.artifact_id)
        assert kept.record.owner == "studio"
        assert kept.payload_path.read_bytes() == stored.payload_path.read_bytes()

    @pytest.mark.parametrize(
        ("served", "asks", "security", "words"),
        [
            ("foreign", "", ("good", ""), "not signed by the authority"),
            ("elsewhere", "", ("elsewhere", ""), "another host name than the one that was dialled"),
            (None, "", ("good", ""), "does not speak TLS on that port"),
            ("good", "good", ("good", ""), "client certificate"),
            ("good", "good", ("good", "foreign"), "client certificate|closed the connection"),
        ],
        ids=["foreign", "host", "no-tls", "none-shown", "foreign-shown"],
    )
    async def test_a_handshake_that_fails_says_why(
        self,
        stored: Stored,
        real: Callable[[str], Real],
        pki: Path,
        served: str | None,
        asks: str,
        security: tuple[str, str],
        words: str,
    ) -> None:
        worker = real("receiver").worker(context=context(pki, served, asks) if served else None)
        with pytest.raises(errors.UnavailableError, match=words) as caught:
            await send(stored, tcp(worker.address), trusting(pki, *security, token=SECRET))
        assert SECRET not in caught.value.message
        worker.close()

    async def test_tls_is_needed_where_it_is_asked_for(
        self, stored: Stored, real: Callable[[str], Real], pki: Path
    ) -> None:
        worker = real("receiver").worker(context=context(pki, "good"))
        with pytest.raises(errors.UnavailableError, match="it may ask for TLS"):
            await send(stored, tcp(worker.address))
        worker.close()

    async def test_a_token_does_not_cross_a_network_in_the_clear(self, stored: Stored) -> None:
        address = addresses.parse_receiver("tcp://192.0.2.1:7413", "receiver")
        with pytest.raises(errors.ConfigError, match="unencrypted"):
            await send(stored, address, PeerSecurity(token=SECRET))

    async def test_many_chunks_both_ways_at_once_over_tls(
        self,
        real: Callable[[str], Real],
        pki: Path,
        workshop: Callable[..., Any],
        tiny_model: Callable[..., LoadedModel],
    ) -> None:
        big = workshop(tiny_model("llama"), chunk_bytes=1024).make("B1", "The ferry leaves at dawn. " * 120).stored
        assert big.plan.count > 500
        receiver = real("receiver")
        worker = receiver.worker(context=context(pki, "good"))
        await send(big, tcp(worker.address), trusting(pki, "good"))
        worker.close(5.0)
        kept = receiver.store.get(big.artifact_id)
        assert kept.payload_path.read_bytes() == big.payload_path.read_bytes()
        assert kept.record.traffic.resent_bytes == 0
