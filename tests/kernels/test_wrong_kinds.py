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
from entrenar.optable import FUNCTIONS, OPS
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
