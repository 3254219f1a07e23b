"""Triton kernels and their launchers, one op family a file; imported on first use.

``entrenar.kernels.X`` is the launcher ``X`` whatever family it is in. Each takes torch storage and
``stream=``; importing the package imports neither torch nor triton.
"""

from __future__ import annotations
