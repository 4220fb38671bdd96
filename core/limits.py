"""Hard limits of the wire. docs/wire.md states them; both ends enforce them before taking memory."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

MAX_MESSAGE_BYTES = 4 * MIB
"""Largest gRPC message at either end, set explicitly on every channel and server."""

MAX_MANIFEST_BYTES = 2 * MIB
MIN_CHUNK_BYTES = KIB
MAX_CHUNK_BYTES = 2 * MIB
DEFAULT_CHUNK_BYTES = MIB

MAX_PAYLOAD_BYTES = 64 * GIB
"""Largest payload a receiver takes unless its configuration says less."""

MAX_PARTIALS = 500
"""Most artifacts on their way in whose files a receiver has open."""

MAX_SECTIONS = 16_384
MAX_DIMENSIONS = 8
MAX_PARAMETERS = 256

MAX_PROBE_TOKENS = 256
"""Most tokens of a parity probe's suffix: a receiver runs them in one pass."""

MAX_PROBE_OUTCOMES = 1024
"""Most log-probabilities of a parity probe."""

MAX_DOCUMENT_BYTES = 64 * MIB
MAX_QUESTION_BYTES = 256 * KIB
MAX_TEXT_SPANS = 1024 * KIB
"""Most passages that a shortened text is made of: a sixty-fourth of the longest document's bytes."""

MAX_FACTS = 4096
"""Most facts, references, or notes in one message of evidence."""
MAX_FACT_PLACES = 256
"""Most places of one fact."""
MAX_FACT_CHARACTERS = 4096
"""Longest text in a message of evidence, in code points."""

MAX_TOKENIZER_BYTES = 32 * MIB
"""Longest description of a tokenizer; the same of it as a frame."""
MAX_GROWN_CHARACTERS = 2**27
"""Most characters that another machine's tokenizer may make of a document on the way to its tokens."""
MAX_TOKENIZERS_KNOWN = 64
"""Most tokenizers that a sender says it has."""

MAX_SPANS = 64
MAX_SPAN_BYTES = MIB
"""Most text that one FetchSpans answer carries."""

PACKED_WIDTHS = (2, 3, 4, 5, 6, 8)
"""Widths of packed codes, in bits."""
PACKED_GROUPS = (32, 64, 128)
"""How many packed numbers may share a scale and a bias."""
