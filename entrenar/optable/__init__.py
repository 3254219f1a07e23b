"""One row per op: the only place that joins kernels, reference and the fast CPU functions.

``OPS`` maps an op's name to its row, ``FUNCTIONS`` a function's name to what dispatch must know of
it, and :func:`call` runs one on whatever device its storage is on. Adding an op is a kernel file, a
reference file, a row in the file of its family here, and a differentiable function.
"""

from __future__ import annotations

from entrenar.optable.dispatch import call
from entrenar.optable.row import Call, ErrorCase, Function, Op, Sample
from entrenar.optable.table import FAMILIES, FUNCTIONS, OPS

__all__ = ["FAMILIES", "FUNCTIONS", "OPS", "Call", "ErrorCase", "Function", "Op", "Sample", "call"]
