"""Kernel sources: what every product states, and which of Triton's functions they rest on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "entrenar" / "kernels"


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield every ``tl.name(...)`` of the package with the place it is at."""
    for path in sorted(KERNELS.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("tl."):
                yield f"{path.name}:{node.lineno}", node


def test_every_product_states_its_precision() -> None:
    """https://github.com/triton-lang/triton/issues/1800: without it float32 operands lose 13 bits."""
    products = [(at, call) for at, call in calls() if ast.unparse(call.func) == "tl.dot"]
    assert len(products) > 10
    for at, call in products:
        stated = {k.arg: ast.unparse(k.value) for k in call.keywords}.get("input_precision")
        assert stated in ("'ieee'", "PRECISION"), at


@pytest.mark.parametrize("name", ["libdevice", "tl.math", "tl.extra", "tanh", "triton.autotune"])
def test_functions_that_move_between_versions_are_not_used(name: str) -> None:
    """https://github.com/triton-lang/triton/issues/4938, and the interpreter has none of them."""
    for path in sorted(KERNELS.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute | ast.ImportFrom | ast.Import):
                text = ast.unparse(node)
                assert name not in text, f"{path.name}:{node.lineno}: {text}"
