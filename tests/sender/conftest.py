"""A sender without its service: documents in, artifacts out.

===========  =========================================================================================================
workshop     factory: an ArtifactMaker with a store, a residency and a residency budget of its own, for a model that
             is calibrated, with filters that point anywhere
calibrated   function: calibrates a model in that way, for tests that do without a workshop
drain        run a generator to its end and return its result
asked        function: what every layer of a model asks while it reads, as its rotary modules make it
text_documents  the module of tests/text_documents: documents of every kind, written and made
stored       an artifact of a few dozen chunks
road         a transfer of that artifact to a receiver that does what a test tells it to
===========  =========================================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import mlx.core as mx
import msgspec
import numpy as np
import pytest
from loading import load
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

import kvferry.engine  # noqa: F401  (a real BLAS, before MLX)
from kvferry.core import addresses, channel, rpc, wire
from kvferry.core.compat import Verdict
from kvferry.core.digests import digest
from kvferry.core.ledger import SenderAccount, account_from_json
from kvferry.core.manifest import Scalar
from kvferry.core.metrics import SenderMetrics
from kvferry.core.progress import Progress, finish
from kvferry.core.store import ArtifactStore, Stored
from kvferry.engine.backend import runtime_versions
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import DEFAULT_SYSTEM
from kvferry.engine.residency import Residency
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.proto.v1 import receiver_service_pb2_grpc as pb_grpc
from kvferry.sender import registry
from kvferry.sender.artifacts import Artifact, ArtifactMaker
from kvferry.sender.calibration import binding, folder
from kvferry.sender.calibration.qfilters_file import QFilters, Record
from kvferry.sender.reading import Reading
from kvferry.sender.transfer import Transfer

ACCOUNT = SenderAccount(10, 20, 1.0, 2.0, 3.0, 0.0)
Hook = Callable[[Any, int], Any]


@pytest.fixture(scope="session")
def drain() -> Callable[[Generator[Any, None, Any]], Any]:
    return finish


@dataclass(frozen=True)
class Workshop:
    """Everything of a sender that makes artifacts."""

    model: LoadedModel
    store: ArtifactStore
    residency: Residency
    maker: ArtifactMaker

    def reading(self, text: str, system: str = DEFAULT_SYSTEM, question: str | None = None) -> Reading:
        return Reading(self.model, self.residency, text, system, question)

    def steps(
        self, method: str, text: str, system: str = DEFAULT_SYSTEM, **parameters: Scalar
    ) -> Generator[Progress, None, Artifact]:
        found = registry.find(method)
        reading = self.reading(text, system, "What is the access code?" if found.info.aware else None)
        return self.maker.make(found, reading, registry.check_parameters(found, parameters))

    def make(self, method: str, text: str, system: str = DEFAULT_SYSTEM, **parameters: Scalar) -> Artifact:
        artifact = finish(self.steps(method, text, system, **parameters))
        assert isinstance(artifact, Artifact)
        return artifact


def calibrate(model: LoadedModel) -> None:
    """Put filters for a model where the sender looks for them, unless they are there."""
    if model.profile.unsupported:
        return
    bound = binding.describe(model.profile)
    name = digest(msgspec.json.encode(bound)).hex()
    if name not in folder.names():
        shape = (bound.layers, bound.kv_heads, bound.head_dim)
        filters = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        record = Record(1, bound, "negative", "majority", "faithful", 1, 1, 1, 0, 0, "0" * 64)
        folder.save(name, QFilters(record, filters))


@pytest.fixture(scope="session")
def text_documents() -> ModuleType:
    return load("text_documents/documents.py")


class RotaryRecorder(nn.Module):
    """Stands in a rotary module's place and keeps what goes in and what comes out."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.calls: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        before = np.array(x[0].astype(mx.float32))
        turned: mx.array = self.inner(x, *args, **kwargs)
        self.calls.append((before, np.array(turned[0].astype(mx.float32))))
        return turned


@dataclass(frozen=True)
class Asked:
    """One layer's queries [H, T, D] before and after rotation, and its keys [Hk, T, D] after it."""

    plain: np.ndarray[Any, Any]
    queries: np.ndarray[Any, Any]
    keys: np.ndarray[Any, Any]


@pytest.fixture(scope="session")
def asked() -> Callable[[Any, list[int]], list[Asked]]:
    """Return a function: ``asked(model, ids)`` gives for every layer of an mlx-lm model what its rotary module made.

    For models with more query heads than KV heads; the model is as before.
    """

    def record(model: Any, ids: list[int]) -> list[Asked]:
        recorders = [RotaryRecorder(layer.self_attn.rope) for layer in model.layers]
        for layer, recorder in zip(model.layers, recorders, strict=True):
            layer.self_attn.rope = recorder
        mx.eval(model(mx.array([ids]), cache=make_prompt_cache(model)))
        for layer, recorder in zip(model.layers, recorders, strict=True):
            layer.self_attn.rope = recorder.inner
        made = [sorted(recorder.calls, key=lambda call: len(call[0])) for recorder in recorders]
        return [Asked(*queries, keys[1]) for keys, queries in made]

    return record


@pytest.fixture(scope="session")
def calibrated() -> Callable[[LoadedModel], None]:
    """Return a function that calibrates a model, with filters that point anywhere."""
    return calibrate


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Callable[..., Workshop]]:
    """Return a factory: ``workshop(model, chunk_bytes=1024, budget=2**30, store="a name")``."""
    stores: list[ArtifactStore] = []

    def open_workshop(model: LoadedModel, *, chunk_bytes: int = 1024, budget: int = 2**30, store: str = "") -> Workshop:
        calibrate(model)
        stores.append(ArtifactStore(tmp_path / (store or f"store-{len(stores)}")))
        residency = Residency(budget)
        return Workshop(model, stores[-1], residency, ArtifactMaker(model, stores[-1], chunk_bytes, runtime_versions()))

    yield open_workshop
    for opened in stores:
        opened.close()


@pytest.fixture
def stored(workshop: Callable[..., Any], tiny_model: Callable[..., LoadedModel]) -> Stored:
    """An artifact of a few dozen chunks."""
    artifact = workshop(tiny_model("llama"), chunk_bytes=1024).make("B1", "The ferry leaves at dawn. " * 4)
    assert artifact.stored.plan.count > 20
    return artifact.stored


class FakeReceiver(pb_grpc.ReceiverServiceServicer):
    """A receiver that keeps chunks in memory and does what a test tells it to.

    ``offering``, ``taking`` and ``committing`` run before the honest part, with the call's context and its number from
    1; ``taking`` gets the index of each chunk and may return False to keep the chunk without acknowledging it.
    ``putting`` replaces the honest part of Put.
    """

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.chunks: dict[int, bytes] = {}
        self.offers = 0
        self.puts: list[list[int]] = []
        self.accounts: list[SenderAccount] = []
        self.committed = False
        self.verdict = Verdict()
        self.closed_puts = asyncio.Event()
        self.offering: Hook | None = None
        self.taking: Callable[[Any, int, int], Any] | None = None
        self.committing: Hook | None = None
        self.putting: Callable[[AsyncIterator[pb.PutRequest], Any], AsyncIterator[pb.PutResponse]] | None = None
        self.change_offer: Callable[[pb.OfferResponse], None] = lambda _: None
        self.change_receipt: Callable[[pb.Receipt], None] = lambda _: None

    @property
    def count(self) -> int:
        return self.stored.plan.count

    @property
    def sent(self) -> list[int]:
        return [index for indices in self.puts for index in indices]

    async def Offer(self, request: pb.OfferRequest, context: Any) -> pb.OfferResponse:
        self.offers += 1
        assert request.manifest == self.stored.encoded
        if self.offering:
            await self.offering(context, self.offers)
        accepted = self.verdict.accepted
        absent = [(index, index + 1) for index in range(self.count) if index not in self.chunks]
        response = pb.OfferResponse(
            artifact_id=self.stored.artifact_id,
            verdict=wire.verdict_to_message(self.verdict),
            missing=wire.ranges_to_message(absent if accepted and not self.committed else []),
            committed=self.committed,
        )
        self.change_offer(response)
        return response

    async def Put(self, request_iterator: AsyncIterator[pb.PutRequest], context: Any) -> AsyncIterator[pb.PutResponse]:
        self.puts.append([])
        try:
            async with rpc.reporting(context):
                async for response in (self.putting or self.take)(request_iterator, context):
                    yield response
        finally:
            self.closed_puts.set()

    async def take(self, requests: AsyncIterator[pb.PutRequest], context: Any) -> AsyncIterator[pb.PutResponse]:
        number = len(self.puts)
        async for request in requests:
            assert request.artifact_id == self.stored.artifact_id
            self.puts[-1].append(request.index)
            said = await self.taking(context, number, request.index) if self.taking else None
            self.stored.plan.check(request.index, request.data)
            self.chunks[request.index] = request.data
            if said is not False:
                yield pb.PutResponse(index=request.index)

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:
        self.accounts.append(account_from_json(request.account_json))
        if self.committing:
            await self.committing(context, len(self.accounts))
        assert self.committed or sorted(self.chunks) == list(range(self.count))
        self.committed = True
        receipt = pb.Receipt(
            artifact_id=self.stored.artifact_id,
            payload_bytes=self.stored.manifest.payload.length,
            payload_digest=self.stored.manifest.payload.digest,
            received_bytes=12345,
            control_bytes=678,
        )
        self.change_receipt(receipt)
        return pb.CommitResponse(receipt=receipt)


class Road:
    """One transfer to one fake receiver, and the progress that it reported."""

    def __init__(self, stored: Stored, receiver: FakeReceiver, address: str, seconds: float) -> None:
        self.receiver = receiver
        self.account = ACCOUNT
        metrics = SenderMetrics("tiny", {"kvferry": "0", "device": "cpu"})
        self.transfer = Transfer(stored, ACCOUNT, addresses.parse(address, "receiver"), seconds, metrics)
        self.progress: list[Progress] = []

    def hasty(self, seconds: float = 0.15) -> None:
        """Wait no longer than this for a call or an acknowledgement."""
        self.transfer._seconds = seconds

    def arrived(self) -> bytes:
        """Return the payload as the receiver has it."""
        return b"".join(self.receiver.chunks[index] for index in range(self.receiver.count))

    async def drive(self) -> None:
        async with asyncio.timeout(60), contextlib.aclosing(self.transfer.run()) as steps:
            async for step in steps:
                self.progress.append(step)


@pytest.fixture
async def road(stored: Stored) -> AsyncIterator[Road]:
    receiver = FakeReceiver(stored)
    server = grpc.aio.server(options=channel.server_options())
    pb_grpc.add_ReceiverServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield Road(stored, receiver, f"127.0.0.1:{port}", 10.0)
    await server.stop(None)
