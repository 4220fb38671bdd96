"""Reading a whole payload again, to find everything in it that is not as its manifest says."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.core.errors import KvferryError
from kvferry.core.manifest import Manifest
from kvferry.core.payloads import Payload, Sections
from kvferry.core.plan import Plan


def damage(manifest: Manifest, plan: Plan, payload: Payload) -> Iterator[KvferryError]:
    """Yield what is wrong, in the payload's order; nothing for a payload that is whole.

    The manifest's other digests follow from the chunks', and ``make_plan`` has compared them.

    Args:
        manifest: what the payload should be.
        plan: its plan.
        payload: where the bytes are.
    """
    packed = {section.name for section in manifest.sections if section.decoded is not None}
    sections = Sections(manifest, plan, payload)
    for name, (first, end) in plan.section_chunks.items():
        found = list(_damaged_chunks(name, range(first, end), plan, payload))
        yield from found
        if name in packed and not found:
            try:
                sections.read(name)
            except KvferryError as error:
                yield error


def _damaged_chunks(name: str, chunks: range, plan: Plan, payload: Payload) -> Iterator[KvferryError]:
    place = f"section {name}" if name else "header"
    for index in chunks:
        try:
            plan.check(index, payload.read_chunk(index))
        except KvferryError as error:
            yield type(error)(f"{place}: {error.message}", **error.fields)
