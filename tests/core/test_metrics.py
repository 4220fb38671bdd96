"""Counting: labels that stay few, calls by how they end, a page on its own threads, a document that is complete."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from prometheus_client import CollectorRegistry, Gauge

from kvferry.core import config
from kvferry.core.addresses import Address
from kvferry.core.compat import Reason, ReasonCode, Verdict
from kvferry.core.config import ReceiverConfig, SenderConfig
from kvferry.core.errors import ConfigError
from kvferry.core.ledger import Ledger, Lookups, Milliseconds, Rows, SenderAccount, Tokens
from kvferry.core.metrics import BoundedLabel, NodeMetrics, ReceiverMetrics, SenderMetrics
from kvferry.core.metrics_server import MetricsServer
from kvferry.core.rpc_metrics import MetricsInterceptor
from kvferry.core.store import ArtifactStore

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
VERSIONS = {"kvferry": "1.2.3", "device": "cpu"}
LOOPBACK = Address("127.0.0.1", 0)
SERVICE = "kvferry.test.CountedService"


def node() -> NodeMetrics:
    return NodeMetrics("sender", "tiny", VERSIONS)


def value(metrics: NodeMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


def ledger(method: str = "B1", *, lookups: int = 0, first_token: float | None = 30.0, reused: int = 100) -> Ledger:
    return Ledger(
        artifact_id="00",
        method=method,
        form="kv",
        verdict="accepted",
        fallback=None,
        fallback_reason=None,
        manifest_bytes=10,
        payload_bytes=20,
        resent_bytes=0,
        control_bytes=5,
        lookups=Lookups(count=1, calls=1, bytes=lookups, text_bytes=lookups // 2, ms=2.0, hit=True),
        wire_bytes=35,
        dense_bf16_bytes=70,
        ratio=2.0,
        tokens=Tokens(sender_prefill=9, receiver_prefill=7, reused=reused, generated=3, material=5),
        ms=Milliseconds(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, first_token, 250.0),
        rows=Rows(1, 1.0, 1),
        parity=None,
        resident_bytes=1,
        finish_reason="stop",
        prompt_version=1,
        system="00",
        runtime={},
    )


# Labels and meaning


def test_a_label_takes_64_values_and_calls_the_rest_other() -> None:
    label = BoundedLabel()
    values = [f"M{index}" for index in range(70)]
    assert [label(item) for item in values] == values[:64] + ["other"] * 6
    assert label("M5") == "M5"


@pytest.mark.parametrize("odd", ["", "x" * 33, 'a"b', "a b", "ä", "a\n"])
def test_a_label_that_a_peer_made_up_is_other(odd: str) -> None:
    label = BoundedLabel()
    assert label(odd) == "other"
    assert label("B1") == "B1"


def test_two_daemons_in_one_process_share_nothing() -> None:
    one, other = SenderMetrics("a", VERSIONS), ReceiverMetrics("b", VERSIONS)
    one.sent("payload", 5)
    assert value(one, "kvferry_sent_bytes_total", kind="payload") == 5
    assert value(other, "kvferry_sent_bytes_total", kind="payload") == 0
    labels = {"role": "receiver", "model": "b", "version": "1.2.3", "device": "cpu"}
    assert value(other, "kvferry_node_info", **labels) == 1


def test_an_answer_counts_by_its_ledger() -> None:
    metrics = ReceiverMetrics("tiny", VERSIONS)
    metrics.answered(ledger())
    metrics.answered(
        msgspec.structs.replace(ledger("odd method", first_token=None, reused=1), fallback="fallback_reprefill")
    )
    assert value(metrics, "kvferry_fallbacks_total", fallback="fallback_reprefill") == 1
    assert value(metrics, "kvferry_asks_total", method="B1", finish_reason="stop") == 1
    assert value(metrics, "kvferry_asks_total", method="other", finish_reason="stop") == 1
    assert value(metrics, "kvferry_tokens_total", kind="prefill") == 14
    assert value(metrics, "kvferry_tokens_total", kind="reused") == 101
    assert value(metrics, "kvferry_first_token_seconds_sum") == pytest.approx(0.030)
    assert value(metrics, "kvferry_first_token_seconds_count") == 1
    assert value(metrics, "kvferry_answer_seconds_sum") == pytest.approx(0.5)
    assert value(metrics, "kvferry_reconstruct_seconds_count") == 2
    assert value(metrics, "kvferry_prefill_seconds_count") == 0


def test_a_look_up_counts_when_it_is_made_and_not_with_its_answer() -> None:
    metrics = ReceiverMetrics("tiny", VERSIONS)
    metrics.answered(ledger(lookups=40))
    assert value(metrics, "kvferry_received_bytes_total", kind="lookups") == 0
    metrics.looked_up("fetched", sent=90, received=1400, seconds=0.5)
    metrics.looked_up("failed", sent=90, seconds=1.5)
    metrics.looked_up("no_hit")
    assert value(metrics, "kvferry_received_bytes_total", kind="lookups") == 1400
    assert value(metrics, "kvferry_sent_bytes_total", kind="lookups") == 180
    outcomes = ("fetched", "no_hit", "failed", "cancelled")
    assert [value(metrics, "kvferry_lookups_total", outcome=item) for item in outcomes] == [1, 1, 1, 0]
    assert value(metrics, "kvferry_lookup_seconds_count") == 2
    assert value(metrics, "kvferry_lookup_seconds_sum") == pytest.approx(2.0)


def test_a_refusal_counts_each_code_once() -> None:
    metrics = ReceiverMetrics("tiny", VERSIONS)
    reasons = [(ReasonCode.ROPE_MISMATCH, "a"), (ReasonCode.ROPE_MISMATCH, "b"), (ReasonCode.TOO_LARGE, "c")]
    metrics.judged(Verdict(tuple(Reason(code, name, "1", "2") for code, name in reasons)), committed=False)
    metrics.judged(Verdict(), committed=False)
    metrics.judged(Verdict(), committed=True)
    assert value(metrics, "kvferry_artifacts_refused_total", code="ROPE_MISMATCH") == 1
    assert value(metrics, "kvferry_artifacts_refused_total", code="TOO_LARGE") == 1
    assert [value(metrics, "kvferry_offers_total", verdict=word) for word in ("refused", "accepted", "held")] == [1] * 3


def test_a_text_artifact_reads_nothing_and_a_held_one_moves_nothing() -> None:
    metrics = SenderMetrics("tiny", VERSIONS)
    metrics.made(SenderAccount(0, 100, prefill_ms=0.0, method_ms=2.0, encode_ms=4.0, transfer_ms=0.0))
    metrics.delivered("A1", 500.0)
    metrics.delivered("A1", None)
    assert value(metrics, "kvferry_prefill_seconds_count") == 0
    assert value(metrics, "kvferry_encode_seconds_sum") == pytest.approx(0.004)
    assert value(metrics, "kvferry_transfer_seconds_sum") == pytest.approx(0.5)
    assert value(metrics, "kvferry_transfer_seconds_count") == 1
    assert value(metrics, "kvferry_sends_total", method="A1", outcome="held") == 1


def test_what_others_keep_count_of_is_read_with_the_page() -> None:
    metrics, state = node(), {"resident": 7, "evicted": 2, "depth": 3}
    metrics.watch_engine(lambda: state["resident"], lambda: state["evicted"], lambda: state["depth"])
    metrics.watch_speed(lambda: state["resident"] * 10)
    state.update(resident=8, evicted=4, depth=0)
    assert value(metrics, "kvferry_prefill_tokens_per_second") == 80
    assert value(metrics, "kvferry_resident_bytes") == 8
    assert value(metrics, "kvferry_caches_evicted_total") == 4
    assert value(metrics, "kvferry_worker_queue_depth") == 0


def test_a_file_with_holes_counts_as_what_it_takes_on_disk(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    metrics = node()
    metrics.watch_store(store)
    assert value(metrics, "kvferry_store_bytes", area="partial") == 0
    folder = tmp_path / "partial" / "x"
    folder.mkdir()
    with (folder / "payload").open("wb") as file:
        file.write(b"\x01" * 8192)
        file.truncate(50_000_000)
    assert 8192 <= value(metrics, "kvferry_store_bytes", area="partial") < 1_000_000
    assert value(metrics, "kvferry_artifacts_stored") == 0
    store.close()


def test_what_the_store_lets_go_or_puts_aside_is_counted(tmp_path: Path) -> None:
    store, metrics = ArtifactStore(tmp_path), node()
    metrics.watch_store(store)
    damaged, begun = bytes([1]) * 32, bytes([2]) * 32
    for folder, artifact_id in (("artifacts", damaged), ("partial", begun)):
        path = tmp_path / folder / artifact_id.hex()
        path.mkdir()
        (path / "payload").write_bytes(bytes(5000))
    assert value(metrics, "kvferry_artifacts_stored") == 1
    store.quarantine(damaged, "looked wrong")
    assert value(metrics, "kvferry_artifacts_quarantined_total") == 1
    assert value(metrics, "kvferry_artifacts_stored") == 0
    assert value(metrics, "kvferry_store_bytes", area="quarantine") >= 5000
    assert value(metrics, "kvferry_artifacts_evicted_total") == 0
    store.close()
    again, other = ArtifactStore(tmp_path, ttl_seconds=1e-9), node()
    other.watch_store(again)
    assert value(other, "kvferry_artifacts_stored") == 0
    assert value(other, "kvferry_artifacts_evicted_total") == 2
    again.close()


def test_the_document_lists_every_metric_and_no_other(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    exist: set[str] = set()
    for metrics in (SenderMetrics("tiny", VERSIONS), ReceiverMetrics("tiny", VERSIONS)):
        metrics.watch_store(store)
        metrics.watch_engine(lambda: 0, lambda: 0, lambda: 0)
        metrics.watch_speed(lambda: 0.0)
        families = list(metrics.registry.collect())
        exist |= {family.name + ("_total" if family.type == "counter" else "") for family in families}
        assert all(family.documentation for family in families)
    store.close()
    described = set(re.findall(r"`(kvferry_[a-z_]+|process_[a-z_]+)`", DOCUMENT.read_text("utf-8")))
    ours = {name for name in exist if name.startswith("kvferry_")}
    assert {name for name in described if name.startswith("kvferry_")} == ours
    assert {name for name in exist if name.startswith("process_")} <= described
    for name in ours:
        assert re.fullmatch(r"kvferry_[a-z]+(_[a-z]+)*", name)
        units = ("_total", "_seconds", "_bytes", "_per_second", "_in_flight", "_stored", "_depth", "_info")
        assert name.endswith(units), name


# Calls


@contextlib.asynccontextmanager
async def counted(metrics: NodeMetrics, **handlers: Any) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[MetricsInterceptor(metrics)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


async def call(channel: grpc.aio.Channel, name: str, seconds: float = 10.0) -> grpc.StatusCode:
    try:
        await channel.unary_unary(f"/{SERVICE}/{name}")(b"x", timeout=seconds)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def eventually(read: Any, wanted: Any) -> None:
    async with asyncio.timeout(10):
        while read() != wanted:  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0.005)


async def test_calls_are_counted_by_how_they_end() -> None:
    async def fine(request: bytes, _: Any) -> bytes:
        return request

    async def aborting(_: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.DATA_LOSS, "damaged")
        return b""

    async def setting(request: bytes, context: Any) -> bytes:
        context.set_code(grpc.StatusCode.ABORTED)
        return request

    async def broken(_: bytes, __: Any) -> bytes:
        raise ZeroDivisionError

    metrics = node()
    unary = grpc.unary_unary_rpc_method_handler
    handlers = {"Fine": fine, "Aborting": aborting, "Setting": setting, "Broken": broken}
    async with counted(metrics, **{name: unary(handler) for name, handler in handlers.items()}) as channel:
        seen = {name: await call(channel, name) for name in [*handlers, "Nowhere", "Elsewhere"]}
    assert seen == {
        "Fine": grpc.StatusCode.OK,
        "Aborting": grpc.StatusCode.DATA_LOSS,
        "Setting": grpc.StatusCode.ABORTED,
        "Broken": grpc.StatusCode.UNKNOWN,
        "Nowhere": grpc.StatusCode.UNIMPLEMENTED,
        "Elsewhere": grpc.StatusCode.UNIMPLEMENTED,
    }
    for name in handlers:
        assert value(metrics, "kvferry_rpcs_total", rpc=f"{SERVICE}/{name}", code=seen[name].name) == 1
        assert value(metrics, "kvferry_rpcs_in_flight", rpc=f"{SERVICE}/{name}") == 0
    # The names of calls that do not exist are the caller's, and there is no end of them.
    assert value(metrics, "kvferry_rpcs_total", rpc="other", code="UNIMPLEMENTED") == 2


async def test_a_caller_who_leaves_or_gives_up_ends_the_handler_and_is_counted() -> None:
    ended: list[str] = []

    async def endless(request: bytes, _: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield request
                await asyncio.sleep(0.01)
        finally:
            ended.append("stream")

    async def waiting(_: bytes, __: Any) -> bytes:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("single")
        return b""

    metrics = node()
    handlers = {
        "Endless": grpc.unary_stream_rpc_method_handler(endless),
        "Waiting": grpc.unary_unary_rpc_method_handler(waiting),
    }
    stream_name, single_name = f"{SERVICE}/Endless", f"{SERVICE}/Waiting"
    async with counted(metrics, **handlers) as channel:
        stream = channel.unary_stream(f"/{stream_name}")(b"x")
        assert await stream.read() == b"x"
        assert value(metrics, "kvferry_rpcs_in_flight", rpc=stream_name) == 1
        stream.cancel()
        assert await call(channel, "Waiting", seconds=0.2) == grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: sorted(ended), ["single", "stream"])
        await eventually(lambda: value(metrics, "kvferry_rpcs_total", rpc=stream_name, code="CANCELLED"), 1)
        await eventually(lambda: value(metrics, "kvferry_rpcs_total", rpc=single_name, code="DEADLINE_EXCEEDED"), 1)
    assert value(metrics, "kvferry_rpcs_in_flight", rpc=stream_name) == 0
    assert value(metrics, "kvferry_rpc_seconds_sum", rpc=single_name) >= 0.15


# The page


def fetch(address: Address, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
        return str(response.read().decode())


@contextlib.contextmanager
def served(registry: CollectorRegistry) -> Any:
    server = MetricsServer(registry, LOOPBACK)
    try:
        yield server.address
    finally:
        server.close()


def test_the_page_is_at_metrics_and_nowhere_else() -> None:
    metrics = node()
    metrics.received("payload", 12)
    with served(metrics.registry) as address:
        assert 'kvferry_received_bytes_total{kind="payload"} 12.0' in fetch(address)
        assert "kvferry_node_info" in fetch(address, "/metrics?name=x")
        with pytest.raises(urllib.error.HTTPError, match="404") as caught:
            fetch(address, "/")
        assert b"/metrics" in caught.value.read()
    with pytest.raises(OSError, match="refused"):
        fetch(address)


def test_a_scraper_that_says_nothing_holds_nobody_up() -> None:
    with served(node().registry) as address, socket.create_connection((address.host, address.port), timeout=10):
        started = time.monotonic()
        assert "kvferry_node_info" in fetch(address)
        assert time.monotonic() - started < 5


async def test_a_slow_page_does_not_stop_the_event_loop() -> None:
    registry, entered, release = CollectorRegistry(), threading.Event(), threading.Event()

    def read() -> float:
        entered.set()
        release.wait(10)
        return 1.0

    Gauge("slow", "Waits.", registry=registry).set_function(read)
    with served(registry) as address:
        page = asyncio.create_task(asyncio.to_thread(fetch, address))
        await eventually(entered.is_set, wanted=True)
        assert not page.done()
        release.set()
        assert "slow 1.0" in await page


def test_a_port_in_use_is_one_clear_error() -> None:
    with served(node().registry) as address, pytest.raises(ConfigError, match=f"^metrics: {address} cannot be bound"):
        MetricsServer(CollectorRegistry(), address)


@pytest.mark.parametrize("kind", [SenderConfig, ReceiverConfig])
@pytest.mark.parametrize("address", ["0.0.0.0:7421", "[::]:0", "mac.local:7421"])
def test_a_page_that_others_reach_needs_the_word_insecure(kind: type[SenderConfig], address: str) -> None:
    with pytest.raises(ConfigError, match=f"^metrics: {re.escape(address)} can be reached.*insecure"):
        config.load(kind, None, {}, {"metrics": address})
    assert config.load(kind, None, {}, {"metrics": address, "insecure": True}).metrics == address


def test_the_page_is_off_unless_an_address_is_given() -> None:
    assert SenderConfig().metrics == ReceiverConfig().metrics == ""
    assert config.load(SenderConfig, None, {"KVFERRY_SENDER_METRICS": "127.0.0.1:0"}).metrics == "127.0.0.1:0"
    with pytest.raises(ConfigError, match="^metrics: 'nowhere' is not host:port"):
        config.load(SenderConfig, None, {}, {"metrics": "nowhere"})
    assert msgspec.structs.replace(SenderConfig(), metrics="127.0.0.1:1").metrics == "127.0.0.1:1"
