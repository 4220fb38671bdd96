"""What a daemon counts for Prometheus. docs/metrics.md lists every metric.

Each daemon has a registry of its own. Labels take few values: anything that a peer may choose freely goes through
``BoundedLabel``. Counters of bytes and tokens are those of the ledger, summed over answers and transfers.
"""

from __future__ import annotations

import contextlib
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry.core.compat import Verdict
from kvferry.core.ledger import Ledger, SenderAccount
from kvferry.core.store import ArtifactStore
from kvferry.core.store_directory import disk_bytes
from kvferry.core.stored import Stored

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
OTHER = "other"
_MAX_LABEL_VALUES = 64
_LABEL_VALUE = re.compile(r"[A-Za-z0-9_.-]{1,32}")
# getrusage counts bytes on macOS and kibibytes elsewhere.
_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024


class BoundedLabel:
    """Lets the first few values of a label through, and calls every later or odd one "other". Thread-safe."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, value: str) -> str:
        """Return what to label with."""
        with self._lock:
            if value not in self._known:
                if len(self._known) >= _MAX_LABEL_VALUES or not _LABEL_VALUE.fullmatch(value):
                    return OTHER
                self._known.add(value)
        return value


class _Read(Collector):
    """A counter that somebody else keeps; it is read when the metrics are."""

    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name, self._text, self._read = name, text, read

    def collect(self) -> Iterable[Metric]:
        """Return the counter as it stands."""
        yield CounterMetricFamily(self._name, self._text, value=self._read())


class NodeMetrics:
    """What both daemons count. Thread-safe."""

    def __init__(self, role: str, model: str, versions: Mapping[str, str]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        info = {"role": role, "model": model, "version": versions["kvferry"], "device": versions["device"]}
        self.gauge("kvferry_node_info", "Always 1; the labels say what runs.", tuple(info)).labels(**info).set(1)
        peak = self.gauge("kvferry_process_peak_resident_bytes", "Most memory that the process held at once.")
        peak.set_function(lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT)
        self._in_flight = self.gauge("kvferry_rpcs_in_flight", "Calls that are being served.", ("rpc",))
        self._rpcs = self.counter("kvferry_rpcs_total", "Calls that ended, by gRPC status.", ("rpc", "code"))
        self._rpc_seconds = self.histogram("kvferry_rpc_seconds", "Duration of a call, streams included.", ("rpc",))
        self._received = self.counter("kvferry_received_bytes_total", "Bytes that came in.", ("kind",))
        self._sent = self.counter("kvferry_sent_bytes_total", "Bytes that went out.", ("kind",))
        self._tokens = self.counter("kvferry_tokens_total", "Tokens read, reused or generated.", ("kind",))
        self._prefill = self.histogram("kvferry_prefill_seconds", "The model reading a document.")

    def gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        """Add a gauge."""
        return Gauge(name, text, labels, registry=self.registry)

    def counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        """Add a counter."""
        return Counter(name, text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Histogram:
        """Add a histogram of seconds."""
        return Histogram(name, text, labels, registry=self.registry, buckets=SECONDS_BUCKETS)

    def watch_engine(
        self, resident_bytes: Callable[[], int], evicted: Callable[[], int], queue_depth: Callable[[], int]
    ) -> None:
        """Read what the engine keeps count of whenever the metrics are read."""
        self.gauge("kvferry_resident_bytes", "Caches kept at hand.").set_function(resident_bytes)
        self.gauge("kvferry_worker_queue_depth", "Steps that wait for the MLX thread.").set_function(queue_depth)
        self.registry.register(_Read("kvferry_caches_evicted_total", "Caches let go for want of room.", evicted))

    def watch_speed(self, tokens_per_second: Callable[[], float]) -> None:
        """Read the model's speed whenever the metrics are read."""
        speed = self.gauge("kvferry_prefill_tokens_per_second", "How fast the model reads, as last measured.")
        speed.set_function(tokens_per_second)

    def watch_store(self, store: ArtifactStore) -> None:
        """Look at the store whenever the metrics are read."""
        self.gauge("kvferry_artifacts_stored", "Published artifacts.").set_function(lambda: len(store.ids()))
        for name, text, read in (
            (
                "kvferry_artifacts_evicted_total",
                "Artifacts dropped for want of room or of use.",
                lambda: store.evictions,
            ),
            ("kvferry_artifacts_quarantined_total", "Artifacts put aside as damaged.", lambda: store.quarantines),
        ):
            self.registry.register(_Read(name, text, read))
        space = self.gauge("kvferry_store_bytes", "Disk space of the store.", ("area",))
        for area in store.areas:
            space.labels(area).set_function(partial(disk_bytes, store.root / area))

    def received(self, kind: str, count: int) -> None:
        """Count bytes that came in."""
        self._received.labels(kind).inc(count)

    def sent(self, kind: str, count: int) -> None:
        """Count bytes that went out."""
        self._sent.labels(kind).inc(count)

    @contextlib.contextmanager
    def serving(self, rpc: str) -> Iterator[None]:
        """Count a call as in flight for the length of the block."""
        gauge = self._in_flight.labels(rpc)
        with gauge.track_inprogress(), self._rpc_seconds.labels(rpc).time():
            yield

    def served(self, rpc: str, code: str) -> None:
        """Count a call that ended."""
        self._rpcs.labels(rpc, code).inc()

    def _read_document(self, tokens: int, milliseconds: float) -> None:
        self._tokens.labels("prefill").inc(tokens)
        if milliseconds > 0:
            self._prefill.observe(milliseconds / 1000)


class SenderMetrics(NodeMetrics):
    """What the sender counts beside."""

    def __init__(self, model: str, versions: Mapping[str, str]) -> None:
        super().__init__("sender", model, versions)
        self._sends = self.counter("kvferry_sends_total", "Sends that ended well.", ("method", "outcome"))
        self._method = self.histogram("kvferry_method_seconds", "A method at work, less prefill.")
        self._encode = self.histogram("kvferry_encode_seconds", "Writing an artifact.")
        self._transfer = self.histogram("kvferry_transfer_seconds", "From Offer to the last acknowledged chunk.")
        self._chosen = self.counter(
            "kvferry_auto_choices_total", "Sends whose method the sender chose.", ("quality", "method")
        )
        self._passed_over = self.counter(
            "kvferry_auto_passed_over_total", "Methods that a choice could not use.", ("method",)
        )

    def made(self, account: SenderAccount) -> None:
        """Count an artifact that was made, not found."""
        self._read_document(account.prefill_tokens, account.prefill_ms)
        self._method.observe(account.method_ms / 1000)
        self._encode.observe(account.encode_ms / 1000)

    def chosen(self, quality: str, method: str) -> None:
        """Count a send whose method the sender chose."""
        self._chosen.labels(quality, method).inc()

    def passed_over(self, method: str) -> None:
        """Count a method that a quality bound allows and that could not be used."""
        self._passed_over.labels(method).inc()

    def delivered(self, method: str, transfer_ms: float | None) -> None:
        """Count a send. ``transfer_ms`` is None when the receiver had the artifact already."""
        self._sends.labels(method, "held" if transfer_ms is None else "moved").inc()
        if transfer_ms is not None:
            self._transfer.observe(transfer_ms / 1000)


class ReceiverMetrics(NodeMetrics):
    """What the receiver counts beside."""

    def __init__(self, model: str, versions: Mapping[str, str]) -> None:
        super().__init__("receiver", model, versions)
        self._method_label = BoundedLabel()
        self._offers = self.counter("kvferry_offers_total", "Offers that were judged.", ("verdict",))
        self._refused = self.counter("kvferry_artifacts_refused_total", "Refused offers with this reason.", ("code",))
        self._committed = self.counter("kvferry_artifacts_committed_total", "Artifacts published.", ("form",))
        self._dropped = self.counter("kvferry_artifacts_dropped_total", "Artifacts removed on request.")
        self._damaged = self.counter(
            "kvferry_integrity_failures_total", "What is not as its manifest says.", ("stage",)
        )
        self._asks = self.counter("kvferry_asks_total", "Answers given to their end.", ("method", "finish_reason"))
        self._fallbacks = self.counter("kvferry_fallbacks_total", "Answers by another road than asked.", ("fallback",))
        self._lookups = self.counter("kvferry_lookups_total", "Look-ups, by what they came to.", ("outcome",))
        self._lookup = self.histogram("kvferry_lookup_seconds", "Fetching passages from the sender.")
        self._verify = self.histogram("kvferry_verify_seconds", "Verifying a whole payload at Commit.")
        self._reconstruct = self.histogram("kvferry_reconstruct_seconds", "Rebuilding a cache or a text.")
        self._first_token = self.histogram("kvferry_first_token_seconds", "From the question to the first text.")
        self._answer = self.histogram("kvferry_answer_seconds", "From the question to the end of the answer.")

    def judged(self, verdict: Verdict, *, committed: bool) -> None:
        """Count an offer; a reason that several fields give counts once."""
        outcome = "refused" if not verdict.accepted else "held" if committed else "accepted"
        self._offers.labels(outcome).inc()
        for code in {reason.code for reason in verdict.reasons}:
            self._refused.labels(code.value).inc()

    def committed(self, stored: Stored) -> None:
        """Count an artifact that was published."""
        self._committed.labels(stored.manifest.form).inc()
        self._verify.observe(stored.record.verify_ms / 1000)

    def dropped(self) -> None:
        """Count an artifact that was removed on request."""
        self._dropped.inc()

    def damaged(self, stage: str) -> None:
        """Count what is not as its manifest says: a "chunk", a payload at "commit", or a "stored" artifact."""
        self._damaged.labels(stage).inc()

    def looked_up(self, outcome: str, sent: int = 0, received: int = 0, seconds: float | None = None) -> None:
        """Count a look-up by its outcome: "fetched", "no_hit", "failed" or "cancelled". ``seconds`` None asked nobody.

        Bytes are those of messages, out and in.
        """
        self._lookups.labels(outcome).inc()
        self.sent("lookups", sent)
        self.received("lookups", received)
        if seconds is not None:
            self._lookup.observe(seconds)

    def answered(self, ledger: Ledger) -> None:
        """Count an answer by its ledger."""
        self._asks.labels(self._method_label(ledger.method), ledger.finish_reason).inc()
        if ledger.fallback is not None:
            self._fallbacks.labels(ledger.fallback).inc()
        self._read_document(ledger.tokens.receiver_prefill, ledger.ms.receiver_prefill)
        self._tokens.labels("reused").inc(ledger.tokens.reused)
        self._tokens.labels("generated").inc(ledger.tokens.generated)
        if ledger.ms.reconstruct > 0:
            self._reconstruct.observe(ledger.ms.reconstruct / 1000)
        if ledger.ms.first_token is not None:
            self._first_token.observe(ledger.ms.first_token / 1000)
        self._answer.observe(ledger.ms.total / 1000)
