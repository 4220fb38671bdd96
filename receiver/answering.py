"""Answering one question from one artifact, and accounting for it."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

from kvferry.core import container
from kvferry.core.compat import judge, refusal
from kvferry.core.digests import digest
from kvferry.core.errors import ContainerError
from kvferry.core.ledger import (
    Ledger,
    Lookups,
    Milliseconds,
    ParityFigures,
    Rows,
    SenderAccount,
    Tokens,
    Traffic,
    auto_account,
)
from kvferry.core.manifest import Manifest
from kvferry.core.progress import Stopwatch, relay
from kvferry.core.stored import Stored
from kvferry.engine.cache import PrefixCache
from kvferry.engine.generate import Answer, Sampling, Token
from kvferry.engine.model import LoadedModel
from kvferry.engine.residency import Residency
from kvferry.receiver import parity, reconstruct
from kvferry.receiver.reconstruct import Message

_NO_ACCOUNT = SenderAccount(0, 0, 0.0, 0.0, 0.0, 0.0)
_NO_TRAFFIC = Traffic(0, 0, 0, 0)
FALLBACK = "fallback_reprefill"
FALLBACK_TEXT = "fallback_text"
FALLBACK_EVIDENCE = "fallback_evidence"
WITHOUT_PASSAGES = "fallback_without_passages"


@dataclass
class Preparation:
    """What it took to have the prefix's cache at hand for one question.

    ``prefix`` is a kept cache, or the model's own caches for material that is read anew for every question.
    ``fallback`` is what was done instead, where there is a reason for it.
    """

    prefix: PrefixCache | list[Any]
    rows: list[int]
    prefix_tokens: int
    read_tokens: int = 0
    reused_tokens: int = 0
    material_tokens: int = 0
    reconstruct_ms: float = 0.0
    prefill_ms: float = 0.0
    parity: ParityFigures | None = None
    fallback_reason: str | None = None
    fallback: str = FALLBACK
    lookups: Lookups = field(default_factory=Lookups)


@dataclass
class Account:
    """One answer in the making. ``accepted_at`` is the monotonic clock when the question was accepted."""

    accepted_at: float
    preparation: Preparation
    request_id: str = ""
    question_tokens: int = 0
    first_token_ms: float | None = None


class Answerer:
    """Prepares caches and answers with one model. Use from the worker thread."""

    def __init__(
        self, model: LoadedModel, residency: Residency, versions: dict[str, str], parity_mode: str = "first"
    ) -> None:
        self._parity_mode = parity_mode
        self._model = model
        self._residency = residency
        self._versions = versions

    def prepare(self, stored: Stored, message: Message | None = None) -> Generator[int, None, Preparation]:
        """Rebuild, reread or find the cache of an artifact's prefix.

        Args:
            stored: the artifact.
            message: what was put together for this question from an artifact of references.

        Yields:
            Tokens read so far, so that other work can take turns.

        Raises:
            ContainerError: when stored bytes are no longer those of the manifest.
            ParityError: when the rebuilt cache does not give what the sender's gave.
            RefusedError: when the artifact does not fit the model that runs now.
            ContextOverflowError: when a text does not fit the context.
        """
        held = self._residency.get(stored.artifact_id)
        if held is not None:
            return _kept(held, parity.measured(stored))
        self.check_fit(stored)
        if stored.manifest.method.consume == "inject":
            preparation = self._rebuild(stored)
        else:
            preparation = yield from self._read(stored, message)
        if isinstance(preparation.prefix, PrefixCache):
            self._residency.put(stored.artifact_id, preparation.prefix)
        return preparation

    def reread(self, stored: Stored, reason: str) -> Generator[int, None, Preparation]:
        """Read the prefix again from its ids, in place of a cache that cannot be trusted.

        Raises:
            ContainerError: when the ids are damaged too, or the artifact has none.
            RefusedError: when the artifact does not fit the model that runs now.
        """
        self.check_fit(stored)
        key = _reread_key(stored.artifact_id)
        held = self._residency.get(key)
        if held is not None:
            return replace(_kept(held, None), fallback_reason=reason)
        ids = reconstruct.prefix_ids(stored.manifest, stored.sections)
        if max(ids) >= self._model.profile.vocabulary:
            raise ContainerError(
                f"section prefix.ids: token {max(ids)}, the vocabulary has {self._model.profile.vocabulary}",
                field="prefix.ids",
            )
        watch = Stopwatch()
        prefix = yield from watch.timing(self._model.prefill(ids))
        self._residency.put(key, prefix)
        rows = [len(ids)] * len(self._model.profile.layers)
        return Preparation(prefix, rows, len(ids), len(ids), prefill_ms=watch.ms, fallback_reason=reason)

    def answer(
        self, stored: Stored, question: str, sampling: Sampling, account: Account
    ) -> Generator[Token, None, tuple[Answer, Ledger]]:
        """Answer from a prepared cache. The stored cache is branched, never written.

        Yields what ``LoadedModel.answer`` yields, tokens that are no news among it.
        """
        ids = self._model.prompt.fresh(question)
        account.question_tokens = len(ids)
        preparation = account.preparation
        steps = self._model.answer(ids, preparation.prefix, preparation.prefix_tokens, sampling)

        def timed(token: Token) -> Token:
            if token.text and account.first_token_ms is None:
                account.first_token_ms = _since(account.accepted_at)
            return token

        answer = yield from relay(steps, timed)
        return answer, self._ledger(stored, answer, account)

    def forget(self, artifact_id: bytes) -> None:
        """Let go of what is kept at hand for an artifact."""
        self._residency.drop(artifact_id)
        self._residency.drop(_reread_key(artifact_id))

    def check_fit(self, stored: Stored) -> None:
        """Check an artifact against the model. The store outlives the daemon, which may have been given another one.

        Raises:
            RefusedError: when it does not fit. May be called from any thread.
        """
        verdict = judge(stored.manifest, self._model.profile)
        if not verdict.accepted:
            raise refusal(verdict)

    def _rebuild(self, stored: Stored) -> Preparation:
        start = time.perf_counter()
        prefix = reconstruct.prefix_cache(stored.manifest, stored.sections)
        figures = parity.measured(stored)
        if self._parity_mode == "always" or (self._parity_mode == "first" and figures is None):
            figures = parity.check(self._model, prefix, stored)
        return _kept(prefix, figures, _since(start))

    def _read(self, stored: Stored, message: Message | None) -> Generator[int, None, Preparation]:
        start = time.perf_counter()
        message = message or reconstruct.message(stored.manifest, stored.sections)
        self._model.check_length(message.text, message.system)
        prompt = self._model.prompt
        ids = prompt.prefix(message.text, message.system, message.kind)
        # The material may be long, and is encoded once.
        material_tokens = len(ids) - len(prompt.prefix("", message.system, message.kind))
        reconstruct_ms = _since(start)
        watch = Stopwatch()
        prefix: PrefixCache | list[Any]
        if stored.manifest.method.consume == "prefill_once":
            prefix = yield from watch.timing(self._model.prefill(ids))
        else:
            prefix = yield from watch.timing(self._model.read(ids))
        rows = [len(ids)] * len(self._model.profile.layers)
        return Preparation(
            prefix,
            rows,
            len(ids),
            read_tokens=len(ids),
            material_tokens=material_tokens,
            reconstruct_ms=reconstruct_ms,
            prefill_ms=watch.ms,
        )

    def _ledger(self, stored: Stored, answer: Answer, account: Account) -> Ledger:
        sender = stored.record.account or _NO_ACCOUNT
        traffic = stored.record.traffic or _NO_TRAFFIC
        preparation, manifest = account.preparation, stored.manifest
        rows = preparation.rows
        fallback_reason = preparation.fallback_reason or sender.fallback_reason or _replacement(manifest)
        fallback = None
        if fallback_reason:
            fallback = preparation.fallback if preparation.fallback_reason else _stands_in(stored, sender)
        wire_bytes = traffic.wire_bytes + preparation.lookups.bytes
        return Ledger(
            artifact_id=stored.artifact_id.hex(),
            method=manifest.method.id,
            form=manifest.form,
            verdict="accepted",
            fallback=fallback,
            fallback_reason=fallback_reason,
            manifest_bytes=traffic.manifest_bytes,
            payload_bytes=traffic.payload_bytes,
            resent_bytes=traffic.resent_bytes,
            control_bytes=traffic.control_bytes,
            lookups=preparation.lookups,
            wire_bytes=wire_bytes,
            dense_bf16_bytes=sender.dense_bf16_bytes,
            ratio=sender.dense_bf16_bytes / wire_bytes if wire_bytes else 0.0,
            tokens=Tokens(
                sender_prefill=sender.prefill_tokens,
                receiver_prefill=preparation.read_tokens + account.question_tokens,
                reused=preparation.reused_tokens,
                generated=len(answer.token_ids),
                material=preparation.material_tokens,
            ),
            ms=Milliseconds(
                prefill=sender.prefill_ms,
                method=sender.method_ms,
                encode=sender.encode_ms,
                transfer=sender.transfer_ms,
                verify=stored.record.verify_ms,
                reconstruct=preparation.reconstruct_ms,
                receiver_prefill=preparation.prefill_ms,
                first_token=account.first_token_ms,
                total=_since(account.accepted_at),
                tokenizer=sender.tokenizer_ms,
            ),
            rows=Rows(min(rows), sum(rows) / len(rows), max(rows)),
            parity=preparation.parity,
            resident_bytes=self._residency.nbytes,
            finish_reason=answer.finish_reason,
            prompt_version=manifest.prompt.version,
            system=manifest.prompt.system.hex(),
            runtime=self._versions,
            request_id=account.request_id,
            auto=auto_account(sender, stored.record.verify_ms, account.first_token_ms),
            outcome=manifest.method.outcome,
            tokenizer_bytes=sender.tokenizer_bytes,
        )


def _replacement(manifest: Manifest) -> str | None:
    """Return that an artifact was sent in place of another, where the sender's account does not say why.

    An artifact that came in a file brings no account of the send that replaced a method by it.
    """
    replaced = manifest.method.params.get("fallback_for")
    return f"sent in place of {replaced}; why, the artifact does not say" if replaced else None


def _stands_in(stored: Stored, account: SenderAccount) -> str:
    """Return what an artifact is called that was sent in place of another."""
    manifest, choice = stored.manifest, account.auto
    if manifest.form == "evidence":
        return FALLBACK_EVIDENCE
    replaced = manifest.method.params.get("fallback_for")
    # Only a choice sends a text in place of evidence.
    of_cache = choice is None or any(item.method == replaced and item.form == "kv" for item in choice.passed_over)
    whole = not any(name in stored.sections for name in container.SHORTENED)
    return FALLBACK if whole and of_cache else FALLBACK_TEXT


def _reread_key(artifact_id: bytes) -> bytes:
    return digest(b"reread" + artifact_id)


def _kept(prefix: PrefixCache, figures: ParityFigures | None, reconstruct_ms: float = 0.0) -> Preparation:
    rows = prefix.row_counts
    return Preparation(
        prefix, rows, prefix.offset, reused_tokens=prefix.offset, reconstruct_ms=reconstruct_ms, parity=figures
    )


def _since(start: float) -> float:
    return (time.perf_counter() - start) * 1000
