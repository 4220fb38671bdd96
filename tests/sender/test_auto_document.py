"""docs/methods.md says of auto what the code does: the bounds, and the rates that estimates rest on."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from kvferry.core.choice import QUALITIES
from kvferry.sender import link
from kvferry.sender.auto import candidates, choosing, estimates

DOCUMENT = (Path(__file__).parents[2] / "docs" / "methods.md").read_text("utf-8")
SECTION = DOCUMENT[DOCUMENT.index("\n## auto\n") :]
PROSE = " ".join(SECTION.split())


def test_each_bound_lists_what_it_adds() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ((?:these; |B1).*?) \|", SECTION, re.MULTILINE))
    assert tuple(rows) == QUALITIES
    before: list[tuple[str, dict[str, object]]] = []
    for quality in QUALITIES:
        told = [
            (words.split()[0], {name: float(value) for name, value in re.findall(r"(\w+)=([\d.]+)", words)})
            for words in rows[quality].removeprefix("these; ").split("; ")
        ]
        found = [(name, dict(given)) for name, given in candidates.ALLOWED[quality]]
        assert found[: len(before)] == before
        assert told == found[len(before) :]
        before = found


def test_the_parameter_and_its_values() -> None:
    (row,) = re.findall(r"^\| `quality` \| (.*?) \| (.*?) \|", SECTION, re.MULTILINE)
    default = msgspec.structs.fields(choosing.AutoParameters)[0].default
    assert row == (f"`{default}`", ", ".join(f"`{quality}`" for quality in QUALITIES))


def test_rates_and_limits() -> None:
    for words in (
        f"the payload at {estimates.WRITE_BYTES_PER_SECOND / 1e6:g} MB/s",
        f"the payload at {estimates.REBUILD_BYTES_PER_SECOND / 1e6:g} MB/s",
        f"A3: {estimates.RANK_CHARACTERS_PER_SECOND:,.0f} characters a second",
        f"counts as {estimates.QUESTION_TOKENS} tokens",
        f"Both hold for {link.KEPT_SECONDS:g} s, and a transfer of 1 MiB or more",
        "16 KiB of random bytes, then 256 KiB, then 1 MiB, until one takes 20 ms more",
        "and four times the budget, for form and quotes, at the reading speed",
        "three round trips",
    ):
        assert words in PROSE, words
    assert [size // 1024 for size in link.PADDINGS] == [16, 256, 1024]
    assert (link.TELLING_BYTES, link._ENOUGH_MS, link._ROUND_TRIPS) == (2**20, 20.0, 3)
    assert (estimates.FORCED_PER_READ, estimates.ROUND_TRIPS) == (4, 3)
