"""Experiments: every method against the dense cache, answers from every message, and how fast it all is.

Importing this package first loads a real BLAS, see ``kvferry.engine``: experiments import MLX by name, and whoever does
so before that measures the reference BLAS.
"""

import kvferry.engine  # noqa: F401
