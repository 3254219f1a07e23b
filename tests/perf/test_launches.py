"""``python -m perf launches``: a step costs as many launches as it has ops, its replay one."""

from __future__ import annotations

import json

import pytest
import torch

from entrenar.autograd import Stream, Tensor, ops
from entrenar.optable import call
from perf import launches


def test_what_is_counted_is_what_happened() -> None:
    x = Tensor(torch.ones(4))
    with launches.count() as found:
        y = ops.silu(x)  # a launch and its result
        call("add_", y.data, x.data, stream=Stream("cpu"))  # a launch, nothing new
        torch.empty(3)
        y.numpy()
    assert (found["launches"], found["syncs"], found["allocations"]) == (2, 1, 2)
    assert (found["silu_forward"], found["add_"]) == (1, 1)


def test_thirty_layers_clip_and_step_in_four_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert launches.main(["--model", "tiny", "--json", "-"]) == 0
    plain, graphed = json.loads(capsys.readouterr().out)
    assert plain["layers"] == graphed["layers"] == 30
    assert plain["optimiser_and_clip_launches"] == 2
    assert plain["optimiser_and_clip_kernels"] in (4, None)
    assert plain["launches"] > 30 * 20
    assert (graphed["launches"], graphed["syncs"], graphed["allocations"]) == (1, 1, 0)


def test_more_layers_take_no_more_launches_to_update() -> None:
    few, many = launches.measure(1, 4)[0], launches.measure(3, 4)[0]
    assert few["launches"] < many["launches"]
    for key in ("optimiser_and_clip_launches", "optimiser_and_clip_kernels"):
        assert few[key] == many[key]
