"""Records to tables, for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from kvferry.ablations.harness.records import Record
from kvferry.ablations.methods.figures import Figures
from kvferry.ablations.report.markdown import origin, parameters, table
from kvferry.core.errors import StoreError

HEADING = (
    "method",
    "parameters",
    "label",
    "question",
    "rows",
    "wire kB",
    "ratio",
    "held kB",
    "KL mean",
    "KL p99",
    "flips",
    "ΔNLL",
    "tier",
    "method ms",
    "encode ms",
    "rebuild ms",
    "first token ms",
    "dense",
)
# With fewer positions the 99th percentile is the second or third highest value.
FEW_POSITIONS = 500
_LEGEND = """\
KL(dense cache || rebuilt cache) in nats per position over the full vocabulary, teacher-forced on the document's own
continuation; p99 is an observed value, with the number of positions beside it where there are fewer than 500. Flips:
the most likely token differs. ΔNLL: of the true continuation, mean in nats; positive is worse. Tiers: *good* is KL ≤
0.01, p99 ≤ 0.10 and flips ≤ 1 %; *marginal* is 0.10, 1.0 and 5 %; all else is *poor*. A question is *aware* when the
method saw it. Rows: kept, of a KV head of a layer, from least to most where they differ. Wire: payload and manifest.
Ratio: dense bf16 cache over wire; on a CPU dense rows, scales and biases are float32, twice what they are on a GPU.
Held: the rebuilt cache in memory. Method: the rule without the prefill; encode includes the parity probe; first
token: a question on the rebuilt cache, and the same on the dense one, medians of alternating turns. One prefix is an
anchor and no result: read a method across the documents."""


def rows(records: Iterable[Record]) -> list[tuple[str, ...]]:
    """Return one line of text cells for every record that has figures, in the order of ``HEADING``."""
    return [_row(record, _figures(record)) for record in records if record.status == "done"]


def markdown(records: Sequence[Record], command: str) -> str:
    """Return a section: what was measured with what, and a table for every model and document.

    Args:
        records: of one run, at least one.
        command: that was given.
    """
    lines = [
        *origin(records, command),
        "",
        _LEGEND,
    ]
    for (model, document), group in groupby(records, key=lambda record: (record.model, record.document)):
        lines += ["", f"### {model}, {document}", "", *_table(list(group))]
    return "\n".join(lines)


def outcome(record: Record) -> str:
    """Return in one line why a cell has no figures."""
    if record.failure is None:
        return f"{_name(record)}: skipped: {record.reason}"
    return f"{_name(record)}: {record.failure.code}: {record.failure.message}"


def _table(records: list[Record]) -> list[str]:
    lines = rows(records)
    shown = [_about(_figures(record)) for record in records if record.status == "done"][:1]
    if lines:
        shown += ["", *table(HEADING, lines)]
    notes = [f"- {outcome(record)}" for record in records if record.status != "done"]
    return [*shown, *([""] if shown and notes else []), *notes]


def _about(figures: Figures) -> str:
    return (
        f"{figures.prefix_tokens} prefix tokens, {figures.positions} positions judged, computed in {figures.dtype}; "
        f"the dense bf16 cache has {_kilobytes(figures.dense_bf16_bytes)} kB, its prefill took "
        f"{figures.prefill_ms:,.0f} ms."
    )


def _row(record: Record, figures: Figures) -> tuple[str, ...]:
    few = f" (n={figures.positions})" if figures.positions < FEW_POSITIONS else ""
    kept = f"{figures.rows_mean:.0f}"
    if figures.rows_min != figures.rows_max:
        kept += f" ({figures.rows_min} to {figures.rows_max})"
    return (
        _method(record, figures),
        parameters(record.parameters),
        figures.label,
        "aware" if figures.aware else "blind",
        kept,
        _kilobytes(figures.payload_bytes + figures.manifest_bytes),
        f"{figures.ratio:.2f}",
        _kilobytes(figures.resident_bytes),
        _nats(figures.kl_mean),
        f"{_nats(figures.kl_p99)}{few}",
        f"{figures.flip_rate:.1%}",
        f"{figures.delta_nll:+.4f}",
        figures.tier,
        f"{figures.method_ms:.0f}",
        f"{figures.encode_ms:.0f}",
        f"{figures.reconstruct_ms:.0f}",
        f"{figures.first_token_ms:.0f}",
        f"{figures.dense_first_token_ms:.0f}",
    )


def _figures(record: Record) -> Figures:
    try:
        return msgspec.convert(record.figures, Figures)
    except msgspec.ValidationError as error:
        raise StoreError(f"record {record.id}: {error}", record=record.id) from error


def _method(record: Record, figures: Figures) -> str:
    return record.method if record.method == figures.name else f"{record.method} {figures.name}"


def _name(record: Record) -> str:
    return " ".join(filter(None, (record.method, parameters(record.parameters))))


def _nats(value: float) -> str:
    # Four places hide what tells 8 bits from none.
    return f"{value:.4f}" if value >= 0.0001 or value == 0 else f"{value:.1e}"  # noqa: PLR2004  (the fourth place)


def _kilobytes(count: float) -> str:
    return f"{count / 1000:,.1f}"
