"""StreamingLLM: the first few and the last rows, renumbered to where they stand in the cache."""

from __future__ import annotations

from typing import Any

from kvferry.core.wire import MethodInfo
from kvferry.sender.kv.sink_recent import SinkRecent


class StreamingLLM(SinkRecent):
    """Keeps what B3 keeps and rotates the keys to the positions 0..R-1; the question follows at R.

    Adapted: the receiver drops no row while it answers, and the prefix was read with every row in sight.
    """

    info = MethodInfo(
        id="streamingllm",
        name="streamingllm",
        form="kv",
        label="adapted",
        aware=False,
        source="StreamingLLM, arXiv 2309.17453, mit-han-lab/streaming-llm",
        summary="the first rows and the last ones, renumbered without a gap; no row is dropped while answering",
    )

    def renumbers(self, given: Any) -> bool:
        """Kept rows take the positions 0..R-1."""
        return True
