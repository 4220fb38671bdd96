"""Import MLX and multiply two matrices; print what happened as one line of JSON. Runs in a process of its own.

A broken MLX may end its process, or hang; whoever asks must survive both.
"""

from __future__ import annotations

import json
import sys
import time

SIZE = 384
_REPEATS = 3


def main() -> None:
    """Print versions, device, BLAS and the rate of a float32 product in GFLOP/s."""
    from kvferry.engine.backend import runtime_versions

    versions = runtime_versions()
    import mlx.core as mx

    factor = mx.random.normal((SIZE, SIZE))
    mx.eval(factor @ factor)
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        mx.eval(factor @ factor)
        best = min(best, time.perf_counter() - start)
    sys.stdout.write(json.dumps({**versions, "gflops": 2 * SIZE**3 / best / 1e9, "ms": best * 1000}) + "\n")


if __name__ == "__main__":
    main()
