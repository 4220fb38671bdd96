"""Generated sections of a document that people write."""

from __future__ import annotations

from pathlib import Path

from kvferry.core.errors import ConfigError, StoreError
from kvferry.core.files import write_atomic


def write(path: Path, section: str, content: str) -> None:
    """Put ``content`` between a document's markers; everything else in it stays as it is.

    The markers are ``<!-- kvferry:SECTION:begin -->`` and ``<!-- kvferry:SECTION:end -->``. A document without them
    gets them at its end, and one that does not exist is begun.

    Raises:
        ConfigError: when there is one marker without the other, or one twice; nothing is written then.
        StoreError: when the file cannot be read or written.
    """
    begin, end = f"<!-- kvferry:{section}:begin -->", f"<!-- kvferry:{section}:end -->"
    try:
        text = path.read_bytes().decode("utf-8") if path.exists() else "# Results\n"
        if begin not in text and end not in text:
            text = f"{text.rstrip()}\n\n{begin}\n{end}\n"
        if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
            raise ConfigError(f"{path}: {begin} and {end} must be there once each, in this order", path=str(path))
        before, after = text[: text.index(begin)], text[text.index(end) :]
        write_atomic(path, f"{before}{begin}\n{content}\n{after}".encode())
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}", path=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}", path=str(path)) from error
