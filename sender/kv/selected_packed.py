"""B9, selection then packing: the rows that another method keeps, packed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from kvferry.core.compat import Profile
from kvferry.core.errors import InvalidRequestError, UnknownMethodError
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.model import LoadedModel
from kvferry.engine.quantise import Scheme
from kvferry.sender.kv.parameters import Bits, SelectionParameters
from kvferry.sender.kv.selecting import Calibration, Keep, SelectingMethod, Subject
from kvferry.sender.method import Method


class SelectedPackedParameters(SelectionParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``selector`` is a blind method that keeps some rows, by id or name; its own parameters have their defaults."""

    selector: str = "snapkv"
    bits: Bits = 8


class SelectedPacked(SelectingMethod):
    """Packing by token and taking rows out commute: with the quantiser affine this is B2 on fewer rows."""

    info = MethodInfo(
        id="B9",
        name="selected-packed",
        form="kv",
        label="custom",
        aware=False,
        source="kvferry: a selector, then a quantiser",
        summary="the rows that another method keeps, packed to 8 bits or fewer",
    )
    parameters = SelectedPackedParameters

    def __init__(self, find: Callable[[str], Method[Any]]) -> None:
        self._find = find

    def plan(self, profile: Profile, given: SelectedPackedParameters) -> Scheme | None:
        """Return how kept rows are packed, as the selector can have it."""
        return self._selector(given).plan(profile, given)

    def calibrated(self, model: LoadedModel, given: SelectedPackedParameters) -> Calibration | None:
        """Return what the selector knows about the model."""
        return self._selector(given).calibrated(model, self._own(given))

    def rank(self, subject: Subject, given: SelectedPackedParameters) -> Generator[Progress, None, Keep]:
        """Rank as the selector does."""
        return (yield from self._selector(given).rank(subject, self._own(given)))

    def renumbers(self, given: SelectedPackedParameters) -> bool:
        """Whether the selector renumbers."""
        return self._selector(given).renumbers(self._own(given))

    def observes(self, given: SelectedPackedParameters) -> bool:
        """Whether the selector does."""
        return self._selector(given).observes(self._own(given))

    def _own(self, given: SelectedPackedParameters) -> Any:
        return self._selector(given).parameters(budget=given.budget)

    def _selector(self, given: SelectedPackedParameters) -> SelectingMethod:
        try:
            found = self._find(given.selector)
        except UnknownMethodError as error:
            raise InvalidRequestError(f"selector: {error.message}", field="selector", value=given.selector) from error
        if not isinstance(found, SelectingMethod) or isinstance(found, SelectedPacked):
            raise InvalidRequestError(
                f"selector: {found.info.name} is no method that chooses rows", field="selector", value=given.selector
            )
        if found.info.aware:
            raise InvalidRequestError(
                f"selector: {found.info.name} looks at the question, and B9 does not; give bits to method "
                f"{found.info.name} itself",
                field="selector",
                value=given.selector,
            )
        return found
