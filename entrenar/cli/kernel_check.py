"""Whether an op computes what NumPy computes in float64: on a device, or compiled and emulated.

As a program, ``python -m entrenar.cli.kernel_check`` prints one JSON object: ``difference``, or ``error``
and its ``kind``. The doctor starts it so, because a compiler that fails may take its process along, and
because Triton decides at import whether it interprets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from entrenar.errors import EntrenarError

__all__ = ["LARGEST_DIFFERENCE", "difference", "emulated"]

LARGEST_DIFFERENCE = 1e-4
"""What float32 may differ by: rows of 257 normal numbers, summed in any order, stay below 1e-5."""

_SECONDS = (
    300  # the emulator's core takes ten to compile, the kernel five; a hung compiler is ended
)


def difference(device: str) -> float:
    """Return the largest difference of RMS norm on a device from NumPy's in float64.

    Args:
        device: ``"cpu"`` or ``"cuda:N"``; on the CPU the backend of ``ENTRENAR_BACKEND`` computes.

    Raises:
        EntrenarError: The op refuses; errors of the compiler and the driver come as they are.
    """
    import numpy as np
    import torch

    from entrenar.optable import call
    from entrenar.reference.rms_norm import rms_norm_forward

    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((33, 257)), rng.standard_normal(257)
    wanted = rms_norm_forward(x, weight, 1e-5)[0]
    tensors = [torch.from_numpy(a.astype(np.float32)).to(device) for a in (x, weight)]
    got = call("rms_norm_forward", *tensors, 1e-5)[0].to("cpu").numpy()
    return float(np.abs(got - wanted).max())


def emulated(target: str = "sm_80") -> dict[str, object]:
    """Compile a kernel for a GPU that need not be here, execute its PTX, and compare.

    Args:
        target: The GPU's architecture.

    Returns:
        ``{"difference": …}``, or ``{"error": a sentence, "kind": the error's class}``.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"ENTRENAR_BACKEND": "ptx", "ENTRENAR_PTX_TARGET": target}
    command = [sys.executable, "-m", "entrenar.cli.kernel_check"]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {_SECONDS} s", "kind": "TimeoutExpired"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"error": last, "kind": "crash"}
    found = json.loads(lines[-1])
    assert isinstance(found, dict)
    return found


def main() -> int:
    """Print what the CPU's backend differs by as one JSON object, or the error; always return 0."""
    try:
        found: dict[str, object] = {"difference": difference("cpu")}
    except EntrenarError as error:
        found = {"error": str(error), "kind": type(error).__name__}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
