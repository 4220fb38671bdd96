"""The package ``llmlingua`` as its authors released it, held to what a daemon may do.

It loads from a folder and never from a hub, runs no code that comes with a model, and leaves the process's random
numbers alone, which the package seeds when it loads and draws from when it compresses. The rule is the package's own.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import shlex
import threading
from collections.abc import Callable, Generator, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from kvferry.core import json_records
from kvferry.core.digests import file_digest
from kvferry.core.errors import ModelError
from kvferry.engine.model_store import models_home
from kvferry.sender.text.stepped import stepped

_PUBLISHER = "microsoft"
_WEIGHTS = "model.safetensors"
_CLASSIFIER = "classifier.weight"
_COUNTED_LIKE = "gpt-3.5-turbo"
_HASH_SEED = "PYTHONHASHSEED"


class Compressor:
    """A loaded model. Use from one thread at a time; runs may take turns.

    Attributes:
        package: name and version of what compresses.
        checkpoint: hexadecimal digest of the file of weights.
    """

    def __init__(self, prompt_compressor: Any, package: str, checkpoint: str) -> None:
        self._compressor = prompt_compressor
        self._torch = _package("torch")
        self.package = package
        self.checkpoint = checkpoint

    def tokens(self, text: str) -> list[str]:
        """Return a text's tokens under the compressor's own tokenizer."""
        return list(self._compressor.tokenizer.tokenize(text))

    def compress(self, text: str, rate: float) -> Generator[int, None, str]:
        """Keep about ``rate`` of a text, above 0 and below 1, and yield how many tokens were classified so far.

        Raises:
            ModelError: when the tokenizer knows no word of the text, or the package cannot rank a passage.
        """
        if set(self.tokens(text)) <= self._compressor.special_tokens:
            raise ModelError("method A8: the compressor's tokenizer knows no word of the document")
        return (yield from stepped(partial(self._run, text, rate)))

    def _run(self, text: str, rate: float, report: Callable[[int], None]) -> str:
        owner = threading.get_ident()
        done = 0

        with _random_numbers_kept(self._torch) as restore:

            def before_batch(_model: Any, _positional: Any, given: dict[str, Any]) -> None:
                nonlocal done
                # Another run may have its own hook on the model, and this is called for both.
                if threading.get_ident() == owner:
                    restore()
                    report(done)
                    done += int(given["attention_mask"].sum())

            hook = self._compressor.model.register_forward_pre_hook(before_batch, with_kwargs=True)
            try:
                made: str = self._compressor.compress_prompt(text, rate=rate)["compressed_prompt"]
            except IndexError as error:
                raise ModelError(
                    f"method A8: llmlingua cannot rank a passage of the document, as of one in which its tokenizer "
                    f"knows no word: {error}"
                ) from error
            finally:
                hook.remove()
        return made


class Compressors:
    """Loads a compressor when it is first wanted and keeps the last one; more would take gigabytes each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: tuple[Path, Compressor] | None = None

    def get(self, name: str) -> Compressor:
        """Return the compressor of a name.

        Raises:
            ModelError: when the package, the model or tiktoken's encoding is not there, or the model is damaged; the
                message says what to do.
        """
        path = models_home() / "compressors" / name
        with self._lock:
            if self._held is None or self._held[0] != path:
                self._held = None
                self._held = (path, _load(name, path))
            return self._held[1]


def identity(name: str) -> tuple[str, ...]:
    """Return what tells the installed package and a compressor's file of weights from others, without reading it.

    Nothing is said of what is not there.
    """
    said = []
    with contextlib.suppress(PackageNotFoundError):
        said.append(version("llmlingua"))
    with contextlib.suppress(OSError):
        file = (models_home() / "compressors" / name / _WEIGHTS).stat()
        said.append(f"{file.st_size} {file.st_mtime_ns}")
    return tuple(said)


def _load(name: str, path: Path) -> Compressor:
    llmlingua, torch = _package("llmlingua"), _package("torch")
    _check_model(name, path)
    _check_encoding()
    with _random_numbers_kept(torch), _settings_kept(torch):
        try:
            compressor = llmlingua.PromptCompressor(
                model_name=str(path),
                # In fp32 on the CPU, as published, and the same on every machine.
                device_map="cpu",
                model_config={"trust_remote_code": False, "local_files_only": True},
                use_llmlingua2=True,
                # The package fills up every passage to the same length: a larger batch takes memory and saves no time.
                llmlingua2_config={"max_batch_size": 1},
            )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ModelError(
                f"the compressor in {path} cannot be loaded: {error}", model=name, path=str(path)
            ) from error
    # The package tells the two models apart by this name, and a folder above could hold the other's.
    compressor.model_name = name
    compressor.oai_tokenizer = _PlainText(compressor.oai_tokenizer)
    return Compressor(compressor, f"llmlingua {llmlingua.__version__}", file_digest(path / _WEIGHTS).hex())


class _PlainText:
    """tiktoken's encoding for texts that may hold what looks like its control tokens: as text, not as an error."""

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding

    def encode(self, text: str) -> list[int]:
        return list(self._encoding.encode(text, disallowed_special=()))


def _package(name: str) -> Any:
    try:
        # An extra, and everything else works without it.
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name or name
        raise ModelError(
            f"method A8 needs the package {missing}. Run: pip install 'kvferry[llmlingua]'", package=missing
        ) from error


def _check_model(name: str, path: Path) -> None:
    """Refuse what the package would take: it fills in at random what a file of weights lacks."""
    command = f"hf download {_PUBLISHER}/{name} --local-dir {shlex.quote(str(path))}"
    if not path.is_dir():
        raise ModelError(f"compressor {name} is not installed. Run: {command}", model=name, path=str(path))
    try:
        kinds = json_records.loads((path / "config.json").read_bytes())["architectures"]
        with safe_open(path / _WEIGHTS, framework="numpy") as weights:
            whole = _CLASSIFIER in weights.keys()  # noqa: SIM118  (it is no mapping)
        problem = "" if whole and "ForTokenClassification" in str(kinds) else "it is no token classifier"
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        problem = str(error)
    if problem:
        raise ModelError(
            f"the compressor in {path} is damaged: {problem}. Remove the folder and run: {command}",
            model=name,
            path=str(path),
        )


def _check_encoding() -> None:
    try:
        _package("tiktoken").encoding_for_model(_COUNTED_LIKE)
    except (OSError, ValueError) as error:
        # A failed connection is an OSError, a file that is not the expected one a ValueError.
        raise ModelError(
            f"method A8: llmlingua counts words in tokens of {_COUNTED_LIKE}, whose encoding tiktoken downloads once, "
            f"and that failed: {error}. Run this with a network, and the sender with the same TIKTOKEN_CACHE_DIR: "
            f"TIKTOKEN_CACHE_DIR=FOLDER python -c \"import tiktoken; tiktoken.encoding_for_model('{_COUNTED_LIKE}')\""
        ) from error


@contextlib.contextmanager
def _random_numbers_kept(torch: Any) -> Iterator[Callable[[], None]]:
    """Put the generators of Python, numpy and torch back at the end, and whenever the block calls what it is given."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (the global one is what is seeded)
    drawn = torch.get_rng_state()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(drawn)

    try:
        yield restore
    finally:
        restore()


@contextlib.contextmanager
def _settings_kept(torch: Any) -> Iterator[None]:
    """Put back what the package sets beside the seeds, for this process and for those that it starts."""
    cudnn = torch.backends.cudnn
    before = (os.environ.get(_HASH_SEED), cudnn.deterministic, cudnn.benchmark)
    try:
        yield
    finally:
        hash_seed, cudnn.deterministic, cudnn.benchmark = before
        os.environ.pop(_HASH_SEED, None)
        if hash_seed is not None:
            os.environ[_HASH_SEED] = hash_seed
