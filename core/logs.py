"""Structured logs on standard error: one event a line, as text for people or JSON for machines."""

from __future__ import annotations

import logging
import sys

import structlog


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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr, format="%(name)s: %(message)s")


def logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """Return the logger of a part of the program."""
    bound: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=name)
    return bound
