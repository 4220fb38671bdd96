"""Coverage-guided fuzzing of what a stranger's bytes reach first: manifest, plan and frames.

Not part of the test run, and atheris is no dependency. By hand, on Linux with CPython 3.11 to 3.13:

    .venv/bin/pip install atheris
    .venv/bin/python tests/fuzz/atheris_wire.py -max_total_time=600 -max_len=8192 -rss_limit_mb=1024 CORPUS

CORPUS is a directory, which grows. ``atheris_wire.py --seed`` makes one, ``fuzz-corpus``, of manifests and frames.
Whatever is not one of our errors, or takes more than the limit, stops the run and leaves its input in a file.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
CORPUS = Path("fuzz-corpus")


def samples() -> list[bytes]:
    """Return whole manifests and frames to start from; the first byte says which of them it is."""
    path = ROOT / "tests" / "core" / "conftest.py"
    spec = importlib.util.spec_from_file_location("kvferry_core_samples", path)
    assert spec is not None
    assert spec.loader is not None
    core: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = core
    spec.loader.exec_module(core)
    from kvferry.core import frames

    layout = (core.LayerLayout("KVCache", 2, 8, 8, "F32", 4, None, 4, "contiguous", 0, 0),)
    contents = core.kv_contents(layout, 4)
    manifests = [core.described(core.kv_manifest(layout, 4, bytes(contents[0].data)), contents)]
    for which in core.PACKED_LAYOUTS:
        contents = core.packed_contents(which, "F16")
        manifests.append(core.described(core.packed_manifest(which, "F16", bytes(contents[0].data)), contents))
    made = (
        frames.Hello("kvf_secret"),
        frames.Offer(b"manifest"),
        frames.Offered(b"i" * 32, (("NO_MAPPER", "mapper", "a", "b"),), ((0, 3), (5, 9)), committed=False),
        frames.Commit(b"i" * 32, "{}"),
        frames.Failed("BUSY", "try again", {"retry_after_ms": 500, "field": None}),
    )
    return [*(b"m" + one.encoded for one in manifests), *(b"f" + frames.encode(frame)[4:] for frame in made)]


def check(data: bytes) -> None:
    """Read a manifest, or a frame."""
    from kvferry.core import frames, manifest
    from kvferry.core.errors import ManifestError, TooLargeError, TransferError
    from kvferry.core.plan import make_plan

    kind, body = data[:1], data[1:]
    if kind == b"f":
        try:
            frame: Any = frames.decode(body)
        except TransferError:
            return
        if isinstance(frame, frames.Failed):
            frames.rebuild(frame)
        return
    try:
        decoded = manifest.decode(body)
        plan = make_plan(decoded)
    except (ManifestError, TooLargeError):
        return
    if manifest.encode(decoded) != body or plan.ranges[-1][1] != decoded.payload.length:
        raise AssertionError("accepted, and not what it says")


def main() -> None:
    """Fuzz, or write the samples."""
    sys.path.insert(0, str(ROOT / ".dev"))
    if "--seed" in sys.argv:
        CORPUS.mkdir(exist_ok=True)
        for number, sample in enumerate(samples()):
            (CORPUS / f"sample-{number}").write_bytes(sample)
        return
    import atheris

    with atheris.instrument_imports(include=["kvferry"]):
        from kvferry.core import frames, manifest, plan  # noqa: F401  (instrumented)
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
