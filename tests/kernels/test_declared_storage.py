"""What a launch says it reads and writes is what its kernel loads and stores: hazards are found by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from entrenar import runtime
from entrenar.optable import OPS, call
from entrenar.optable.row import Op, Sample
from entrenar.testing import to_storage

# Declared and not always touched, since values on the device decide, by launcher.
UNTOUCHED = {
    "adamw_step": "a step that is skipped leaves parameters and moments as they are",
    "clip_grad_norm": "a factor of 1 leaves the gradients as they are",
    "nf4_quantize": "the status is written where a weight is not finite",
    "causal_cross_entropy_forward": "rows outside the window have no target that is read",
}


class Watched:
    """Pairs each announced launch with the bytes its kernel touched, by the storage they lie in."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.run = driver, driver.run
        self.record: runtime.LaunchRecord | None = None
        self.found: list[tuple[runtime.LaunchRecord, dict[int, tuple[int, int]]]] = []

    def announced(self, record: runtime.LaunchRecord) -> None:
        self.record = record

    def __call__(self, metadata: Any, grid: Any, values: Any, types: Any, names: Any) -> None:
        assert self.record is not None, "a launch was not announced"
        self.run(metadata, grid, values, types, names)
        buffers = self.driver.last.counters["distinct"]["buffers"]
        touched: dict[int, tuple[int, int]] = {}
        by_name = dict(zip(names, values, strict=True))
        for name, counts in buffers.items():
            storage = by_name[name.split("/")[0]]
            touched[_root(storage)] = (counts["loaded"], counts["stored"])
        self.found.append((self.record, touched))
        self.record = None


def _root(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def watched(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    if device != "cpu":
        pytest.skip("the emulator counts what is touched")
    from entrenar.emulator import install_driver, uninstall_driver

    driver = install_driver("sm_80", counters=True)
    seen = Watched(driver)
    monkeypatch.setattr(driver, "run", seen)
    with runtime.listening(seen.announced):
        yield seen
    uninstall_driver()


def _passes(op: Op, sample: Sample) -> None:
    """Run forward and gradients of one sample on the backend in force."""
    inputs = {
        name: to_storage(value, "float32", "cpu")
        for name, value in sample.make(np.random.default_rng(0)).items()
    }
    outputs = call(op.forward.name, **inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if op.vjp is not None:
        grads = tuple(torch.ones_like(outputs[i]) for i in op.grad_outputs)
        op.vjp(call, inputs, outputs, grads)


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_nothing_is_touched_that_was_not_declared(watched: Watched, op: Op) -> None:
    samples = [sample for sample in op.samples if sample.small][:3]
    assert samples
    for sample in samples:
        _passes(op, sample)
    assert watched.found
    for record, touched in watched.found:
        reads = {_root(t) for t in record.reads}
        writes = {_root(t) for t in record.writes}
        for storage, (loaded, stored) in touched.items():
            # what a launch writes it may read again: partial sums, say, and what it adds to
            assert not loaded or storage in reads | writes, (
                f"{record.op} reads what it does not say"
            )
            assert not stored or storage in writes, f"{record.op} writes what it does not say"


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_what_is_declared_is_touched(watched: Watched, op: Op) -> None:
    sample = max((s for s in op.samples if s.small), key=_size)
    _passes(op, sample)
    for record, touched in watched.found:
        if record.op in UNTOUCHED:
            continue
        used = {storage for storage, counts in touched.items() if any(counts)}
        for way, tensors in (("read", record.reads), ("written", record.writes)):
            for tensor in tensors:
                assert _root(tensor) in used or not tensor.numel(), (
                    f"{record.op}: {tuple(tensor.shape)} is declared {way} and never touched"
                )


def _size(sample: Sample) -> int:
    values = sample.make(np.random.default_rng(0)).values()
    return sum(value.size for value in values if isinstance(value, np.ndarray))
