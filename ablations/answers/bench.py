"""How well receivers answer from each method's message: real daemons, the SDK, and questions whose answers are known.

One pair of daemons a model. What a blind method makes is sent once a document, and all its questions are asked of it;
an aware method sends for every question. Decoding is greedy. A cell is one answer; the bytes in it are those of the
message that the answer was given from, whether or not others were given from it as well.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from kvferry.ablations.answers.figures import AnswerFigures
from kvferry.ablations.answers.grid import AnswerCell, AnswerGrid
from kvferry.ablations.answers.questions import Examined
from kvferry.ablations.harness import runner
from kvferry.ablations.harness.records import Record, RecordFile
from kvferry.ablations.harness.runner import Advance, LostError
from kvferry.ablations.harness.settings import Setting, checked
from kvferry.cli import processes
from kvferry.client import Answer, Client, SendReport
from kvferry.core.errors import KvferryError, UnavailableError
from kvferry.core.ledger import Ledger
from kvferry.core.manifest import OUTCOME, Scalar
from kvferry.core.wire import MethodInfo
from kvferry.engine import model_store
from kvferry.sender import registry

EXPERIMENT = "answers"


def run(
    grid: AnswerGrid, documents: Sequence[Examined], records: Path, advance: Advance, *, recorded: bool = False
) -> list[Record]:
    """Ask every question of every document by every setting; finished cells are taken from ``records``.

    Args:
        grid: models and settings.
        documents: what is asked about.
        records: the JSON-lines file.
        advance: told what happens and which share of the whole is done.
        recorded: whether to ask nothing and leave out what has no record.

    Raises:
        UnknownMethodError: naming a method that this version does not have, before anything is run.
        InvalidRequestError: naming a parameter that its method does not take, likewise.
        ModelError: when a model is not there.
        UnavailableError: when a daemon does not start, or ends during the run. A cell's own errors are recorded.
        StoreError: when records cannot be read or written.
    """
    for setting in grid.settings:
        checked(setting)
    file = RecordFile(records)
    # The second model's absence must not show after an hour with the first.
    for name in grid.models:
        model_store.resolve(name)
    return runner.run(
        [(name, grid.cells(name, documents)) for name in grid.models], file, open_bench, advance, recorded=recorded
    )


@contextlib.contextmanager
def open_bench(name: str) -> Iterator[AnswerBench]:
    """Start a sender and a receiver with a model, for as long as they are used.

    Raises:
        UnavailableError: when one does not start.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kvferry-ablate-") as folder,
        processes.pair(name, Path(folder)) as (sender, receiver),
        Client(sender=sender, receiver=receiver) as client,
    ):
        yield AnswerBench(client)


@dataclass(frozen=True)
class _Sent:
    """What is at the receiver, or why nothing is."""

    document: Examined
    setting: Setting
    question: str | None
    result: SendReport | KvferryError


class AnswerBench:
    """Sends documents and asks questions, one message at a time."""

    def __init__(self, client: Client) -> None:
        """Begin; ``client`` is of both daemons."""
        self._client = client
        self._sent: _Sent | None = None
        self._asked = False

    @cached_property
    def model(self) -> object:
        """The checkpoint, its tokenizer, its prompt and what it computes with."""
        node = self._client.describe_receiver()
        return [node.weights, node.tokenizer, node.chat_template, node.dtype]

    def measure(self, cell: AnswerCell) -> dict[str, Scalar]:
        """Ask one question.

        Raises:
            LostError: when a daemon of the run is gone.
            KvferryError: whatever the method, the model, the document or the store refuses.
        """
        info = registry.find(cell.setting.method).info
        try:
            report = self._report(cell, info)
            answer = report.ask(cell.question.question, max_tokens=cell.max_tokens)
        except UnavailableError:
            self._check_daemons()
            raise
        figures = _figures(info, report, answer, first_ask=not self._asked)
        self._asked = True
        return msgspec.structs.asdict(figures) | {
            f"{OUTCOME}{name}": value for name, value in answer.ledger.outcome.items()
        }

    def _check_daemons(self) -> None:
        try:
            self._client.describe_sender()
            self._client.describe_receiver()
        except UnavailableError as error:
            raise LostError(f"a daemon of this run is gone: {error.message}") from error

    def _report(self, cell: AnswerCell, info: MethodInfo) -> SendReport:
        """Return the message for a cell, sent now or for the cell before."""
        question = cell.question.question if info.aware else None
        wanted = (cell.document, cell.setting, question)
        if self._sent is None or (self._sent.document, self._sent.setting, self._sent.question) != wanted:
            self._drop()
            self._sent, self._asked = _Sent(*wanted, self._send(cell, question)), False
        if isinstance(self._sent.result, KvferryError):
            raise self._sent.result
        return self._sent.result

    def _send(self, cell: AnswerCell, question: str | None) -> SendReport | KvferryError:
        """Send a document. A refusal is kept: the other questions would meet it again, some after minutes."""
        given: dict[str, Any] = dict(cell.setting.parameters)
        try:
            return self._client.send(text=cell.document.text, method=cell.setting.method, question=question, **given)
        except KvferryError as error:
            return error

    def _drop(self) -> None:
        """Have the receiver forget the last message, so that the next one crosses whole and caches do not pile up."""
        if self._sent is not None and isinstance(self._sent.result, SendReport):
            with contextlib.suppress(KvferryError):
                self._client.drop(self._sent.result)
        self._sent = None


def _figures(info: MethodInfo, report: SendReport, answer: Answer, *, first_ask: bool) -> AnswerFigures:
    ledger, account = answer.ledger, report.account
    return AnswerFigures(
        artifact=report.artifact_id,
        name=info.name,
        label=info.label,
        aware=info.aware,
        form=report.form,
        prediction=answer.text,
        finish_reason=answer.finish_reason,
        fallback=ledger.fallback or "",
        document_bytes=report.document_bytes,
        artifact_bytes=_artifact_bytes(ledger),
        manifest_bytes=ledger.manifest_bytes,
        payload_bytes=ledger.payload_bytes,
        control_bytes=ledger.control_bytes,
        lookups=ledger.lookups.count,
        lookup_bytes=ledger.lookups.bytes,
        lookup_ms=ledger.lookups.ms,
        wire_bytes=_artifact_bytes(ledger) + ledger.lookups.bytes,
        sender_prefill_tokens=account.prefill_tokens,
        receiver_prefill_tokens=ledger.tokens.receiver_prefill,
        reused_tokens=ledger.tokens.reused,
        generated_tokens=ledger.tokens.generated,
        sender_prefill_ms=account.prefill_ms,
        sender_ms=account.method_ms + account.encode_ms,
        transfer_ms=account.transfer_ms,
        total_ms=ledger.ms.total,
        first_token_ms=ledger.ms.first_token,
        first_ask=first_ask,
    )


def _artifact_bytes(ledger: Ledger) -> int:
    return ledger.manifest_bytes + ledger.payload_bytes + ledger.resent_bytes + ledger.control_bytes
