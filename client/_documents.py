"""What counts as a document: a path, a text or an open file, told apart so that a slip is refused and never sent.

The bytes travel as they are: line endings and a byte order mark are part of the text.
"""

from __future__ import annotations

import codecs
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

from kvferry.client import _types
from kvferry.core.digests import digest
from kvferry.core.errors import InvalidRequestError, TooLargeError
from kvferry.core.limits import MAX_DOCUMENT_BYTES

DocumentSource: TypeAlias = str | bytes | os.PathLike[str] | IO[str] | IO[bytes]

_LONGEST_PATH = 260
_SUFFIX = re.compile(r"[^\s./\\]\.[A-Za-z][A-Za-z0-9]{0,7}$")
_PATH_START = re.compile(r"(~|\.{0,2})/|\\|[A-Za-z]:[\\/]")


@dataclass(frozen=True)
class Document:
    """A document's UTF-8 bytes, their BLAKE3 digest, and the number of code points."""

    data: bytes
    digest: bytes
    characters: int


def read(source: DocumentSource | None, text: str | None) -> Document:
    """Read a document.

    Args:
        source: a path object is that file; an open file is read to its end; bytes are UTF-8 text. A str is the file of
            that name if there is one, else the text itself, unless it looks like a file's name.
        text: the text itself, whatever it looks like.

    Raises:
        InvalidRequestError: when both or neither are given, the file cannot be read, the content is empty or is not
            UTF-8, or a str looks like the name of a file that is not there.
        TooLargeError: when the document is over the limit.
    """
    if text is not None and source is None:
        _types.check_text("text", text)
        return _from_text(text)
    if text is not None or source is None:
        raise InvalidRequestError("document: give either the document or text=, and not both", field="document")
    if isinstance(source, str):
        return _from_file(Path(source)) if _names_a_file(source) else _from_text(source)
    if isinstance(source, bytes):
        return _from_bytes(source, "document")
    if isinstance(source, os.PathLike):
        return _from_file(Path(source))
    if hasattr(source, "read"):
        return _from_open_file(source)
    raise InvalidRequestError(
        f"document: a {type(source).__name__} is neither a path, a text nor an open file", field="document"
    )


def _names_a_file(value: str) -> bool:
    """Whether a str means a file.

    Raises:
        InvalidRequestError: when it looks like a file's name and no such file is there.
    """
    if len(value) >= _LONGEST_PATH or len(value.splitlines()) != 1 or "\0" in value:
        return False
    path = Path(value)
    try:
        is_file, is_directory = path.is_file(), path.is_dir()
    except OSError:
        # Too long for the file system, or out of reach.
        is_file = is_directory = False
    if is_file:
        return True
    if is_directory or _looks_like_a_name(value):
        problem = "is a directory" if is_directory else "looks like a file's name, but there is no such file"
        raise InvalidRequestError(
            f"document: {value!r} {problem}; give text= to send these characters themselves",
            field="document",
            value=value,
        )
    return False


def _looks_like_a_name(value: str) -> bool:
    one_word = not any(character.isspace() for character in value)
    if one_word and (value.isascii() or "/" in value or "\\" in value):
        return True
    return _SUFFIX.search(value) is not None or _PATH_START.match(value) is not None


def _from_text(text: str) -> Document:
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"document: the character at {error.start} (U+{ord(text[error.start]):04X}) is half of a surrogate pair",
            field="document",
            character=error.start,
        ) from error
    return _checked(data, len(text), "document")


def _from_bytes(data: bytes, name: str) -> Document:
    # Before decoding, which takes up to four times the memory.
    _check_size(len(data), name)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = "; it looks like UTF-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else ""
        raise InvalidRequestError(
            f"{name}: not UTF-8 at byte {error.start} (0x{data[error.start]:02x}){hint}",
            field="document",
            byte=error.start,
        ) from error
    return _checked(data, len(text), name)


def _from_file(path: Path) -> Document:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError(f"document: {path}: {error.strerror}", field="document", value=str(path)) from error
    return _from_bytes(data, f"document {path}")


def _from_open_file(file: IO[str] | IO[bytes]) -> Document:
    try:
        content = _read_to_end(file)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"document: the open file cannot be read ({error})", field="document") from error
    if isinstance(content, bytes):
        return _from_bytes(content, "document")
    seen = getattr(file, "newlines", None) or ()
    if "\r" not in content and any("\r" in ending for ending in ([seen] if isinstance(seen, str) else seen)):
        raise InvalidRequestError(
            "document: the open file turns its line endings into \\n; open it with mode 'rb' or newline=''",
            field="document",
        )
    return _from_text(content)


def _read_to_end(file: IO[str] | IO[bytes]) -> str | bytes:
    # An unbuffered pipe hands out what it has, so one read is not the whole.
    parts: list[Any] = [file.read(MAX_DOCUMENT_BYTES + 1)]
    size = len(parts[0])
    while parts[-1] and size <= MAX_DOCUMENT_BYTES:
        parts.append(file.read(MAX_DOCUMENT_BYTES + 1))
        size += len(parts[-1])
    whole: str | bytes = type(parts[0])().join(parts)
    return whole


def _checked(data: bytes, characters: int, name: str) -> Document:
    _check_size(len(data), name)
    if not data:
        raise InvalidRequestError(f"{name}: is empty", field="document")
    return Document(data, digest(data), characters)


def _check_size(size: int, name: str) -> None:
    if size > MAX_DOCUMENT_BYTES:
        raise TooLargeError(
            f"{name}: more than {MAX_DOCUMENT_BYTES} bytes", field="document", value=size, limit=MAX_DOCUMENT_BYTES
        )
