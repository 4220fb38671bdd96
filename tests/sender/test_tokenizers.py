"""Asking receivers for their tokenizers: what comes is used, kept and counted, or refused."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import zstandard
from blake3 import blake3

from kvferry.core import limits
from kvferry.core.addresses import Address
from kvferry.core.errors import AuthenticationError, DeadlineError, PeerError, StoreError, TooLargeError
from kvferry.core.limits import MIB
from kvferry.core.metrics import SenderMetrics
from kvferry.core.store import ArtifactStore
from kvferry.core.store_files import StoreFiles
from kvferry.core.tls import PeerSecurity
from kvferry.engine.content import ContentEncoder
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.proto.v1 import receiver_service_pb2_grpc as pb_grpc
from kvferry.sender import tokenizers, transfer
from kvferry.sender.tokenizers import MAX_LOADED, Counter, Tokenizers

PLAINTEXT = PeerSecurity()
TEXT = "The access code is 4417. 門 🚢"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_FIRST_PAUSE_SECONDS", 0.001)


def description(letters: str = "ab") -> bytes:
    """Write down a tokenizer that knows some letters, and every pair of two neighbours among them as one token."""
    pairs = [(letters[at], letters[at + 1]) for at in range(0, len(letters) - 1, 2)]
    words = [*letters, *("".join(pair) for pair in pairs)]
    vocab = {word: number for number, word in enumerate(words)}
    model = {
        "type": "BPE",
        "vocab": vocab,
        "merges": [list(pair) for pair in pairs],
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    state = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    return json.dumps([state, [0]], sort_keys=True, separators=(",", ":")).encode()


@dataclass
class FarReceiver(pb_grpc.ReceiverServiceServicer):
    """A receiver with a tokenizer. ``messages`` replaces what it would say."""

    has: bytes = field(default_factory=description)
    messages: Callable[[], list[pb.TokenizerResponse]] | None = None
    silent: bool = False
    refuses: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    refusals: int = 0
    asked: list[list[bytes]] = field(default_factory=list)
    crossed: int = 0
    pause: float = 0.0
    said: int = 0
    called: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def Tokenizer(self, request: pb.TokenizerRequest, context: Any) -> AsyncIterator[pb.TokenizerResponse]:
        self.asked.append(list(request.known))
        self.called.set()
        try:
            async for response in self._answer(request, context):
                yield response
        finally:
            self.left.set()

    async def _answer(self, request: pb.TokenizerRequest, context: Any) -> AsyncIterator[pb.TokenizerResponse]:
        self.crossed += request.ByteSize()
        if self.refusals > 0:
            self.refusals -= 1
            await context.abort(self.refuses, "no")
        if self.silent:
            await asyncio.sleep(60)
        for response in (self.messages or self.own)():
            await asyncio.sleep(self.pause)
            self.said += 1
            self.crossed += response.ByteSize()
            yield response

    def own(self) -> list[pb.TokenizerResponse]:
        digest = blake3(self.has).digest()
        if digest in self.asked[-1]:
            return [pb.TokenizerResponse(digest=digest)]
        frame = zstandard.ZstdCompressor(write_content_size=True).compress(self.has)
        half = len(frame) // 2
        return [
            pb.TokenizerResponse(digest=digest, length=len(self.has), data=frame[:half]),
            pb.TokenizerResponse(data=frame[half:]),
        ]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ArtifactStore]:
    with contextlib.closing(ArtifactStore(tmp_path / "store")) as opened:
        yield opened


@pytest.fixture
def own() -> ContentEncoder:
    return ContentEncoder(description("own"))


class Asking:
    """A sender that asks one receiver, and may be started again."""

    def __init__(self, store: ArtifactStore, own: ContentEncoder, receiver: FarReceiver, address: Address) -> None:
        self.store, self.own, self.receiver, self.address = store, own, receiver, address
        self.metrics = SenderMetrics("tiny", {"kvferry": "1", "device": "cpu"})
        self.start()

    def start(self, seconds: float = 10.0) -> None:
        self.tokenizers = Tokenizers(self.own, self.store, seconds, self.metrics)

    async def ask(self) -> Counter:
        return await self.tokenizers.of(self.address, PLAINTEXT)

    def counted(self) -> float:
        samples = (
            self.metrics.registry.get_sample_value(f"kvferry_{way}_bytes_total", {"kind": "tokenizer"})
            for way in ("sent", "received")
        )
        return sum(sample or 0.0 for sample in samples)


@pytest.fixture
async def asking(store: ArtifactStore, own: ContentEncoder) -> AsyncIterator[Asking]:
    receiver, server = FarReceiver(), grpc.aio.server()
    pb_grpc.add_ReceiverServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield Asking(store, own, receiver, Address("127.0.0.1", port))
    await server.stop(0)


async def test_the_same_tokenizer_does_not_come(asking: Asking, own: ContentEncoder) -> None:
    asking.receiver.has = own.description
    counter = await asking.ask()
    assert counter.encoder is own
    assert asking.receiver.asked == [[own.vocab]]
    assert counter.bytes == asking.receiver.crossed == asking.counted() < 100
    assert counter.ms > 0


async def test_another_one_comes_once_and_encodes_as_there(asking: Asking, own: ContentEncoder) -> None:
    counter = await asking.ask()
    assert counter.encoder.encode("abba") == ContentEncoder(asking.receiver.has).encode("abba") == [2, 1, 0]
    assert counter.encoder.description == asking.receiver.has
    assert counter.bytes == asking.receiver.crossed == asking.counted()
    again = await asking.ask()
    assert again.encoder is counter.encoder
    assert set(asking.receiver.asked[1]) == {own.vocab, blake3(asking.receiver.has).digest()}
    assert again.bytes < counter.bytes
    assert asking.receiver.crossed == asking.counted() == counter.bytes + again.bytes


async def test_it_is_still_there_after_a_restart(asking: Asking) -> None:
    first = await asking.ask()
    asking.start()
    again = await asking.ask()
    assert again.encoder is not first.encoder
    assert again.encoder.description == asking.receiver.has
    assert again.bytes < 200 < first.bytes


async def test_a_receiver_with_another_model_is_noticed(asking: Asking) -> None:
    await asking.ask()
    asking.receiver.has = description("xy")
    assert (await asking.ask()).encoder.encode("xy") == [2]


@pytest.mark.parametrize("damage", [b"", b"{}", description("xy")])
async def test_a_damaged_copy_is_asked_for_again_and_mended(
    asking: Asking, store: ArtifactStore, damage: bytes
) -> None:
    await asking.ask()
    path = store.root / "tokenizers" / f"{blake3(asking.receiver.has).hexdigest()}.json"
    assert path.read_bytes() == asking.receiver.has
    path.write_bytes(damage)
    asking.start()
    counter = await asking.ask()
    assert counter.encoder.description == asking.receiver.has == path.read_bytes()
    assert len(asking.receiver.asked) == 3
    assert asking.receiver.crossed == asking.counted()


async def test_a_disk_that_keeps_nothing_costs_only_asking_again(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (StoreError("disk full"), TooLargeError("over the budget")):

        def refuse(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(StoreFiles, "write", refuse)
        asking.start()
        assert (await asking.ask()).encoder.description == asking.receiver.has
    assert len(asking.receiver.asked) == 2


async def test_memory_holds_a_few(asking: Asking) -> None:
    letters = [chr(ord("a") + number) for number in range(MAX_LOADED + 3)]
    for letter in letters:
        asking.receiver.has = description(letter)
        await asking.ask()
    assert len(asking.tokenizers._loaded) == MAX_LOADED
    # All the others are on disk.
    assert len(asking.receiver.asked[-1]) == len(letters)
    asking.receiver.has = description(letters[0])
    await asking.ask()
    assert blake3(asking.receiver.has).digest() in asking.receiver.asked[-1]


async def test_no_more_are_named_than_a_receiver_takes_and_these_were_used_last(
    asking: Asking, own: ContentEncoder
) -> None:
    files = asking.store.files("tokenizers", ".json")
    keys = [blake3(str(number).encode()).digest() for number in range(limits.MAX_TOKENIZERS_KNOWN + 5)]
    for number, key in enumerate(keys):
        files.write(key, b"{}")
        os.utime(files.path(key), (1000 + number, 1000 + number))
    await asking.ask()
    assert asking.receiver.asked[0] == [own.vocab, *keys[:5:-1]]
    await asking.ask()
    assert asking.receiver.asked[1][:3] == [own.vocab, blake3(GOOD).digest(), keys[-1]]


async def test_a_folder_that_is_gone_costs_only_asking_again(asking: Asking, own: ContentEncoder) -> None:
    shutil.rmtree(asking.store.root / "tokenizers")
    assert (await asking.ask()).encoder.description == GOOD
    asking.receiver.has = own.description
    assert (await asking.ask()).encoder is own
    asking.start()


async def test_a_file_that_cannot_be_read_now_is_kept(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    await asking.ask()
    path = asking.store.root / "tokenizers" / f"{blake3(GOOD).hexdigest()}.json"
    asking.start()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", lambda _: (_ for _ in ()).throw(OSError(errno.EMFILE, "too many")))
        patched.setattr(StoreFiles, "write", lambda *_: (_ for _ in ()).throw(StoreError("too many")))
        assert (await asking.ask()).encoder.description == GOOD
    assert path.read_bytes() == GOOD


async def test_a_receiver_that_is_just_starting_is_asked_again(asking: Asking) -> None:
    asking.receiver.refusals = 2
    counter = await asking.ask()
    assert counter.encoder.description == asking.receiver.has
    assert len(asking.receiver.asked) == 3
    # What was asked in vain crossed as well.
    assert counter.bytes == asking.receiver.crossed == asking.counted()


async def test_a_silent_receiver_ends_the_call(asking: Asking) -> None:
    asking.receiver.silent = True
    asking.start(0.05)
    with pytest.raises(DeadlineError, match="nothing of Tokenizer came for 0.05 s"):
        await asking.ask()


async def test_a_receiver_without_the_call_is_named(asking: Asking) -> None:
    asking.receiver.refuses, asking.receiver.refusals = grpc.StatusCode.UNIMPLEMENTED, 9
    with pytest.raises(PeerError, match=f"^{asking.address}: Tokenizer failed with UNIMPLEMENTED"):
        await asking.ask()
    assert len(asking.receiver.asked) == 1


async def test_a_closed_door_is_about_the_senders_own_token(asking: Asking) -> None:
    asking.receiver.refuses, asking.receiver.refusals = grpc.StatusCode.UNAUTHENTICATED, 9
    with pytest.raises(AuthenticationError, match="the sender's own token_file"):
        await asking.ask()
    assert len(asking.receiver.asked) == 1


def answered(**fields: Any) -> Callable[[], list[pb.TokenizerResponse]]:
    return lambda: [pb.TokenizerResponse(**fields)]


def frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=True).compress(data)


GOOD = description()
PADS = GOOD.replace(b'"post_processor"', b'"padding":null,"post_processor"')
DIGEST = blake3(GOOD).digest()
NONSENSE = {
    "nothing at all": (list, "a digest of 0 bytes, expected 32"),
    "no digest": (answered(length=len(GOOD), data=frame(GOOD)), "a digest of 0 bytes, expected 32"),
    "a long digest": (answered(digest=bytes(4000)), "a digest of 4000 bytes, expected 32"),
    "one that is not known here": (answered(digest=DIGEST), "did not come, and is not known here"),
    "another digest": (answered(digest=bytes(32), length=len(GOOD), data=frame(GOOD)), "announced 0000000000000000…"),
    "no frame": (answered(digest=DIGEST, length=len(GOOD), data=GOOD), "error when determining content size"),
    "half a frame": (
        answered(digest=DIGEST, length=len(GOOD), data=frame(GOOD)[:-9]),
        "tokenizer: decompression error",
    ),
    "another length": (
        answered(digest=DIGEST, length=len(GOOD) + 1, data=frame(GOOD)),
        f"{len(GOOD) + 1} are announced",
    ),
    "a bomb": (
        answered(digest=DIGEST, length=2**40, data=frame(bytes(MIB))),
        f"tokenizer: {2**40} bytes, the limit is {limits.MAX_TOKENIZER_BYTES}",
    ),
    "a bomb that says nothing": (answered(digest=DIGEST, length=10, data=frame(bytes(MIB))), "10 are announced"),
    "a long frame": (
        answered(digest=DIGEST, length=len(GOOD), data=frame(GOOD) + bytes(2000)),
        "tokenizer: a frame of ",
    ),
    "no tokenizer": (
        answered(digest=blake3(b"[{},[]]").digest(), length=7, data=frame(b"[{},[]]")),
        "tokenizer: its description is not one",
    ),
    "one that pads": (
        answered(digest=blake3(PADS).digest(), length=len(PADS), data=frame(PADS)),
        "unknown field `padding`",
    ),
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_nonsense_is_one_error_that_names_the_receiver(asking: Asking, name: str) -> None:
    asking.receiver.messages, reason = NONSENSE[name]
    with pytest.raises(PeerError) as caught:
        await asking.ask()
    assert reason in caught.value.message
    assert caught.value.message.startswith(f"{asking.address}: ")
    assert caught.value.fields["peer"] == str(asking.address)
    asking.receiver.messages = None
    assert (await asking.ask()).encoder.description == GOOD


async def test_an_endless_answer_is_cut(asking: Asking) -> None:
    endless = [pb.TokenizerResponse(digest=DIGEST, length=3 * MIB, data=bytes(MIB))] * 50
    asking.receiver.messages = lambda: endless
    with pytest.raises(PeerError, match=f"tokenizer: a frame of {4 * MIB} bytes, the limit is"):
        await asking.ask()
    assert asking.counted() < 5 * MIB


async def test_an_answer_that_drips_for_ever_is_cut(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "SLOWEST_BYTES_PER_SECOND", len(GOOD) / 0.1)
    asking.receiver.messages = lambda: [pb.TokenizerResponse(digest=DIGEST, length=len(GOOD), data=b"x")] * 500
    asking.receiver.pause = 0.05
    asking.start(0.2)
    with pytest.raises(PeerError, match=f"a tokenizer of {len(GOOD)} bytes did not come within 0.3 s") as caught:
        await asking.ask()
    # None of them was late for itself, and whoever is that slow is not asked again.
    assert asking.receiver.said > 2
    assert len(asking.receiver.asked) == 1
    assert not caught.value.retryable


async def test_sends_at_the_same_time_share_one_answer(asking: Asking) -> None:
    asking.receiver.pause = 0.05
    counters = await asyncio.gather(*(asking.ask() for _ in range(8)))
    assert len(asking.receiver.asked) == 1
    assert len({id(counter.encoder) for counter in counters}) == 1
    assert sum(counter.bytes for counter in counters) == asking.receiver.crossed == asking.counted()
    assert all(counter.ms >= 50 for counter in counters)
    again = await asking.ask()
    assert len(asking.receiver.asked) == 2
    assert again.encoder is counters[0].encoder


async def test_sends_at_the_same_time_share_one_failure(asking: Asking) -> None:
    asking.receiver.messages = list
    failures = await asyncio.gather(*(asking.ask() for _ in range(3)), return_exceptions=True)
    assert len(asking.receiver.asked) == 1
    assert all(isinstance(failure, PeerError) for failure in failures)
    asking.receiver.messages = None
    assert (await asking.ask()).encoder.description == GOOD


async def test_one_that_gives_up_leaves_the_answer_to_the_others(asking: Asking) -> None:
    asking.receiver.pause = 0.05
    first, second = (asyncio.create_task(asking.ask()) for _ in range(2))
    await asyncio.wait_for(asking.receiver.called.wait(), 10)
    first.cancel()
    counter = await second
    assert first.cancelled()
    assert len(asking.receiver.asked) == 1
    assert counter.bytes == asking.receiver.crossed == asking.counted()


async def test_a_call_that_nobody_waits_for_ends(asking: Asking) -> None:
    asking.receiver.silent = True
    waiting = [asyncio.create_task(asking.ask()) for _ in range(2)]
    await asyncio.wait_for(asking.receiver.called.wait(), 10)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await asyncio.wait_for(asking.receiver.left.wait(), 10)
    asking.receiver.silent = False
    assert (await asking.ask()).encoder.description == GOOD


@dataclass
class Building:
    """Builds slowly. ``most`` were built at the same time."""

    begun: threading.Event = field(default_factory=threading.Event)
    running: int = 0
    most: int = 0
    times: int = 0

    def __call__(self, receiver: Address, data: bytes) -> ContentEncoder:
        self.begun.set()
        self.running += 1
        self.times += 1
        self.most = max(self.most, self.running)
        time.sleep(0.05)
        self.running -= 1
        return ContentEncoder(data)


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch) -> Building:
    slow = Building()
    monkeypatch.setattr(tokenizers, "_build", slow)
    return slow


async def test_tokenizers_are_built_one_at_a_time(asking: Asking, building: Building) -> None:
    other = Address("localhost", asking.address.port)
    first, second = await asyncio.gather(asking.ask(), asking.tokenizers.of(other, PLAINTEXT))
    assert len(asking.receiver.asked) == 2
    # Both came, and one was built.
    assert (building.most, building.times) == (1, 1)
    assert first.encoder is second.encoder


async def test_one_that_is_built_for_nobody_any_more_is_built_before_the_next(
    asking: Asking, building: Building
) -> None:
    for number in range(4):
        asking.receiver.has = description("abcd"[: number + 1])
        building.begun.clear()
        given_up = asyncio.create_task(asking.ask())
        await asyncio.to_thread(building.begun.wait, 10)
        given_up.cancel()
        await asyncio.wait([given_up])
    asking.receiver.has = description("xyz")
    assert (await asking.ask()).encoder.description == description("xyz")
    assert building.most == 1


async def test_one_at_hand_does_not_wait_for_another_that_is_built(asking: Asking, building: Building) -> None:
    known = await asking.ask()
    building.begun.clear()
    asking.receiver.has = description("xyz")
    slow = asyncio.create_task(asking.tokenizers.of(Address("localhost", asking.address.port), PLAINTEXT))
    await asyncio.to_thread(building.begun.wait, 10)
    asking.receiver.has = GOOD
    assert (await asking.ask()).encoder is known.encoder
    assert building.running == 1
    assert (await slow).encoder.description == description("xyz")


async def test_an_answer_that_says_nothing_for_ever_is_cut(asking: Asking) -> None:
    asking.receiver.messages = lambda: [pb.TokenizerResponse(digest=DIGEST), *[pb.TokenizerResponse()] * 50]
    with pytest.raises(PeerError, match=f"^{asking.address}: tokenizer: a message without data"):
        await asking.ask()
    assert asking.counted() < 100
