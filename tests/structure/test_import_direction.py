"""Layers import downwards only, and the oracles and kernels stay apart."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "entrenar"

# Position in the stack: a layer imports those below it, never one beside or above it.
RANK = {
    "errors": 0,
    "checks": 1,
    "runtime": 2,
    "reference": 2,
    "emulator": 2,
    "cpu": 3,
    "kernels": 3,
    "testing": 4,
    "optable": 5,
    "autograd": 6,
    "quant": 7,
    "lora": 7,
    "transformer": 8,
    "finetune": 9,
    "cli": 10,
    "__main__": 11,
    "gpu": 1,
}
# Rank alone would allow these.
FORBIDDEN = {("kernels", "reference")}
THIRD_PARTY = {
    "reference": {"numpy"},
    "cpu": {"numpy"},
    "errors": set(),
    "checks": set(),
}


def imports(source: str, module: str) -> list[tuple[int, str]]:
    """Return (line, absolute name) of everything a module imports, at any depth of its code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: -node.level]
                base = ".".join([*parent, base]) if base else ".".join(parent)
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def violations(source: str, module: str) -> list[str]:
    """Return a sentence for each import of ``module`` that the house does not allow."""
    parts = module.split(".")
    layer = parts[1] if len(parts) > 1 else "__init__"
    wrong = []
    for line, name in imports(source, module):
        root, _, rest = name.partition(".")
        if root != "entrenar":
            allowed = THIRD_PARTY.get(layer)
            if allowed is not None and root not in allowed | sys.stdlib_module_names:
                wrong.append(f"{module}:{line}: {layer} imports {root}")
            continue
        target = rest.partition(".")[0]
        if not target or target == layer or target not in RANK:
            continue  # the package itself (its version), its own layer, or a lazily named attribute
        if layer == "gpu" and target != "errors":
            wrong.append(f"{module}:{line}: gpu imports {target}")
        elif RANK[target] >= RANK[layer] or (layer, target) in FORBIDDEN:
            wrong.append(f"{module}:{line}: {layer} imports {target}")
    return wrong


def module_name(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts[-1] = "__init__"
    return ".".join(parts)


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def test_every_module_has_a_layer() -> None:
    layers = {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in modules()}
    assert layers <= set(RANK)


def test_layers_import_downwards_only() -> None:
    wrong = [v for path in modules() for v in violations(path.read_text(), module_name(path))]
    assert wrong == []


def test_package_root_imports_nothing_heavy() -> None:
    roots = {
        name.partition(".")[0]
        for _, name in imports((PACKAGE / "__init__.py").read_text(), "entrenar")
    }
    assert roots <= {"__future__", "importlib", "typing"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("entrenar.kernels.gemm", "from entrenar.reference import gemm"),
        ("entrenar.kernels.gemm", "import entrenar.autograd.tape"),
        ("entrenar.reference.gemm", "import torch"),
        ("entrenar.reference.gemm", "def f():\n    from entrenar.kernels import gemm"),
        ("entrenar.reference.gemm", "from ..runtime import backend"),
        ("entrenar.lora.layer", "from entrenar.quant import nf4"),
        ("entrenar.autograd.tape", "from entrenar.finetune.config import InstructConfig"),
        ("entrenar.runtime", "from entrenar import optable"),
        ("entrenar.gpu.ledger", "from entrenar import runtime"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("entrenar.optable.gemm", "from entrenar.reference import gemm"),
        ("entrenar.autograd.ops.gemm", "from entrenar.optable import call"),
        ("entrenar.reference.gemm", "import numpy as np\nfrom entrenar.errors import DataError"),
        ("entrenar.cli.train", "from entrenar import __version__"),
    ],
)
def test_a_lawful_import_is_not_reported(module: str, source: str) -> None:
    assert violations(source, module) == []
