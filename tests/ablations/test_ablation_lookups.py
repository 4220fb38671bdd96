"""What a look-up costs: three ways to ask, as many bytes each, and figures that say what they are relative to."""

from __future__ import annotations

import pytest

from kvferry.ablations.speed import lookups


def test_every_way_is_measured_against_the_bare_call() -> None:
    shares: list[float] = []
    rows = lookups.run(3, lambda _, share: shares.append(share))
    assert [row.path for row in rows] == ["bare", "at hand", "from disk"]
    assert all(row.ratio == pytest.approx(row.ms / rows[0].ms) for row in rows)
    # Six passages of 40 + 30 + 160 characters, some of them of two bytes, and what stands around them.
    assert {(row.request_bytes > 60, 1380 < row.response_bytes < 2000) for row in rows} == {(True, True)}
    assert shares == sorted(shares)


def test_the_document_is_long_and_not_ascii() -> None:
    text = lookups.document()
    assert len(text.split(" ")) >= 50_000
    assert not text.isascii()
    assert text == lookups.document()
