"""Experiments: the speed of the wire, the time to the first token, and the comparison of methods.

Importing this package first loads a real BLAS, see ``kvferry.engine``: experiments import MLX by name, and whoever does
so before that measures the reference BLAS.
"""

import kvferry.engine  # noqa: F401
