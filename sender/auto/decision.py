"""A choice in the making: what can be used, what was passed over and why, and which form comes next."""

from __future__ import annotations

from kvferry.core.choice import MAX_REASON_CHARACTERS, AutoChoice, Estimate, PassedOver, Quality
from kvferry.core.errors import RefusedError
from kvferry.sender.auto.candidates import FORMS, Candidate
from kvferry.sender.auto.estimates import quickest
from kvferry.sender.link import Survey


class Decision:
    """What one request weighs. ``deciding_ms`` is what that took."""

    def __init__(self, quality: Quality, found: Survey, sender_tokens_per_second: float) -> None:
        self._quality: Quality = quality
        self._found = found
        self._sender_tokens_per_second = sender_tokens_per_second
        self._estimates: dict[Candidate, Estimate] = {}
        self._open: list[Candidate] = []
        self._passed_over: list[PassedOver] = []
        self._gave_way = False
        self.deciding_ms = 0.0

    @property
    def open(self) -> tuple[Candidate, ...]:
        """What can still be used, in order."""
        return tuple(self._open)

    def consider(self, candidate: Candidate) -> None:
        """Add what can be used."""
        self._open.append(candidate)

    def price(self, candidate: Candidate, estimate: Estimate) -> None:
        """Say what one that can be used is expected to take. All must be priced before there is a best."""
        self._estimates[candidate] = estimate

    def pass_over(self, candidate: Candidate, reason: str, spent_ms: float = 0.0) -> None:
        """Leave what cannot be used. Others of its form may be."""
        self._open = [item for item in self._open if item != candidate]
        cut = reason if len(reason) <= MAX_REASON_CHARACTERS else f"{reason[: MAX_REASON_CHARACTERS - 1]}…"
        self._passed_over.append(PassedOver(candidate.id, candidate.form, candidate.written, cut, spent_ms))

    def best(self) -> Candidate:
        """Return the quickest of what is left; once a form has failed, of the form that comes next.

        Raises:
            RefusedError: when nothing is left.
        """
        if not self._open:
            text = f"auto: nothing of quality {self._quality} can be used: {_listed(self._passed_over)}"
            raise RefusedError(text, field="method", quality=self._quality)
        next_form = min(item.order for item in self._open)
        among = [item for item in self._open if item.order == next_form or not self._gave_way]
        return quickest((item, self._estimates[item]) for item in among)[0]

    def give_way(
        self, failed: Candidate, reason: str, spent_ms: float, *, to_smaller: bool = False
    ) -> tuple[Candidate, ...]:
        """Leave what failed and what gives way with it, which is returned: its form, and whatever stands before that.

        Args:
            failed: what was tried.
            reason: why it failed.
            spent_ms: lost on it.
            to_smaller: it was too large, so that what is smaller of the same form may do.
        """
        self.pass_over(failed, reason, spent_ms)
        kept = self._estimates[failed].bytes if to_smaller else 0
        with_it = tuple(
            item
            for item in self._open
            if item.order < failed.order or (item.form == failed.form and self._estimates[item].bytes >= kept)
        )
        for item in with_it:
            self.pass_over(item, f"gave way with {failed.id}: {reason}")
        self._gave_way = True
        return with_it

    def fallback(self, chosen: Candidate) -> tuple[str, str]:
        """Return which method a candidate stands in for, and why; "" for none.

        It does when all of a form before its own was passed over, not when something there was only slower.
        """
        still = {item.form for item in self._open}
        gone = [form for form in FORMS[: chosen.order] if form not in still]
        before = [item for item in self._passed_over if item.form in gone]
        return (before[0].method, _listed(before)) if before else ("", "")

    def choice(self, chosen: Candidate) -> AutoChoice:
        """Return the account of choosing a candidate."""
        return AutoChoice(
            quality=self._quality,
            chosen=self._estimates[chosen],
            estimates=tuple(self._estimates.values()),
            passed_over=tuple(self._passed_over),
            link=self._found.link,
            sender_tokens_per_second=self._sender_tokens_per_second,
            receiver_tokens_per_second=self._found.node.prefill_tokens_per_second,
            probe_bytes=self._found.probe_bytes,
            deciding_ms=self.deciding_ms,
        )


def _listed(passed_over: list[PassedOver]) -> str:
    """Return what was passed over in one line, each reason once."""
    by_reason: dict[str, list[str]] = {}
    for item in passed_over:
        by_reason.setdefault(item.reason, []).append(f"{item.method} {item.parameters}".strip())
    return "; ".join(f"{', '.join(methods)}: {reason}" for reason, methods in by_reason.items())
