"""How soon the first token comes: from a crossed cache, from the text, from mlx-lm's own file, and the floor.

The floor is one forward of the question on a cache that is already in place, in this process. Arms take turns; a row is
the median of its turns, and ``ratio`` compares it with the floor's median at the same length.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from kvferry.cli import processes
from kvferry.cli.demo import bundled
from kvferry.client import Client, SendReport
from kvferry.core.errors import PeerError
from kvferry.core.progress import finish
from kvferry.engine import model_store
from kvferry.engine.cache import PrefixCache
from kvferry.engine.generate import Sampling, last_logits
from kvferry.engine.model import LoadedModel, load

LENGTHS = (256, 512, 1024)
QUESTION = "What is the access code of the north warehouse?"


@dataclass(frozen=True)
class Row:
    """One arm at one prefix length.

    Attributes:
        arm: "floor": cache in place, no daemon; "crossed_warm" and "crossed_cold": asked over gRPC, the cache at hand
            or on disk; "mlx_lm_file": ``load_prompt_cache`` in this process; "text": asked over gRPC, A1.
        ttft_ms: from the question to the first token, seen from here; median over the turns.
        ratio: to the floor's median.
    """

    prefix_tokens: int
    arm: str
    ttft_ms: float
    ratio: float


@dataclass(frozen=True)
class _Bench:
    model: LoadedModel
    client: Client
    folder: Path


def run(model: str, lengths: Sequence[int], turns: int, advance: Callable[[str, float], None]) -> list[Row]:
    """Measure every arm at every length.

    Args:
        model: what both daemons and this process load.
        lengths: prefix lengths in tokens.
        turns: measurements an arm.
        advance: told what happens and which share of the whole is done.

    Raises:
        KvferryError: when a daemon does not start or a call fails.
    """
    rows: list[Row] = []
    loaded = load(str(model_store.resolve(model)))
    with (
        tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder,
        processes.pair(model, Path(folder, "warm")) as (sender, receiver),
        Client(sender=sender, receiver=receiver) as client,
    ):
        bench = _Bench(loaded, client, Path(folder))
        for number, length in enumerate(lengths):
            advance(f"{length} tokens", number / len(lengths))
            rows += _measure(bench, length, turns, sender, model)
    return rows


def _measure(bench: _Bench, length: int, turns: int, sender: str, model: str) -> list[Row]:
    text = document(bench.model, length)
    ids = bench.model.prompt.prefix(text)
    prefix, file = _local_caches(bench, ids)
    carried = bench.client.send(text=text, method="B1")
    plain = bench.client.send(text=text, method="A1")
    # A receiver without memory for caches starts every question from the disk.
    with (
        tempfile.TemporaryDirectory(dir=bench.folder) as folder,
        processes.running("receiver", {"model": model, "store": folder, "cache-bytes": "0"}) as cold_receiver,
        Client(sender=sender, receiver=cold_receiver) as cold_client,
    ):
        cold = cold_client.send(text=text, method="B1")
        arms: dict[str, Callable[[], float]] = {
            "floor": lambda: _time_local(bench.model, prefix),
            "crossed_warm": lambda: _time_asked(carried),
            "crossed_cold": lambda: _time_asked(cold),
            "mlx_lm_file": lambda: _time_file(bench.model, file),
            "text": lambda: _time_asked(plain),
        }
        for measure in arms.values():
            measure()
        seen: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(turns):
            for name, measure in arms.items():
                seen[name].append(measure())
    floor = statistics.median(seen["floor"])
    return [
        Row(len(ids), name, statistics.median(values), statistics.median(values) / floor)
        for name, values in seen.items()
    ]


def document(model: LoadedModel, length: int) -> str:
    """Return the start of the bundled document, repeated as needed, whose prefix has about ``length`` tokens."""
    text = bundled()[0]
    while len(model.prompt.prefix(text)) < length:
        text += bundled()[0]
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if len(model.prompt.prefix(text[:middle])) <= length:
            low = middle
        else:
            high = middle - 1
    return text[:low]


def _local_caches(bench: _Bench, ids: list[int]) -> tuple[PrefixCache, Path]:
    """Read the prefix here, once for the floor and once for mlx-lm's own file."""
    prefix = finish(bench.model.prefill(ids))
    cache: list[Any] = make_prompt_cache(bench.model.model)
    bench.model.model(mx.array(ids, dtype=mx.uint32)[None], cache=cache)
    mx.eval([layer.state for layer in cache])
    file = bench.folder / f"mlx-lm-{len(ids)}.safetensors"
    save_prompt_cache(str(file), cache)
    return prefix, file


def _time_local(model: LoadedModel, prefix: PrefixCache) -> float:
    start = time.perf_counter()
    next(model.answer(model.prompt.fresh(QUESTION), prefix, prefix.offset, Sampling(max_tokens=2)))
    return (time.perf_counter() - start) * 1000


def _time_file(model: LoadedModel, file: Path) -> float:
    start = time.perf_counter()
    cache = load_prompt_cache(str(file))
    mx.argmax(last_logits(model.model, model.prompt.fresh(QUESTION), cache)).item()
    return (time.perf_counter() - start) * 1000


def _time_asked(report: SendReport) -> float:
    start = time.perf_counter()
    first = None
    with report.stream(QUESTION, max_tokens=2) as answer:
        # To its end: a receiver that still computes would slow the next arm down.
        for _ in answer:
            first = first or (time.perf_counter() - start) * 1000
    if first is None:
        raise PeerError("answer: the model gave no token")
    return first
