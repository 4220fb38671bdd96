"""The one writing in which a quote and its source are compared.

Writing that does not count is folded away: canonical equivalents (NFC, NFD), amounts and kinds of white space, curly
and angled quotation marks, kinds of dash, characters that are not seen (soft hyphens, zero-width spaces, variation
selectors), ligatures, width and other presentation forms. Case, punctuation and accents count, and so does whatever
would change a number: 10² is not 102. Joiners and the tags of flags stay, because emoji differ by them.
"""

from __future__ import annotations

import unicodedata
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import regex

from kvferry.core.words import GROUP_SPACES

Positions: TypeAlias = npt.NDArray[np.intp]

WIDE = "\n"
"""White space that no number goes across, in folded writing."""

_SINGLE = "\u2018\u2019\u201a\u201b\u2039\u203a\u2032\u02bc"
_DOUBLE = "\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033\u301d\u301e\u301f"
_STRAIGHT = dict.fromkeys(_SINGLE, "'") | dict.fromkeys(_DOUBLE, '"')
_MINUS = "\u2212"
_UNSEEN = regex.compile(r"[\p{Default_Ignorable_Code_Point}--[\u200d\U000e0020-\U000e007f]]", regex.VERSION1)
# Forms that say something of their own: a power, an index, a numbered item, a unit.
_MEANT = ("<super>", "<sub>", "<circle>", "<square>")
_SPACES = regex.compile(rf"[ {WIDE}]{{2,}}")


class Folded(NamedTuple):
    """A text in its folded writing.

    ``marked`` is the same with ``WIDE`` for white space that no number goes across; ``at`` has where each character
    comes from, and the length of the text.
    """

    text: str
    marked: str
    at: Positions


def fold(text: str) -> Folded:
    """Return a text in its folded writing, white space at its ends included."""
    codes = _codes(text)
    distinct, which = np.unique(codes, return_inverse=True)
    table = {code: _fold_character(code) for code in distinct.tolist()}
    widths = np.array([len(folded) for folded in table.values()], dtype=np.intp)
    at = np.repeat(np.arange(len(codes), dtype=np.intp), widths[which])
    # All is decomposed, so this only sorts marks: nothing in front of a starter moves past it.
    folded = unicodedata.normalize("NFD", text.translate(table))
    blank = np.isin(_codes(folded), (ord(" "), ord(WIDE)))
    kept = np.ones(len(folded), dtype=bool)
    kept[:-1] = ~(blank[:-1] & blank[1:])
    marked = _SPACES.sub(WIDE, folded)
    return Folded(marked.replace(WIDE, " "), marked, np.append(at[kept], len(text)))


def _codes(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _fold_character(code: int) -> str:
    if ord(" ") <= code <= ord("~"):
        return chr(code)
    canonical = unicodedata.normalize("NFD", chr(code))
    return unicodedata.normalize("NFD", "".join(map(_unshaped, canonical)))


def _unshaped(char: str) -> str:
    plain = _plain(char)
    shape = unicodedata.decomposition(char)
    if plain != char or not shape.startswith("<") or shape.startswith(_MEANT):
        return plain
    expanded = unicodedata.normalize("NFKD", char)
    # A fraction or an item number would join digits before it, and a spacing accent is no space.
    if " " in expanded or (len(expanded) > 1 and any(map(str.isdigit, expanded))):
        return char
    return "".join(map(_plain, expanded))


def _plain(char: str) -> str:
    if char.isspace():
        return " " if char in GROUP_SPACES else WIDE
    if _UNSEEN.match(char):
        return ""
    if char == _MINUS or unicodedata.category(char) == "Pd":
        return "-"
    return _STRAIGHT.get(char, char)
