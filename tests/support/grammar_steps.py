"""One answer under a grammar, token by token: what is left, how far a text gets, where random choices lead."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvferry.core.errors import ModelError
from kvferry.engine.constrained import Constraint, Grammar

VOCABULARY = 380
"""The tiny models' logits."""
ENDS = (376, 378)
"""What may end an answer: a control token of the tiny models, and another one than the configuration names."""


def schema_grammar(schema: Mapping[str, Any]) -> Grammar:
    """Return the grammar of JSON by a schema: no white space, keys in its order, no half of a surrogate pair."""
    options = {"whitespace_flexible": False, "json_allowed_escapes": 'nrtbf\\"'}
    return Grammar(f"start: %json {json.dumps({**schema, 'x-guidance': options})}")


def spellings(tokenizer: Any) -> list[bytes]:
    """Return every token's bytes, by the byte-level alphabet: printable Latin-1 for itself, the rest from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet |= {chr(256 + place): byte for place, byte in enumerate(others)}
    backend = tokenizer.backend_tokenizer
    structure = {token["id"] for token in json.loads(backend.to_str())["added_tokens"]}
    return [
        b"" if token in structure else bytes(alphabet[char] for char in backend.id_to_token(token))
        for token in range(backend.get_vocab_size())
    ]


def byte_tokens(spelling: Sequence[bytes]) -> dict[int, int]:
    """Return the token of every byte."""
    return {text[0]: token for token, text in enumerate(spelling) if len(text) == 1}


def allowed(constraint: Constraint, size: int = VOCABULARY) -> list[int]:
    """Return the tokens that are left, of a model with this many logits."""
    return np.flatnonzero(np.isfinite(np.array(constraint.mask(mx.zeros(size))))).tolist()


def follow(constraint: Constraint, single: Mapping[int, int], text: str) -> str:
    """Go along a text byte by byte as far as that is allowed, and return how far that was."""
    data = text.encode()
    for place, byte in enumerate(data):
        try:
            constraint.accept(single[byte])
        except ModelError:
            return data[:place].decode(errors="ignore")
    return text


def walk(constraint: Constraint, seed: int, spelling: Sequence[bytes], most: int = 3000) -> list[int]:
    """Choose by random logits; strings end often enough for the whole grammar to be seen."""
    rng = np.random.default_rng(seed)
    bias = np.array([4.0 * text.startswith(b'"') for text in spelling])
    ids: list[int] = []
    while not constraint.finished:
        masked = constraint.mask(mx.array(rng.gumbel(size=len(bias)) + bias, dtype=mx.float32))
        token = int(np.argmax(np.array(masked)))
        constraint.accept(token)
        ids.append(token)
        assert len(ids) < most
    return ids
