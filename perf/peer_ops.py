"""How torch, Liger, bitsandbytes and Unsloth compute the ops of the table, for perf.peer_calls to time.

An entry prepares what may be prepared once (another layout of a weight, a table of angles) and returns what
computes the op's results, in the order of its row, from arguments of the forward function.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from entrenar import runtime
from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.optable import Op

__all__ = ["LIGER", "OTHERS", "Implementation", "implementations"]

Arguments = dict[str, Any]
Compute = Callable[[Arguments], Any]
TORCH, LIGER, BITSANDBYTES, UNSLOTH = "torch", "liger-kernel", "bitsandbytes", "unsloth"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """How a package computes an op.

    Attributes:
        package: Where it comes from.
        prepare: Given the op's row and arguments, returns what computes its results from arguments.
        note: Of the forward pass.
        backward_note: Of the backward pass.
        overwrites: Arguments it writes that ours does not.
        gradient: Like ``prepare`` for the gradients, where autograd does not give them.
        passes: Which passes it has.
        frozen: Its backward pass computes no gradient of weights.
        spends: Its backward pass overwrites what the forward pass saved, which is restored.
    """

    package: str
    prepare: Callable[[Op, Arguments], Compute]
    note: str = ""
    backward_note: str = ""
    overwrites: tuple[str, ...] = ()
    gradient: Callable[[Op, Arguments], Compute] | None = None
    passes: tuple[str, ...] = ("forward", "backward")
    frozen: bool = False
    spends: bool = False


def _baseline(op: Op, given: Arguments) -> Compute:
    function = op.torch_baseline
    assert function is not None
    return lambda arguments: function(**arguments)


def _sdpa(op: Op, given: Arguments) -> Compute:
    square = len(given["q"]) == len(given["k"])
    attention = torch.nn.functional.scaled_dot_product_attention
    shared = given["q"].shape[1] != given["k"].shape[1]

    def compute(a: Arguments) -> Any:
        q, k, v = (a[n].transpose(0, 1)[None] for n in "qkv")
        return attention(q, k, v, is_causal=square, enable_gqa=shared)[0].transpose(0, 1)

    return compute


def _rotate(op: Op, given: Arguments) -> Compute:
    """Rotate as transformers' apply_rotary_pos_emb does, out of place."""
    at = given["positions"].long()
    cos, sin = (
        torch.cat((given[n][at],) * 2, 1)[:, None].to(given["q"].dtype) for n in ("cos", "sin")
    )
    half = given["cos"].shape[1]

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    return lambda a: (turned(a["q"]), turned(a["k"]))


def _fused_adamw(op: Op, given: Arguments) -> Compute:
    from torch.optim.adamw import adamw

    settings = {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    rate = float(given["lr"])
    done = given["step"].float().reshape(())

    def compute(a: Arguments) -> Any:
        state = [[a[n]] for n in ("params", "grads", "m", "v")]
        adamw(*state, [], [done.clone()], fused=True, maximize=False, lr=rate, **settings)
        return a["params"], a["m"], a["v"]

    return compute


def _liger(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)


def _liger_rms_norm(op: Op, given: Arguments) -> Compute:
    function = _liger("rms_norm", "LigerRMSNormFunction")
    return lambda a: function.apply(a["x"], a["weight"], a["eps"], 0.0, "llama", False)


def _liger_added_rms_norm(op: Op, given: Arguments) -> Compute:
    function = _liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")

    def compute(a: Arguments) -> Any:
        y, total = function.apply(a["x"], a["residual"], a["weight"], a["eps"])
        return y, None, total

    return compute


def _liger_layer_norm(op: Op, given: Arguments) -> Compute:
    function = _liger("layer_norm", "LigerLayerNormFunction")
    return lambda a: function.apply(a["x"], a["weight"], a["bias"], a["eps"])


def _liger_swiglu(op: Op, given: Arguments) -> Compute:
    function = _liger("swiglu", "LigerSiLUMulFunction")
    return lambda a: function.apply(a["gate"], a["up"])


def _liger_rope(op: Op, given: Arguments) -> Compute:
    function = _liger("rope", "LigerRopeFunction")
    at = given["positions"].long()
    cos, sin = (torch.cat((given[n][at],) * 2, 1)[None] for n in ("cos", "sin"))

    def compute(a: Arguments) -> Any:
        heads = (a[n][None].transpose(1, 2) for n in "qk")
        return tuple(t[0].transpose(0, 1) for t in function.apply(*heads, cos, sin))

    return compute


def _liger_cross_entropy(op: Op, given: Arguments) -> Compute:
    forward = _liger("cross_entropy", "cross_entropy_forward")

    def compute(a: Arguments) -> Any:
        settings = (None, -100, 0.0, 0.0, "sum", None, False)
        return forward(a["logits"], a["targets"], *settings)[0]

    return compute


def _liger_cross_entropy_gradient(op: Op, given: Arguments) -> Compute:
    forward = _liger("cross_entropy", "cross_entropy_forward")

    def compute(a: Arguments) -> Any:
        logits = a["logits"].detach().requires_grad_()
        settings = (None, -100, 0.0, 0.0, "sum", None, False)
        return forward(logits, a["targets"], *settings)[4].detach()

    return compute


def _liger_linear_cross_entropy(op: Op, given: Arguments) -> Compute:
    forward = _liger("fused_linear_cross_entropy", "fused_linear_cross_entropy_forward")

    def compute(a: Arguments) -> Any:
        hidden = a["hidden"].detach().requires_grad_()
        found = forward(hidden, a["weight"], a["targets"], reduction="sum")
        return found[0], None, found[4].detach()

    return compute


def _bnb_state(w: NF4Weight) -> tuple[torch.Tensor, Any]:
    """Return the weight as bitsandbytes holds it: codes in a column, and its state."""
    from bitsandbytes.functional import QuantState, create_dynamic_map, get_4bit_type

    common = {
        "shape": torch.Size(w.shape), "blocksize": w.block_size, "quant_type": "nf4", "dtype": w.dtype,
        "code": get_4bit_type("nf4", device=w.device),
    }  # fmt: skip
    if not w.double_quant:
        return w.codes[:, None], QuantState(absmax=w.absmax, **common)
    assert w.offset is not None
    code = create_dynamic_map().to(w.device)
    nested = QuantState(absmax=w.absmax2, blocksize=256, code=code, dtype=torch.float32)
    state = QuantState(absmax=w.absmax_codes, offset=w.offset[0], state2=nested, **common)
    return w.codes[:, None], state


def _bnb_quantize(op: Op, given: Arguments) -> Compute:
    from bitsandbytes.functional import quantize_4bit

    double = given["double_quant"]
    return lambda a: quantize_4bit(a["w"], None, None, 64, double, "nf4")[0].reshape(-1)


def _bnb_dequantize(op: Op, given: Arguments) -> Compute:
    from bitsandbytes.functional import dequantize_4bit

    codes, state = _bnb_state(given["w"])
    return lambda a: dequantize_4bit(codes, state)


def _bnb_product(op: Op, given: Arguments) -> Compute:
    from bitsandbytes import matmul_4bit

    codes, state = _bnb_state(given["w"])
    return lambda a: matmul_4bit(a["x"], codes.t(), state)


def _bnb_lora(op: Op, given: Arguments) -> Compute:
    product = _bnb_product(op, given)

    def compute(a: Arguments) -> Any:
        s = a["x"] @ a["lora_a"].to(a["x"].dtype).T
        return product(a) + a["scale"] * (s @ a["lora_b"].to(s.dtype).T), s

    return compute


def _bnb_adamw(op: Op, given: Arguments) -> Compute:
    from bitsandbytes.functional import optimizer_update_32bit

    rate, step = float(given["lr"]), int(given["step"]) + 1

    def compute(a: Arguments) -> Any:
        optimizer_update_32bit(
            "adam", a["grads"], a["params"], a["m"], 0.9, 1e-8, step, rate,
            state2=a["v"], beta2=0.999, weight_decay=0.01,
        )  # fmt: skip
        return a["params"], a["m"], a["v"]

    return compute


def _unsloth(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"unsloth.kernels.{module}"), name)


def _unsloth_rms_norm(op: Op, given: Arguments) -> Compute:
    function = _unsloth("rms_layernorm", "Fast_RMS_Layernorm")
    return lambda a: function.apply(a["x"], a["weight"].detach(), a["eps"], False)


def _unsloth_swiglu(op: Op, given: Arguments) -> Compute:
    function = _unsloth("swiglu", "swiglu_fg_kernel")
    return lambda a: function(a["gate"][None], a["up"][None])[0]


def _unsloth_cross_entropy(op: Op, given: Arguments) -> Compute:
    function = _unsloth("cross_entropy_loss", "Fast_CrossEntropyLoss")
    return lambda a: function.apply(a["logits"], a["targets"], 0, 0).sum()


_TORCH = {"attention": _sdpa, "rope": _rotate, "adamw": _fused_adamw}
_INDEXED = "weight decoded by plain indexing"
_KEPT = "weight kept decoded from the forward pass"
OTHERS: dict[str, tuple[Implementation, ...]] = {
    "rms_norm": (
        Implementation(LIGER, _liger_rms_norm),
        Implementation(UNSLOTH, _unsloth_rms_norm, frozen=True),
    ),
    "rms_norm_residual": (Implementation(LIGER, _liger_added_rms_norm),),
    "layer_norm": (Implementation(LIGER, _liger_layer_norm),),
    "swiglu": (
        Implementation(LIGER, _liger_swiglu, spends=True),
        Implementation(UNSLOTH, _unsloth_swiglu, passes=("forward",)),
    ),
    "rope": (Implementation(LIGER, _liger_rope),),
    "cross_entropy": (
        Implementation(
            LIGER, _liger_cross_entropy, overwrites=("logits",),
            gradient=_liger_cross_entropy_gradient,
            backward_note="computes the loss with the gradient, in one launch",
        ),
        Implementation(UNSLOTH, _unsloth_cross_entropy, passes=("forward",)),
    ),
    "linear_cross_entropy": (
        Implementation(LIGER, _liger_linear_cross_entropy, passes=("forward",)),
    ),
    "nf4_quantize": (Implementation(BITSANDBYTES, _bnb_quantize),),
    "nf4_dequantize": (Implementation(BITSANDBYTES, _bnb_dequantize),),
    "nf4_gemm": (Implementation(BITSANDBYTES, _bnb_product),),
    "lora": (Implementation(BITSANDBYTES, _bnb_lora, "its product, adapters in torch as peft has them"),),
    "adamw": (Implementation(BITSANDBYTES, _bnb_adamw),),
}  # fmt: skip


def implementations(op: Op, device: str) -> Iterator[Implementation]:
    """Yield what an op is compared with on a device, whether or not it is installed."""
    if op.torch_baseline is not None:
        decodes = op.name in ("nf4_dequantize", "nf4_gemm", "lora")
        notes = (_INDEXED, _KEPT) if decodes else ("", "")
        yield Implementation(TORCH, _TORCH.get(op.name, _baseline), *notes)
    for other in OTHERS.get(op.name, ()):
        # Liger and Unsloth are Triton alone: there is nothing of theirs to run on a CPU
        if other.package == BITSANDBYTES or device.startswith("cuda") or runtime.backend() == "ptx":
            yield other
