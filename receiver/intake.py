"""Taking artifacts in: Offer, Put and Commit on the store, with everything that crosses counted."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvferry.core import manifest
from kvferry.core.compat import Profile, Verdict, judge
from kvferry.core.errors import ContainerError, InvalidRequestError, NotFoundError, StoreError
from kvferry.core.ledger import SenderAccount, account_from_json
from kvferry.core.logs import logger
from kvferry.core.metrics import ReceiverMetrics
from kvferry.core.plan import make_plan
from kvferry.core.store import ArtifactStore
from kvferry.core.stored import Stored
from kvferry.core.tokens import Token

_SHOWN_VERDICT = 1000


@dataclass(frozen=True)
class Judgement:
    """The answer to an offer. ``missing`` holds half-open runs of chunk indices."""

    artifact_id: bytes
    verdict: Verdict
    missing: tuple[tuple[int, int], ...]
    committed: bool


class Intake:
    """The receiving side of a transfer. Blocking; call from threads."""

    def __init__(self, store: ArtifactStore, profile: Profile, metrics: ReceiverMetrics) -> None:
        self._store = store
        self._profile = profile
        self._metrics = metrics
        self._log = logger("receiver")

    def offer(self, encoded: bytes, owner: Token | None = None) -> Judgement:
        """Judge a manifest. Nothing is allocated for an artifact that is refused.

        Args:
            encoded: the manifest.
            owner: the token that a new artifact counts against.

        Raises:
            QuotaError: when the owner may store no more.
            ManifestError: when the manifest is malformed or contradicts itself.
            TooLargeError: when the store's budget has no room.
            StoreError: when its disk has none.
            BusyError: when calls are using as many artifacts on their way in as may be open.
        """
        judgement = self._judge(encoded, owner)
        self._metrics.judged(judgement.verdict, committed=judgement.committed)
        if not judgement.verdict.accepted:
            shown = str(judgement.verdict)[:_SHOWN_VERDICT]
            self._log.warning("refused", artifact=judgement.artifact_id.hex(), verdict=shown)
        return judgement

    def _judge(self, encoded: bytes, owner: Token | None) -> Judgement:
        decoded = manifest.decode(encoded)
        make_plan(decoded)
        artifact_id = manifest.artifact_id(encoded)
        verdict = judge(decoded, self._profile)
        if not verdict.accepted:
            return Judgement(artifact_id, verdict, (), committed=False)
        partial = self._store.offer(encoded, owner)
        if partial is None:
            return Judgement(artifact_id, verdict, (), committed=True)
        return Judgement(artifact_id, verdict, tuple(partial.missing()), committed=False)

    def charge(self, artifact_id: bytes, received: int, control: int) -> None:
        """Count bytes that crossed for an artifact that is on its way in."""
        with self._store.assembly(artifact_id) as partial:
            partial.count(received, control)

    def charge_offer(self, artifact_id: bytes, control: int) -> None:
        """Count an offer; the manifest of a repeated one crossed on top of the artifact's own."""
        with self._store.assembly(artifact_id) as partial:
            partial.count_offer(control)

    def put(self, artifact_id: bytes, index: int, data: bytes | memoryview, control: int) -> None:
        """Verify and write one chunk.

        Raises:
            NotFoundError: when the artifact was not offered.
            ContainerError: when the chunk is not one of the manifest's.
            BusyError: as ``offer`` does.
        """
        kind = "resent"
        try:
            with self._store.assembly(artifact_id) as partial:
                partial.count(len(data), control)
                if partial.put(index, data):
                    kind = "payload"
        except ContainerError:
            self._metrics.damaged("chunk")
            raise
        finally:
            self._metrics.received(kind, len(data))

    def commit(self, artifact_id: bytes, account_json: str, control: int) -> Stored:
        """Verify and publish; a second Commit finds the artifact published, also when both run at once.

        Raises:
            InvalidRequestError: when the account cannot be read.
            TransferError: when chunks are missing.
            IntegrityError: when a digest differs.
        """
        stored = self._commit(artifact_id, account_json, control)
        self._log.info("committed", artifact=artifact_id.hex(), method=stored.manifest.method.id)
        return stored

    def _commit(self, artifact_id: bytes, account_json: str, control: int) -> Stored:
        if self._store.holds(artifact_id):
            return self._store.get(artifact_id)
        account = _parse_account(account_json)
        try:
            self.charge(artifact_id, 0, control)
            stored = self._store.commit(artifact_id, account)
        except ContainerError:
            self._metrics.damaged("commit")
            raise
        except (NotFoundError, StoreError):
            # The first of two may have published it since the second looked.
            if self._store.holds(artifact_id):
                return self._store.get(artifact_id)
            raise
        self._metrics.committed(stored)
        return stored


def _parse_account(text: str) -> SenderAccount:
    try:
        return account_from_json(text)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"account_json: {error}", field="account_json") from error
