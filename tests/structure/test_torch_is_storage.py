"""PyTorch gives storage, streams and graphs, never math: shown on the syntax tree."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "entrenar"

ALLOWED = {
    # types and devices
    "Tensor", "Size", "dtype", "device", "Generator", "__version__", "version", "version.cuda", "version.hip",
    "float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool",
    "finfo", "finfo.eps", "iinfo", "is_tensor", "from_numpy", "as_tensor", "tensor", "frombuffer",
    # storage
    "empty", "empty_like", "empty_strided", "zeros", "zeros_like", "full", "UntypedStorage", "strided",
    "contiguous_format", "get_num_threads", "set_num_threads",
    # streams, graphs, memory
    "cuda", "cuda.is_available", "cuda.Stream", "cuda.Event", "cuda.stream", "cuda.current_stream",
    "cuda.default_stream", "cuda.device", "cuda.device_count", "cuda.current_device", "cuda.set_device",
    "cuda.synchronize", "cuda.get_device_name", "cuda.get_device_properties", "cuda.get_device_capability",
    "cuda.mem_get_info", "cuda.memory_allocated", "cuda.max_memory_allocated", "cuda.memory_reserved",
    "cuda.max_memory_reserved", "cuda.reset_peak_memory_stats", "cuda.empty_cache", "cuda.CUDAGraph",
    "cuda.graph", "cuda.graph_pool_handle", "cuda.is_current_stream_capturing", "cuda.OutOfMemoryError",
    "cuda.ExternalStream", "cuda.is_bf16_supported",
    "cpu", "distributed",
    # seeing which of the above torch runs, for the recorder of graphs
    "utils._python_dispatch.TorchDispatchMode",
}  # fmt: skip

# Methods that only compute. A name that NumPy arrays share is banned only where no NumPy is imported.
MATH_METHODS = {
    "addmm", "addmm_", "baddbmm", "bmm", "mm", "mv", "matmul", "addcmul_", "addcdiv_", "lerp_", "softmax",
    "log_softmax", "sigmoid", "sigmoid_", "relu", "relu_", "tanh_", "exp_", "log_", "sqrt_", "rsqrt", "rsqrt_",
    "mul_", "div_", "sub_", "neg_", "clamp_", "clamp", "clamp_min", "clamp_max", "backward_", "requires_grad_",
    "logsumexp", "index_add_", "index_add", "scatter_add_", "scatter_add", "masked_fill", "masked_fill_",
    "index_select", "gather", "sub", "div", "mul", "einsum", "norm", "erf", "pow_", "uniform_", "normal_",
}  # fmt: skip
SHARED_METHODS = {
    "sum",
    "mean",
    "max",
    "min",
    "argmax",
    "argmin",
    "dot",
    "cumsum",
    "prod",
    "std",
    "var",
    "sort",
}


def chain(node: ast.AST) -> list[str] | None:
    """Return ``["torch", "cuda", "Stream"]`` for ``torch.cuda.Stream``, None where it is no such chain."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else None


def torch_uses(tree: ast.AST) -> list[tuple[int, str]]:
    """Return (line, dotted name under torch) for the longest chain at each use."""
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            names = chain(node)
            if names and names[0] == "torch" and len(names) > 1:
                found.append((node.lineno, ".".join(names[1:])))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            base = (node.module or "").partition(".")[2]
            found += [(node.lineno, f"{base}.{a.name}".lstrip(".")) for a in node.names]
        elif isinstance(node, ast.Import):
            found += [
                (node.lineno, a.name.partition(".")[2])
                for a in node.names
                if a.name.startswith("torch.")
            ]
    return found


def is_allowed(name: str) -> bool:
    """A chain is allowed when it is listed, or is an attribute of a listed type or dtype."""
    parts = name.split(".")
    if parts[0] == "distributed":
        return True
    if parts[0] == "cuda":
        return ".".join(parts[:2]) in ALLOWED
    return parts[0] in ALLOWED or name in ALLOWED


def violations(source: str, where: str) -> list[str]:
    """Return a sentence for each use of torch, or of a tensor method, that computes."""
    tree = ast.parse(source)
    wrong = [
        f"{where}:{line}: torch.{name}" for line, name in torch_uses(tree) if not is_allowed(name)
    ]
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    if "torch" not in imported:
        return wrong
    banned = MATH_METHODS | (set() if "numpy" in imported else SHARED_METHODS)
    modules = {"np", "numpy", "torch", "tl", "math", "triton", "optable", "ops", "operator"}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in banned
        ):
            names = chain(node.func)
            if names is None or names[0] not in modules:
                wrong.append(f"{where}:{node.lineno}: .{node.func.attr}()")
    return wrong


def modules() -> list[Path]:
    skipped = {
        "emulator",
        "testing.py",
        "testing",
    }  # runs inside Triton's driver; compares against torch
    return sorted(
        p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE).parts[0] not in skipped
    )


def jit_free(source: str) -> str:
    """Drop @triton.jit functions: their bodies are Triton, where ``x.sum()`` is not torch's."""
    tree = ast.parse(source)
    kept = [
        node
        for node in tree.body
        if not (
            isinstance(node, ast.FunctionDef)
            and any("jit" in ast.unparse(d) for d in node.decorator_list)
        )
    ]
    return ast.unparse(ast.Module(body=kept, type_ignores=[]))


def is_baseline(node: ast.AST) -> bool:
    """A row names torch's own op as the thing to compare with; only such functions may compute."""
    return isinstance(node, ast.FunctionDef) and "baseline" in node.name


def test_torch_is_used_as_storage_only() -> None:
    wrong = []
    for path in modules():
        source = jit_free(path.read_text())
        if path.parent.name == "optable":
            kept = [node for node in ast.parse(source).body if not is_baseline(node)]
            source = ast.unparse(ast.Module(body=kept, type_ignores=[]))
        wrong += violations(source, str(path.relative_to(PACKAGE.parent)))
    assert wrong == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ndef f(a, b):\n    return torch.matmul(a, b)",
        "import torch.nn.functional as F",
        "from torch.nn import functional",
        "import torch\nx = torch.autograd.grad",
        "import torch\ndef f(a, b):\n    return a.mm(b)",
        "import torch\ndef f(a):\n    return a.sum()",
        "import torch\ndef f(a):\n    a.mul_(2)",
        "import torch\nx = torch.optim.AdamW",
        "import torch\ndef f(a):\n    return torch.cuda.amp.autocast()",
    ],
)
def test_a_planted_violation_is_found(source: str) -> None:
    assert len(violations(source, "planted")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.empty((3,), dtype=torch.float32).copy_(y)",
        "import torch\ns = torch.cuda.Stream(device=0)",
        "import numpy as np\nimport torch\nx = np.ones(3).sum()",
    ],
)
def test_lawful_use_is_not_reported(source: str) -> None:
    assert violations(source, "planted") == []
