"""Documents kept for look-ups: spans are code points, and what cannot be right is refused."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.core import limits
from kvferry.core.digests import digest
from kvferry.core.errors import InvalidRequestError, NotFoundError, StoreError, TooLargeError
from kvferry.core.store import ArtifactStore
from kvferry.sender import documents
from kvferry.sender.documents import DocumentStore

FAMILY = "👩‍👩‍👧"
TEXT = f"Tür 門 {FAMILY} e\u0301 \u202eabc\n🚢"


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., DocumentStore]]:
    """Return a factory of documents on one store directory; opening it again closes it first."""
    with contextlib.ExitStack() as stack:

        def build(cache_bytes: int = documents.CACHE_BYTES, **options: Any) -> DocumentStore:
            stack.close()
            store = stack.enter_context(contextlib.closing(ArtifactStore(tmp_path, **options)))
            return DocumentStore(store, cache_bytes)

        yield build


@pytest.fixture
def store(opened: Callable[..., DocumentStore]) -> DocumentStore:
    return opened()


def keep(store: DocumentStore, text: str) -> bytes:
    with store.kept(text.encode()):
        return digest(text.encode())


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ((0, 3), "Tür"),
        ((4, 5), "門"),
        # A family of five code points, and an accent of its own: a span may cut both.
        ((6, 11), FAMILY),
        ((6, 7), "👩"),
        ((12, 14), "e\u0301"),
        ((13, 14), "\u0301"),
        ((20, 21), "🚢"),
        ((0, 21), TEXT),
        ((0, 0), ""),
        ((21, 21), ""),
    ],
)
def test_spans_count_code_points(store: DocumentStore, span: tuple[int, int], expected: str) -> None:
    assert len(TEXT) == 21
    assert store.spans(keep(store, TEXT), [span]) == [expected]


def test_spans_come_in_the_order_asked_for_and_may_overlap(store: DocumentStore) -> None:
    assert store.spans(keep(store, TEXT), [(4, 5), (0, 3), (0, 5)]) == ["門", "Tür", "Tür 門"]
    assert store.spans(keep(store, TEXT), []) == []


@pytest.mark.parametrize("span", [(0, 22), (22, 22), (3, 2), (21, 20), (-1, 3), (2**63, 2**64 - 1)])
def test_a_span_outside_the_document_is_refused_with_the_limit(store: DocumentStore, span: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequestError, match=f"spans: {span[0]}..{span[1]} is not inside .* 21 characters"):
        store.spans(keep(store, TEXT), [(0, 1), span])


def test_a_document_that_was_never_read_here_is_not_found(store: DocumentStore) -> None:
    with pytest.raises(NotFoundError, match=f"document {'07' * 32}: not read here, or no longer kept"):
        store.spans(b"\x07" * 32, [(0, 1)])


@pytest.mark.parametrize("damage", [b"", b"Tur", TEXT.encode() + b" ", b"\xff" * 8])
def test_a_damaged_text_is_never_quoted(store: DocumentStore, tmp_path: Path, damage: bytes) -> None:
    key = keep(store, TEXT)
    files = list((tmp_path / "documents").iterdir())
    assert [file.name for file in files] == [f"{key.hex()}.txt"]
    files[0].write_bytes(damage)
    with pytest.raises(StoreError, match="its text on disk has changed"):
        store.spans(key, [(0, 1)])


@pytest.mark.parametrize("mode", [None, 0o755])
def test_others_on_the_machine_cannot_read_what_is_kept(
    opened: Callable[..., DocumentStore], tmp_path: Path, mode: int | None
) -> None:
    root, before = tmp_path / "documents", os.umask(0o022)
    try:
        if mode is not None:
            root.mkdir(mode=mode)
        key = keep(opened(), TEXT)
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert stat.S_IMODE((root / f"{key.hex()}.txt").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_keeping_a_document_twice_writes_it_once(store: DocumentStore, tmp_path: Path) -> None:
    key = keep(store, TEXT)
    file = tmp_path / "documents" / f"{key.hex()}.txt"
    before = file.stat()
    keep(store, TEXT)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert file.read_bytes() == TEXT.encode()


def test_documents_survive_a_restart(opened: Callable[..., DocumentStore]) -> None:
    key = keep(opened(), TEXT)
    assert opened().spans(key, [(4, 5)]) == ["門"]


def test_a_document_in_the_middle_of_a_send_stays_and_what_was_looked_up_goes_last(
    opened: Callable[..., DocumentStore],
) -> None:
    store = opened(budget=250)
    first, second, third = ("ä" * 50, "ö" * 50, "ü" * 50)
    with store.kept(first.encode()):
        keep(store, second)
        keep(store, third)
        with pytest.raises(NotFoundError, match="no longer kept"):
            store.spans(digest(second.encode()), [(0, 1)])
    assert store.spans(digest(first.encode()), [(0, 2)]) == ["ää"]
    keep(store, second)
    with pytest.raises(NotFoundError):
        store.spans(digest(third.encode()), [(0, 1)])
    # From memory or from the disk, a look-up is a use.
    assert store.spans(digest(first.encode()), [(0, 2)]) == ["ää"]
    keep(store, third)
    assert store.spans(digest(first.encode()), [(0, 2)]) == ["ää"]


def test_a_document_is_not_let_go_while_its_passages_are_read(
    opened: Callable[..., DocumentStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(budget=150)
    document = keep(store, "ä" * 50)

    def meanwhile(data: bytes) -> bytes:
        if data == b"b" * 100:
            return digest(data)
        with pytest.raises(TooLargeError, match="100 are in use and the budget is 150"):
            keep(store, "b" * 100)
        return digest(data)

    monkeypatch.setattr(documents, "digest", meanwhile)
    assert store.spans(document, [(0, 1)]) == ["ä"]
    keep(store, "b" * 100)
    with pytest.raises(NotFoundError):
        store.spans(document, [(0, 1)])


def test_a_document_larger_than_the_store_is_refused(opened: Callable[..., DocumentStore], tmp_path: Path) -> None:
    store = opened(budget=100)
    with pytest.raises(TooLargeError, match="^store: 102 bytes do not fit: 0 are in use and the budget is 100$"):
        keep(store, "ä" * 51)
    assert list((tmp_path / "documents").iterdir()) == []


def test_a_document_that_expired_is_kept_anew_by_the_next_send(
    opened: Callable[..., DocumentStore], tmp_path: Path
) -> None:
    document = keep(opened(), TEXT)
    file = tmp_path / "documents" / f"{document.hex()}.txt"
    os.utime(file, (1.0, 1.0))
    store = opened(ttl_seconds=60)
    with pytest.raises(NotFoundError):
        store.spans(document, [(0, 3)])
    assert not file.exists()
    keep(store, TEXT)
    assert store.spans(document, [(0, 3)]) == ["Tür"]


def test_too_many_spans_are_refused(store: DocumentStore) -> None:
    key = keep(store, TEXT)
    assert len(store.spans(key, [(0, 1)] * limits.MAX_SPANS)) == limits.MAX_SPANS
    with pytest.raises(TooLargeError, match="spans: 65, at most 64 a call") as caught:
        store.spans(key, [(0, 1)] * 65)
    assert caught.value.fields == {"value": 65, "limit": 64}


@pytest.mark.parametrize(
    ("max_bytes", "expected"),
    [
        (0, ["Tür", "門", "", "🚢"]),
        (11, ["Tür", "門", "", "🚢"]),
        (10, ["Tür", "門", ""]),
        (7, ["Tür", "門", ""]),
        (6, ["Tür"]),
        (4, ["Tür"]),
        (3, []),
        (1, []),
    ],
)
def test_passages_stop_before_the_one_that_passes_the_callers_budget(
    store: DocumentStore, max_bytes: int, expected: list[str]
) -> None:
    # 4, 3, 0 and 4 bytes; a later one that would fit is not taken in the place of one that does not.
    spans = [(0, 3), (4, 5), (0, 0), (20, 21)]
    assert store.spans(keep(store, TEXT), spans, max_bytes) == expected


def test_a_budget_does_not_hide_a_span_outside_the_document(store: DocumentStore) -> None:
    with pytest.raises(InvalidRequestError, match=r"spans: 0\.\.22 is not inside"):
        store.spans(keep(store, TEXT), [(0, 3), (0, 22)], 1)


def test_a_text_that_was_looked_up_is_at_hand_until_its_file_changes(store: DocumentStore, tmp_path: Path) -> None:
    document = keep(store, TEXT)
    file = tmp_path / "documents" / f"{document.hex()}.txt"
    assert store.spans(document, [(0, 3)]) == ["Tür"]
    # As long as before, and another file.
    other = tmp_path / "other"
    other.write_bytes(TEXT.upper().encode()[: file.stat().st_size])
    other.replace(file)
    with pytest.raises(StoreError, match="its text on disk has changed"):
        store.spans(document, [(0, 3)])
    file.unlink()
    with pytest.raises(NotFoundError):
        store.spans(document, [(0, 3)])
    keep(store, TEXT)
    assert store.spans(document, [(4, 5)]) == ["門"]


def test_a_text_at_hand_is_not_read_again(
    opened: Callable[..., DocumentStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = keep(opened(), TEXT)
    verified: list[int] = []
    monkeypatch.setattr(documents, "digest", lambda data: verified.append(len(data)) or digest(data))
    for cache_bytes, times in ((documents.CACHE_BYTES, 1), (0, 3)):
        store = opened(cache_bytes)
        for _ in range(3):
            assert store.spans(document, [(0, 3)]) == ["Tür"]
        assert len(verified) == times
        verified.clear()


def test_passages_are_limited_by_their_bytes_not_their_characters(store: DocumentStore) -> None:
    text = "門" * (limits.MAX_SPAN_BYTES // 3) + "a" * 10
    key = keep(store, text)
    fits = limits.MAX_SPAN_BYTES // 3
    assert sum(map(len, store.spans(key, [(0, fits)]))) == fits
    with pytest.raises(TooLargeError, match=f"more than {limits.MAX_SPAN_BYTES} bytes"):
        store.spans(key, [(0, fits), (fits, fits + 2)])


def test_a_folder_that_cannot_be_made_is_one_clear_error(opened: Callable[..., DocumentStore], tmp_path: Path) -> None:
    (tmp_path / "documents").write_text("")
    with pytest.raises(StoreError, match="/documents"):
        opened()


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs"])), st.data())
def test_a_span_is_a_slice_of_the_text(store: DocumentStore, text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    assert store.spans(keep(store, text), [(start, end)]) == [text[start:end]]


def test_reading_a_document_again_mends_a_damaged_copy(store: DocumentStore, tmp_path: Path) -> None:
    document = keep(store, TEXT)
    (tmp_path / "documents" / f"{document.hex()}.txt").write_bytes(b"cut")
    with pytest.raises(StoreError):
        store.spans(document, [(0, 3)])
    keep(store, TEXT)
    assert store.spans(document, [(0, 3)]) == ["Tür"]
