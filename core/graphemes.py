"""Where a text may be cut: between the characters that a reader sees (extended grapheme clusters, UAX #29)."""

from __future__ import annotations

import regex

_CLUSTER = regex.compile(r"\X")
_LOOKAHEAD = 64
# Two characters that no rule joins, whatever stands before them: a scan may begin between them.
_SAFE = regex.compile(
    r"""(?r)
    (?! \r\n | \p{GCB=RI}{2} )
    [\p{GCB=Other}\p{GCB=CN}\p{GCB=CR}\p{GCB=LF}\p{GCB=RI}\p{GCB=LV}\p{GCB=LVT}\p{GCB=V}\p{GCB=T}]
    [\p{GCB=Other}\p{GCB=CN}\p{GCB=CR}\p{GCB=LF}\p{GCB=RI}\p{GCB=LV}\p{GCB=LVT}\p{GCB=L}\p{GCB=PP}]
    # A joiner may tie an emoji to another, and a virama a consonant; a mark ties nothing else to what follows it.
    | [\p{GCB=EX}\p{GCB=SM}\p{GCB=ZWJ}]
      [^\p{GCB=EX}\p{GCB=SM}\p{GCB=ZWJ}\p{Extended_Pictographic}\p{InCB=Consonant}]
    | [\p{GCB=EX}\p{GCB=SM}] \p{Extended_Pictographic}
    """,
    regex.VERBOSE,
)
# Pairs of flag letters are counted from the place where they are met: \X would count them from the first, every time.
_CLUSTERS = regex.compile(
    r"""
      (?P<single> [\p{GCB=Other}\p{GCB=LV}\p{GCB=LVT}]+ (?! [\p{GCB=EX}\p{GCB=ZWJ}\p{GCB=SM}\p{GCB=V}\p{GCB=T}] ) )
    | \p{GCB=RI}{2} (?! [\p{GCB=EX}\p{GCB=ZWJ}\p{GCB=SM}] )
    | \X
    """,
    regex.VERBOSE,
)
_FLAGS = regex.compile(r"(?r)\p{GCB=RI}+")


def floor(text: str, at: int, since: int = 0) -> int:
    """Return the last boundary at or before ``at``; ``since`` is a boundary before it, where the search may stop."""
    while not _is_plain(text, at, since):
        flags = _FLAGS.match(text, since, at + 1)
        if flags is None or flags.end() - flags.start() == 1:
            return _scan(text, at, since)
        # Flags are pairs of letters, counted from the first one; a scan would count them again for every pair.
        if (at - flags.start()) % 2 == 0:
            return at
        at -= 1
    return at


def ceil(text: str, at: int, since: int = 0) -> int:
    """Return the first boundary at or after ``at``; ``since`` is a boundary before it."""
    start = floor(text, at, since)
    if start == at:
        return at
    ahead = _LOOKAHEAD
    while True:
        cluster = _CLUSTER.match(text[start : at + ahead])
        end = start + (cluster.end() if cluster else 0)
        if end < at + ahead:
            return end
        if at + ahead >= len(text):
            return len(text)
        ahead *= 2


def edges(text: str) -> bytearray:
    """Return 1 for every boundary of a text, both ends among them, and 0 for every other place."""
    found = bytearray(b"\x01") * (len(text) + 1)
    if text.isascii() and "\r\n" not in text:
        return found
    for match in _CLUSTERS.finditer(text):
        if match.lastgroup is None:
            start, end = match.span()
            found[start + 1 : end] = bytes(end - start - 1)
    return found


def _is_plain(text: str, at: int, since: int) -> bool:
    if at <= since or at >= len(text):
        return True
    pair = text[at - 1 : at + 1]
    return pair.isascii() and pair != "\r\n"


def _scan(text: str, at: int, since: int) -> int:
    safe = _SAFE.search(text, since, at + 1)
    start = since if safe is None else safe.start() + 1
    # A slice, because the rules would look further back in the whole text. The character at the end decides about it.
    part = text[start : at + 1]
    last = 0
    for cluster in _CLUSTER.finditer(part):
        if cluster.end() > at - start:
            break
        last = cluster.end()
    return start + last
