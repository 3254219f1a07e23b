"""Write nf4_golden.npz: what bitsandbytes makes of 100 tensors that NumPy generates from a seed.

    python tests/data/make_nf4_golden.py          # needs torch and bitsandbytes, on a CPU

The tests import :func:`inputs` from here, which needs NumPy alone. The file holds, one tensor after
the other: the packed codes and the absmax, the nested codes, absmax2 and offset of double
quantisation, and digests of what bitsandbytes decodes from both.
"""

from __future__ import annotations

import hashlib
import pathlib
from typing import Any

import numpy as np

FILE = pathlib.Path(__file__).with_name("nf4_golden.npz")
DTYPES = ("float32", "float16", "bfloat16")
SHAPES = (
    (),
    (1,),
    (7,),
    (63,),
    (64,),
    (65,),
    (100,),
    (4097,),
    (3, 37),
    (7, 1),
    (2, 3, 5),
    (16, 64),
    (33, 96),
    (12, 576),
    (5, 1000),
)
KINDS = ("normal", "outliers", "zero_blocks", "midpoints", "tiny", "huge", "uniform", "constant")
LOWER = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0)
UPPER = (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
LEVELS = np.float32([*LOWER, *UPPER])


def round_bfloat16(x: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to bfloat16, to nearest even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def _values(rng: np.random.Generator, kind: str, count: int, block: int) -> np.ndarray:
    x = (rng.standard_normal(count) * 0.05).astype(np.float32)
    if kind == "outliers":
        x[rng.integers(0, count, max(count // 100, 1))] *= 300
    elif kind == "zero_blocks":
        x[:block] = 0
        x[-1:] = 0
        x[2 * block : 4 * block] = 0
    elif kind == "midpoints":
        middle = (LEVELS[:-1] + LEVELS[1:]) / np.float32(2)
        x = rng.choice(middle, count)
        x[:: max(block // 2, 1)] = 1
        x[1::7] = np.nextafter(x[1::7], np.float32(2))
    elif kind == "tiny":
        x *= np.float32(1e-37)
    elif kind == "huge":
        x *= np.float32(1e35)
    elif kind == "uniform":
        x = rng.uniform(-1, 1, count).astype(np.float32)
    elif kind == "constant":
        x[...] = -0.25
    return x


def inputs() -> list[tuple[np.ndarray, str, int]]:
    """Return 100 of (values as float32, dtype they are exact in, block size)."""
    made = []
    for i in range(100):
        rng = np.random.default_rng([20240501, i])
        dtype, kind = DTYPES[i % 3], KINDS[i % len(KINDS)]
        block = (64, 64, 64, 64, 128, 32, 4096)[i % 7]
        shape = SHAPES[i % len(SHAPES)] if i < 90 else (int(rng.integers(260, 300)), 128)
        x = _values(rng, kind, int(np.prod(shape, dtype=np.int64)), block).reshape(shape)
        if dtype == "bfloat16" and kind == "tiny":
            x *= np.float32(1e6)  # bitsandbytes flushes what is below bfloat16's normal range
        if dtype == "float16":
            x = np.clip(x, -60000, 60000).astype(np.float16).astype(np.float32)
        made.append((round_bfloat16(x) if dtype == "bfloat16" else x, dtype, block))
    return made


def digest(arrays: list[np.ndarray]) -> str:
    """Return the SHA-256 of arrays' bytes, one after the other."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def main() -> None:
    """Quantise every input with bitsandbytes and write the file."""
    import bitsandbytes
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    columns: dict[str, list[Any]] = {
        name: [] for name in ("codes", "absmax", "absmax_codes", "absmax2", "offset")
    }
    decoded: list[str] = []
    for x, dtype, block in inputs():
        flat = torch.from_numpy(x.reshape(-1)).to(getattr(torch, dtype))
        for double in (False, True):
            packed, state = quantize_4bit(
                flat, blocksize=block, quant_type="nf4", compress_statistics=double
            )
            plain = dequantize_4bit(packed, state).reshape(-1)
            decoded.append(digest([plain.view(torch.uint8).numpy()]))
            if not double:
                columns["codes"].append(packed.reshape(-1).numpy())
                columns["absmax"].append(state.absmax.numpy())
            else:
                columns["absmax_codes"].append(state.absmax.numpy())
                columns["absmax2"].append(state.state2.absmax.numpy())
                columns["offset"].append(state.offset.reshape(1).numpy())
    np.savez_compressed(
        FILE,
        **{name: np.concatenate(parts) for name, parts in columns.items()},
        decoded=np.array(decoded),
        inputs=np.array(digest([x for x, _, _ in inputs()])),
        version=np.array(bitsandbytes.__version__),
    )


if __name__ == "__main__":
    main()
