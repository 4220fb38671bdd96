"""A document cut in two: what a model reads to make a cache, and what truly follows, to judge the cache by.

The prefix is the one that every artifact has: chat template, system prompt and the document's beginning, up to its last
token. What follows is the document's own next tokens, as they stand in the whole document's prompt. So the document
simply goes on inside the user's turn, as it would have if one read had covered both parts; no template and no question
comes between, which would measure the model's taste in questions. The cut lies between two tokens of the whole: only
then are the prefix's ids the same whether or not the rest is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.errors import InvalidRequestError
from kvferry.engine.prompt import PromptBuilder

# A longer text may have fewer tokens, by the few characters that one token joins.
_SLACK_CHARACTERS = 8


@dataclass(frozen=True)
class Split:
    """A cut document.

    Attributes:
        text: the document's beginning; ``prompt.prefix(text)`` are the prefix's ids.
        prefix_tokens: how many those are.
        fed: N tokens to run on the cache of the prefix.
        truth: the N tokens that follow each of them. The prefix's own last row predicts the first of ``fed``; that
            prediction was made before anything was selected or encoded, so it is not judged.
    """

    text: str
    prefix_tokens: int
    fed: tuple[int, ...]
    truth: tuple[int, ...]


def split(prompt: PromptBuilder, document: str, prefix_tokens: int, continuation_tokens: int) -> Split:
    """Cut a document.

    Args:
        prompt: of the model.
        document: the whole text.
        prefix_tokens: most tokens of the prefix; a cut that cannot lie there lies a few tokens before.
        continuation_tokens: N, how many predictions are judged.

    Raises:
        InvalidRequestError: when the document is too short, or the prefix too short for any of it.
    """
    whole = prompt.prefix(document)
    needed = prefix_tokens + continuation_tokens + 1
    if len(whole) < needed:
        raise InvalidRequestError(
            f"document: {len(whole)} tokens with the prompt around it, but {prefix_tokens} prefix and "
            f"{continuation_tokens} continuation tokens and one to predict need {needed}",
            field="document",
            value=len(whole),
            expected=needed,
        )
    end = _cut(prompt, document, whole, prefix_tokens)
    start = len(prompt.prefix(document[:end]))
    following = whole[start : start + continuation_tokens + 1]
    return Split(document[:end], start, tuple(following[:-1]), tuple(following[1:]))


def _cut(prompt: PromptBuilder, document: str, whole: list[int], tokens: int) -> int:
    """Return how many characters of the document the prefix takes."""
    low, high = 0, len(document)
    while low < high:
        middle = (low + high + 1) // 2
        if len(prompt.prefix(document[:middle])) <= tokens:
            low = middle
        else:
            high = middle - 1
    for end in range(min(low + _SLACK_CHARACTERS, len(document)), 0, -1):
        ids = prompt.prefix(document[:end])
        if len(ids) <= tokens and ids == whole[: len(ids)]:
            return end
    raise InvalidRequestError(
        f"prefix_tokens: {tokens}, but the prompt takes {len(prompt.prefix(''))} before the document begins",
        field="prefix_tokens",
        value=tokens,
    )
