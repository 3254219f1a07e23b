"""What is no torch tensor in a tensor's place: refused by name before anything is launched."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest
import torch

from entrenar import runtime
from entrenar.errors import DTypeError
from entrenar.optable import FUNCTIONS, OPS, call
from entrenar.testing import to_storage

_FAMILIES = (
    "attention", "cross_entropy", "elementwise", "embedding", "layer_norm", "rms_norm", "rope",
    "softmax", "swiglu",
)  # fmt: skip


def _launcher(function: str) -> Any:
    family = FUNCTIONS[function].family
    return getattr(importlib.import_module(f"entrenar.kernels.{family}"), function)


def _calls() -> list[Any]:
    """Each forward launcher once, with each tensor that it must be given."""
    found = {}
    for op in OPS.values():
        if op.family not in _FAMILIES:
            continue
        parameters = inspect.signature(_launcher(op.forward.name)).parameters
        for name, parameter in parameters.items():
            if parameter.annotation == "torch.Tensor":
                found.setdefault((op.forward.name, name), op)
    return [pytest.param(op, name, id=f"{f}-{name}") for (f, name), op in found.items()]


@pytest.mark.parametrize(("op", "name"), _calls())
def test_named_and_refused(device: str, op: Any, name: str) -> None:
    arguments = op.samples[0].make(np.random.default_rng(0))
    given = {key: to_storage(value, "float32", device) for key, value in arguments.items()}
    assert isinstance(given[name], torch.Tensor)
    launches: list[runtime.LaunchRecord] = []
    array = given[name].cpu().numpy()
    with runtime.listening(launches.append):
        for wrong in (None, array, array.tolist(), 1.0, "text"):
            with pytest.raises(DTypeError, match=f"{op.forward.name}: {name} is "):
                _launcher(op.forward.name)(**{**given, name: wrong})
    assert not launches


def _required(function: str) -> list[str]:
    """Return the arguments of the reference that must be arrays."""
    module = importlib.import_module(f"entrenar.reference.{FUNCTIONS[function].family}")
    parameters = inspect.signature(getattr(module, function)).parameters
    return [name for name, p in parameters.items() if p.annotation == "np.ndarray"]


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_numpy_refuses_them_alike(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/pytorch/pytorch/issues/148259: a generator of tensors is none either."""
    monkeypatch.delenv("ENTRENAR_BACKEND", raising=False)
    arguments = op.samples[0].make(np.random.default_rng(0))
    given = {key: to_storage(value, "float32", "cpu") for key, value in arguments.items()}
    names = _required(op.forward.name)
    assert names or op.name == "nf4_dequantize"  # which takes a weight alone
    for name in names:
        tensor = given[name]
        for wrong in (None, tensor.numpy(), [tensor], (t for t in [tensor])):
            with pytest.raises(DTypeError, match=f"{op.forward.name}: {name} is "):
                call(op.forward.name, **{**given, name: wrong})
