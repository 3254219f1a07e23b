"""Write bitsandbytes_nf4.safetensors: 4-bit layers as bitsandbytes saves them, and what they decode to.

Run with bitsandbytes installed: ``python tests/data/make_bitsandbytes.py``.
"""

from __future__ import annotations

from pathlib import Path

import bitsandbytes as bnb
import torch
from safetensors.torch import save_file


def main() -> None:
    torch.manual_seed(0)
    tensors = {}
    for name, shape, nested in (
        ("plain.weight", (24, 64), False),
        ("nested.weight", (130, 192), True),
        ("half.weight", (8, 128), False),
    ):
        dense = torch.randn(shape)
        dense = dense.to(torch.bfloat16) if name.startswith("half") else dense
        layer = bnb.nn.Linear4bit(
            shape[1], shape[0], bias=False, quant_type="nf4", compress_statistics=nested
        )
        layer.weight = bnb.nn.Params4bit(
            dense, requires_grad=False, quant_type="nf4", compress_statistics=nested
        )
        layer = layer.to("cpu")
        prefix = name.removesuffix("weight")
        tensors |= {prefix + key: value.contiguous() for key, value in layer.state_dict().items()}
        tensors[f"decoded.{name}"] = bnb.functional.dequantize_4bit(
            layer.weight.data, layer.weight.quant_state
        ).contiguous()
        tensors[f"dense.{name}"] = dense
    save_file(tensors, Path(__file__).with_name("bitsandbytes_nf4.safetensors"))


if __name__ == "__main__":
    main()
