"""Structured logs on standard error: one event a line, as text for people or JSON for machines."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from typing import TextIO, cast

import structlog


class _BestEffort(io.TextIOBase):
    """A stream that swallows its failures: a full disk under the log must not end the call that is logged."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if that is possible."""
        with contextlib.suppress(OSError):
            self._stream.flush()


def configure(level: str, form: str) -> None:
    """Set logging up for a daemon process.

    Args:
        level: "debug", "info", "warning" or "error".
        form: "text" or "json".
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _BestEffort(sys.stderr))),
    )
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr, format="%(name)s: %(message)s")


def logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """Return the logger of a part of the program."""
    bound: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=name)
    return bound
