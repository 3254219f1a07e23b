"""Compile kernels before they are needed: what launchers would launch is collected, then compiled.

Triton compiles a kernel when it is first launched in a form: in the middle of a first step, with the
card's memory full of weights. Here launchers run with nothing behind them, on storage that may be
untouched memory of the host, and each form they ask for is compiled once. Needs triton.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from entrenar.kernels import _launch

__all__ = ["Form", "collecting", "compile_forms", "untouched"]


@dataclasses.dataclass(frozen=True)
class Form:
    """One kernel in one form.

    Attributes:
        op: The launcher that asked for it first.
        kernel: The ``@triton.jit`` function.
        arguments: Keyword arguments of the launch, options included.
    """

    op: str
    kernel: Any
    arguments: dict[str, Any]


@contextlib.contextmanager
def collecting() -> Iterator[list[Form]]:
    """Collect the forms that launchers ask for inside the block, each once; nothing is launched.

    Results are zeros.
    """
    found: list[Form] = []
    seen: set[tuple[Any, ...]] = set()

    def keep(op: str, kernel: Any, grid: tuple[int, ...], given: dict[str, Any]) -> None:
        plain = {p.name for p in kernel.params if not p.is_constexpr}
        key = (
            kernel,
            *((n, _specialised(v) if n in plain else (type(v), v)) for n, v in given.items()),
        )
        if key not in seen:
            seen.add(key)
            found.append(Form(op, kernel, given))

    with (
        _launch.launching(keep),
        _launch.allocating(lambda shape, dtype, device: untouched(shape, dtype)),
    ):
        yield found


def untouched(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros on the CPU that take memory only where they are written."""
    # The system gives pages when they are touched. torch fills zeros at once, and so does NumPy where the C
    # library hands out again what was freed before.
    count = math.prod(shape) * dtype.itemsize
    large = count >= mmap.PAGESIZE
    made = np.frombuffer(mmap.mmap(-1, count), np.uint8) if large else np.zeros(count, np.uint8)
    return torch.from_numpy(made).view(dtype).view(tuple(shape))


def _specialised(value: Any) -> Any:
    """Return what of an argument decides the code: Triton's specialisation, not coarser than it."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return value.base.dtype, tuple(value.block_shape)
    if type(value) is int:
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31, value < 2**63
    return value if value is None else type(value)


def compile_forms(
    forms: list[Form], device: str, progress: Callable[[int, int], None] | None = None
) -> None:
    """Compile forms for a device, and load them there.

    Args:
        forms: What :func:`collecting` found.
        device: ``"cuda:N"``, or ``"cpu"`` where kernels are emulated.
        progress: Called with (forms done, forms in all).
    """
    with _launch.driving(device):
        for number, form in enumerate(forms):
            compiled = form.kernel.warmup(grid=(1,), **form.arguments)
            _ = compiled.run  # the driver loads a kernel when its launcher is first asked for
            if progress is not None:
                progress(number + 1, len(forms))
