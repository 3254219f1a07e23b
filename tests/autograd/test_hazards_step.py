"""Hazards over a whole training step with weights decoded ahead: no false alarm, every missing wait found.

Each wait of a step is left out in turn. Whether the step is then still ordered is worked out beside the
detector, from a log of the step, by transitive closure over all its operations and a comparison of every
pair: what the detector reports must be exactly that.
"""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from entrenar import InstructConfig, InstructPipeline, TransformerConfig, runtime
from entrenar.autograd import Event, Stream
from entrenar.autograd.hazards import detect_hazards
from entrenar.errors import StreamHazardError
from entrenar.transformer.model import Transformer

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "peft_tiny_llama.npz"
PAIRS = [([5, 9, 17], [8, 44, 2]), ([7], [12, 30])]


@pytest.fixture(scope="module")
def step() -> Callable[[], Any]:
    """A QLoRA step of two micro-batches that has settled: weights are decoded ahead in known order."""
    with np.load(GOLDEN) as data:
        config = TransformerConfig.from_hf(json.loads(str(data["config"])))
        weights = [(k.removeprefix("weight/"), torch.from_numpy(data[k])) for k in data.files
                   if k.startswith("weight/")]  # fmt: skip
    model = Transformer(config, weights, quantize="nf4", device="cpu", decode_ahead=True)
    settings = InstructConfig(
        lora_rank=4, quantize_nf4=True, lora_dropout=0.1, device="cpu", checkpointing=False
    )
    pipeline = InstructPipeline(model, settings)

    def take() -> Any:
        return pipeline.train_batch(PAIRS)

    for _ in range(3):
        take()
    return take


class Waits:
    """Stands in for ``Stream.wait_event``: counts, and leaves out the one of a number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen, self.left_out = 0, -1
        real = Stream.wait_event

        def wait_event(stream: Stream, event: Event) -> None:
            number, self.seen = self.seen, self.seen + 1
            if number != self.left_out:
                real(stream, event)

        monkeypatch.setattr(Stream, "wait_event", wait_event)


@dataclasses.dataclass
class Use:
    """One launch's use of one piece of storage."""

    at: int
    stream: Stream
    writes: bool
    elements: set[int]


class Log:
    """Everything that two steps announced, in order."""

    def __init__(self) -> None:
        self.items: list[tuple[str, Any, Any]] = []
        self.uses: dict[int, list[Use]] = defaultdict(list)
        self.kept: dict[int, set[Stream]] = defaultdict(set)
        self.freed: list[tuple[int, int]] = []
        self.events: list[Any] = []
        self._names: dict[int, int] = {}

    def launch(self, record: runtime.LaunchRecord) -> None:
        for tensors, writes in ((record.reads, False), (record.writes, True)):
            for t in tensors:
                step = t.element_size()
                inside = np.arange(t.untyped_storage().nbytes() // step)
                view = np.lib.stride_tricks.as_strided(
                    inside[t.storage_offset() :], t.shape, [8 * s for s in t.stride()]
                )
                elements = {int(i) * step for i in view.ravel()} if t.numel() else set()
                use = Use(len(self.items), record.stream, writes, elements)
                self.uses[self._name(t)].append(use)
        self.items.append(("launch", record.stream, record.op))

    def sync(self, record: runtime.SyncRecord) -> None:
        if record.kind == "keep":
            self.kept[self._name(record.storage)].add(record.stream)
        else:
            self.events.append(record.event)  # so that no other event takes its identity
            self.items.append((record.kind, record.stream, id(record.event)))

    def _name(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._names:
            self._names[key] = name = len(self._names) + len(self.freed) * 1_000_000
            weakref.finalize(storage, self._free, key, name)
        return self._names[key]

    def _free(self, key: int, name: int) -> None:
        self.freed.append((len(self.items), name))
        del self._names[key]

    def is_ordered(self, left_out: int) -> bool:
        """Whether every pair is ordered without one of the waits: by closure over all operations."""
        before = [0] * (len(self.items) + 1)
        last: dict[Stream, int] = {}
        recorded: dict[int, int] = {}
        host = waits = 0
        ends: list[tuple[dict[Stream, int], int]] = []
        for at, (kind, stream, what) in enumerate(self.items):
            ends.append((dict(last), host))
            past = host
            if stream in last:
                past |= before[last[stream]] | 1 << last[stream]
            if kind == "wait":
                if waits != left_out and what in recorded:
                    past |= before[recorded[what]] | 1 << recorded[what]
                waits += 1
            before[at] = past
            last[stream] = at
            if kind == "record":
                recorded[what] = at
            elif kind == "synchronize":
                host |= past
        ends.append((dict(last), host))
        return self._pairs_ordered(before) and self._frees_ordered(before, ends)

    def _pairs_ordered(self, before: list[int]) -> bool:
        for uses in self.uses.values():
            for i, second in enumerate(uses):
                for first in uses[:i]:
                    apart = first.stream is second.stream or not (first.writes or second.writes)
                    if apart or before[second.at] >> first.at & 1:
                        continue
                    if first.elements & second.elements:
                        return False
        return True

    def _frees_ordered(self, before: list[int], ends: list[Any]) -> bool:
        for at, name in self.freed:
            uses, (last, host) = self.uses.get(name, []), ends[at]
            if not uses:
                continue
            home = uses[0].stream
            past = host | before[last[home]] | 1 << last[home]
            for use in uses:
                if use.stream not in self.kept[name] and not past >> use.at & 1:
                    return False
        return True


def test_a_whole_step_raises_no_false_alarm(step: Callable[[], Any]) -> None:
    with detect_hazards() as detector:
        for _ in range(2):
            step()
    assert detector.launches > 200
    assert detector.waits > 100


def test_every_wait_that_is_needed_is_missed_when_left_out(
    step: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, counts: Callable[[int, int], int]
) -> None:
    """https://github.com/paiml/aprender/issues/2251: one wait was missing, and steps turned into NaN."""
    waits, log = Waits(monkeypatch), Log()
    with runtime.listening(log.launch, log.sync):
        step()
        in_a_step = waits.seen
        step()
    needed = [n for n in range(in_a_step) if not log.is_ordered(n)]
    assert log.is_ordered(-1)
    every = counts(3, 1)
    found = []
    for number in range(0, in_a_step, every):
        waits.seen, waits.left_out = 0, number
        try:
            with detect_hazards():
                step()
                waits.left_out = -1
                step()
        except StreamHazardError:
            found.append(number)
        finally:
            waits.left_out = -1
        step()
    assert found == [n for n in needed if n % every == 0]
    # the others are redundant: what they wait for, another wait orders too
    assert len(needed) > in_a_step // 4
