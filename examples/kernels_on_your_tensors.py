"""Use kernels on your own tensors and stream, without tape or model, and check them against NumPy.

python examples/kernels_on_your_tensors.py

On a GPU the kernels run there, on a stream of this script's. Without one they are compiled and executed
on the CPU by the emulator; set ENTRENAR_BACKEND=triton to interpret their source instead.
"""

from __future__ import annotations

import os

import numpy as np
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("ENTRENAR_BACKEND", "ptx")

from entrenar import runtime  # noqa: E402  the backend is chosen before the first kernel is imported
from entrenar.kernels import adamw, clip, gemm, nf4, nf4_gemm  # noqa: E402
from entrenar.reference import nf4 as oracle  # noqa: E402


def say(what: str, got: torch.Tensor, wanted: np.ndarray, tolerance: float) -> None:
    """Print how far a result is from NumPy's, and stop where that is too far.

    Raises:
        SystemExit: It is.
    """
    error = float(np.abs(got.float().cpu().numpy() - wanted).max())
    print(f"{what:<46} largest error {error:.1e}, allowed {tolerance:.1e}")
    if not error <= tolerance:
        raise SystemExit(f"{what}: further from NumPy than rounding explains")


def main() -> None:
    """Quantise a weight, multiply by it, form gradients, clip them and take a step of AdamW."""
    device = "cuda" if GPU else "cpu"
    stream = torch.cuda.Stream() if GPU else None
    rng = np.random.default_rng(0)
    x, w, target = (
        rng.standard_normal(s).astype(np.float32) for s in ((48, 256), (192, 256), (48, 192))
    )
    tensors = (torch.from_numpy(array).to(device) for array in (x, w, target))
    x_gpu, w_gpu, target_gpu = tensors
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())  # the uploads above were on that one

    with runtime.counting() as counted:
        packed = nf4.nf4_quantize(w_gpu, block_size=64, double_quant=True, stream=stream)
        y = nf4_gemm.nf4_gemm_forward(x_gpu, packed, stream=stream)
        grad_w = gemm.matmul(target_gpu, x_gpu, trans_a=True, stream=stream)
        norm, factor, skip = clip.clip_factor(grad_w.view(-1), 1.0, stream=stream)
        weights = w_gpu.clone().view(-1)
        m, v = torch.zeros_like(weights), torch.zeros_like(weights)
        step = torch.zeros(1, dtype=torch.int64, device=device)
        rate = torch.full((1,), 1e-2, device=device)
        adamw.adamw_step(
            weights, grad_w.view(-1), m, v, step, rate,
            weight_decay=0.0, grad_scale=factor, skip=skip, stream=stream,
        )  # fmt: skip
    if stream is not None:
        stream.synchronize()

    exact = oracle.nf4_dequantize(oracle.nf4_quantize(w, 64, True)).astype(np.float64)
    unit = 2.0**-24
    say("x @ W.T, W decoded from NF4 in the kernel", y, x @ exact.T, 4 * unit * 256**0.5 * 16)
    wanted = target.T.astype(np.float64) @ x
    say("gradient of W, transposed by strides", grad_w, wanted, 4 * unit * 48**0.5 * 16)
    length = float(np.linalg.norm(wanted))
    say("its norm, on the device", norm, np.array([length]), 4 * unit * length)
    # AdamW's first step moves every weight by the rate, against its clipped gradient's sign; from the
    # gradient above, since eps makes much of a difference between gradients near 0
    clipped = grad_w.cpu().numpy().astype(np.float64) / max(norm.item(), 1.0)
    moved = w - 1e-2 * clipped / (np.abs(clipped) + 1e-8)
    say("one step of AdamW, clipped", weights.view(w.shape), moved, 8 * unit * np.abs(w).max())
    places = "the GPU" if GPU else f"the CPU ({runtime.backend()})"
    print(
        f"{counted.launches} launches on {places}, {counted.waits} wait of the host (quantising looks "
        f"for values that are not finite), {counted.allocated_bytes} bytes allocated"
    )


if __name__ == "__main__":
    main()
