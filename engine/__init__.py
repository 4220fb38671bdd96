"""Everything that touches MLX and mlx-lm.

Importing this package loads a real BLAS on Linux: MLX's CPU wheel links the reference BLAS, and a faster library only
takes its place when its symbols are global before ``mlx.core`` is imported for the first time.
"""

from kvferry.engine.backend import load_blas

load_blas()
