"""Make Triton's interpreter round to bfloat16 as GPUs do, and 3.6's count loops under NumPy 2.4.

Triton 3.6 to 3.9 cut the low half off where a kernel stores float32 as bfloat16 under
``TRITON_INTERPRET=1``: an error of up to a whole unit of the last place, always towards zero. GPUs,
and the same kernels compiled, round to nearest even.

Triton 3.6 turns the end of a loop, an array of one element, into an integer in a way that NumPy refuses
since 2.4; later versions drop the axis first.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

__all__ = ["repair", "round_to_nearest"]


@functools.cache
def repair() -> None:
    """Apply both repairs to the interpreter, once in a process."""
    round_to_nearest()
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patched


@functools.cache
def round_to_nearest() -> None:
    """Replace the interpreter's conversion from float32 to bfloat16, once in a process."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    convert = InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return convert(self, src, dst_type)
        return TensorHandle(nearest_bfloat16(src.data), tl.bfloat16)

    InterpreterBuilder.cast_impl = cast_impl


def nearest_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the bit patterns (uint16) of float32 values rounded to bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    is_nan = (bits & 0x7FFF_FFFF) > 0x7F80_0000
    rounded = (np.where(is_nan, 0, bits) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # a NaN keeps its sign and stays one though its low bits go
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)
