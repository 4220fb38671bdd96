"""An artifact of any size without a model: random bytes in the shape of a dense cache, and a receiver that takes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvferry.core import container
from kvferry.core.compat import LayerGeometry, Profile
from kvferry.core.digests import digest
from kvferry.core.ledger import SenderAccount
from kvferry.core.manifest import (
    MANIFEST_VERSION,
    Document,
    Encoding,
    LayerLayout,
    Manifest,
    Method,
    Model,
    Parity,
    Payload,
    Positions,
    Prefix,
    Prompt,
    Rope,
    Runtime,
    Section,
    Tokenizer,
)
from kvferry.core.store import ArtifactStore
from kvferry.core.stored import Stored

LAYERS = 2
KV_HEADS = 4
HEAD_DIM = 64
VERSIONS = {"kvferry": "0", "mlx": "0", "mlx_lm": "0", "device": "cpu", "blas": ""}
ACCOUNT = SenderAccount(0, 0, 0.0, 0.0, 0.0, 0.0)

_ROW_BYTES = KV_HEADS * HEAD_DIM * 2
_ROPE = tuple(
    Rope("rope", HEAD_DIM, traditional=False, base=1e4, scale=1.0, freqs=None, mscale=1.0) for _ in range(LAYERS)
)
_NOTHING = digest(b"")
_MODEL = Model("synthetic", "", "llama", _NOTHING, _NOTHING, None, None)
_TOKENIZER = Tokenizer(_NOTHING, _NOTHING)


def profile() -> Profile:
    """Return a receiver that accepts synthetic artifacts."""
    return Profile(
        model=_MODEL,
        tokenizer=_TOKENIZER,
        prompt_version=1,
        rope=_ROPE,
        layers=tuple(LayerGeometry("KVCache", KV_HEADS, HEAD_DIM, HEAD_DIM, "BF16") for _ in range(LAYERS)),
        probe_error=0.0,
        context_length=2**40,
        max_payload_bytes=2**40,
    )


def artifact(root: Path, payload_bytes: int, chunk_bytes: int, seed: int = 0) -> Stored:
    """Make an artifact of about ``payload_bytes`` in a store of its own.

    Args:
        root: the store's directory; it stays open for as long as the process.
        payload_bytes: size of K and V together.
        chunk_bytes: bytes a chunk.
        seed: of the random bytes.
    """
    tokens = max(1, round(payload_bytes / (LAYERS * 2 * _ROW_BYTES)))
    random = np.random.default_rng(seed)
    ids = container.ids_to_bytes(range(tokens))
    contents = [container.raw_section(container.IDS, "U32", (tokens,), ids)]
    for layer in range(LAYERS):
        for name in (container.keys_name(layer), container.values_name(layer)):
            rows = random.bytes(tokens * _ROW_BYTES)
            contents += [container.raw_section(name, "BF16", (KV_HEADS, tokens, HEAD_DIM), rows)]

    def describe(sections: tuple[Section, ...], payload: Payload) -> Manifest:
        return _describe(tokens, digest(ids), sections, payload)

    return ArtifactStore(root, durable=False).create(contents, chunk_bytes, describe)


def _describe(tokens: int, ids: bytes, sections: tuple[Section, ...], payload: Payload) -> Manifest:
    layer = LayerLayout("KVCache", KV_HEADS, HEAD_DIM, HEAD_DIM, "BF16", tokens, None, tokens, "contiguous", 0, 0)
    return Manifest(
        version=MANIFEST_VERSION,
        form="kv",
        model=_MODEL,
        tokenizer=_TOKENIZER,
        document=Document(_NOTHING, 0, 0),
        prompt=Prompt(1, _NOTHING),
        prefix=Prefix(tokens, ids),
        positions=Positions(_ROPE, 0.0),
        layout=(layer,) * LAYERS,
        method=Method("B1", "custom", aware=False, consume="inject", params={}, seed=None, calibration=()),
        mapper=None,
        encoding=Encoding(None, None, None, None, None, None, None),
        sections=sections,
        payload=payload,
        parity=Parity((0,), (0,), (0.0,), 0.0),
        runtime=Runtime("0", "0", "0", "cpu"),
    )
