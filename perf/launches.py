"""``python -m perf launches``: launches, waits of the host and allocations of a training step.

The step is a small Llama with adapters, whole: embedding, blocks, loss, backward, clip and AdamW. It is
counted as the tape runs it, and as a replayed graph. On the CPU a launch is a call of the op table and an
allocation a piece of storage; on a GPU they are kernels and torch's own count.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from entrenar import runtime
from entrenar.autograd import Tape, Tensor, ops
from entrenar.autograd.arena import Arena
from entrenar.autograd.graph import Graph
from entrenar.optable.dispatch import recorded
from perf.output import write_json

__all__ = ["TinyLlama", "count", "main", "measure"]

_ALLOCATING = (
    "aten::empty",
    "aten::clone",
    "aten::_to_copy",
    "aten::zeros",
    "aten::full",
    "aten::new_",
)


class TinyLlama:
    """A Llama-like decoder with LoRA on q and v, every size small, on any device.

    Args:
        layers: Blocks.
        device: Where it lies.
        dropout: Of the adapters' inputs.
        max_norm: Largest gradient norm, or None.
        overwrite: The tape overwrites activations that are dead.

    Attributes:
        arena: The adapters.
        vocab: Tokens of the vocabulary.
    """

    def __init__(
        self,
        layers: int = 2,
        device: str = "cpu",
        dropout: float = 0.0,
        max_norm: float | None = 1.0,
        overwrite: bool = True,
    ) -> None:
        self.layers, self.hidden, self.heads, self.kv_heads = layers, 32, 4, 2
        self.width, self.inner, self.vocab, self.rank, self.context = 8, 64, 97, 4, 64
        self.dropout, self.max_norm, self.overwrite = dropout, max_norm, overwrite
        self.device = torch.device(device)
        rng = np.random.default_rng(0)

        def frozen(*shape: int) -> Tensor:
            values = rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5
            return Tensor(torch.from_numpy(values).to(self.device))

        kv = self.kv_heads * self.width
        sizes = {"q": (self.hidden, self.hidden), "k": (kv, self.hidden), "v": (kv, self.hidden),
                 "o": (self.hidden, self.hidden), "gate": (self.inner, self.hidden),
                 "up": (self.inner, self.hidden), "down": (self.hidden, self.inner)}  # fmt: skip
        self.embedding = frozen(self.vocab, self.hidden)
        self.weights = [{n: frozen(*s) for n, s in sizes.items()} for _ in range(layers)]
        self.norm = Tensor(torch.ones(self.hidden, device=self.device))
        self.arena = Arena(
            {
                f"{i}.{name}.{part}": (self.rank, self.hidden) if part == "A" else (out, self.rank)
                for i in range(layers)
                for name, out in (("q", self.hidden), ("v", kv))
                for part in "AB"
            },
            self.device,
        )
        for tensor in self.arena.tensors.values():
            tensor.data.copy_(torch.from_numpy(rng.standard_normal(tensor.shape) / 8))
        angles = np.arange(self.context)[:, None] / 10_000 ** (np.arange(4)[None, :] / 4)
        self.cos, self.sin = (
            torch.from_numpy(f(angles).astype(np.float32)).to(self.device) for f in (np.cos, np.sin)
        )
        self.positions = torch.arange(self.context, device=self.device)

    def loss(self, ids: torch.Tensor, targets: torch.Tensor, scale: Any, seed: Any) -> Tensor:
        """Return the summed loss of the rows whose target counts; its gradient is scaled."""
        residual, x = None, ops.embedding(ids, self.embedding)
        for layer in range(self.layers):
            x, residual = self._block(layer, x, residual, seed)
        assert residual is not None
        x = ops.rms_norm_residual(x, residual, self.norm, 1e-6)[0]
        return ops.linear_cross_entropy(x, self.embedding, targets, grad_scale=scale, counted=1)[0]

    def _block(
        self, layer: int, x: Tensor, residual: Tensor | None, seed: Any
    ) -> tuple[Tensor, Tensor]:
        w = self.weights[layer]
        if residual is None:
            h, residual = ops.rms_norm(x, self.norm, 1e-6), x
        else:
            h, residual = ops.rms_norm_residual(x, residual, self.norm, 1e-6)
        q, k, v = (
            self._adapted(layer, "q", h, seed),
            ops.linear(h, w["k"]),
            self._adapted(layer, "v", h, seed),
        )
        q, k, v = (ops.reshape(t, (h.shape[0], -1, self.width)) for t in (q, k, v))
        positions = self.positions[: h.shape[0]]
        q, k = ops.rope(q, k, self.cos, self.sin, positions, inplace=True)
        mixed = ops.reshape(ops.attention(q, k, v), (h.shape[0], -1))
        h, residual = ops.rms_norm_residual(ops.linear(mixed, w["o"]), residual, self.norm, 1e-6)
        inner = ops.swiglu(ops.linear(h, w["gate"]), ops.linear(h, w["up"]))
        return ops.linear(inner, w["down"]), residual

    def _adapted(self, layer: int, name: str, x: Tensor, seed: Any) -> Tensor:
        a, b = (self.arena.tensors[f"{layer}.{name}.{part}"] for part in "AB")
        weight = self.weights[layer][name]
        return ops.lora_linear(x, weight, a, b, 2.0, dropout_p=self.dropout, seed=seed)

    def step(
        self,
        ids: torch.Tensor,
        targets: torch.Tensor,
        lr: torch.Tensor,
        scale: torch.Tensor,
        seed: torch.Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take one training step; return loss sum, gradient norm and whether it was skipped.

        Args:
            ids: int64 [T].
            targets: int64 [T]; -100 does not count.
            lr: float32 [1].
            scale: float32 [1], one over the rows that count.
            seed: int64 [1], of the dropout masks.
        """
        self.arena.zero_grad()
        with Tape(overwrite_activations=self.overwrite) as tape:
            loss = self.loss(ids, targets, scale, seed)
        tape.backward(loss)
        return (loss, *self.arena.update(lr, self.max_norm))

    def batch(self, tokens: int, number: int) -> tuple[Any, ...]:
        """Return the inputs of step ``number`` with that many tokens: another rate and seed each."""
        rng = np.random.default_rng([tokens, number])
        ids = rng.integers(0, self.vocab, tokens + 1)
        targets = np.where(rng.random(tokens) < 0.7, ids[1:], -100)
        return (
            ids[:-1],
            targets,
            1e-2 / (1 + number),
            1.0 / max(int((targets >= 0).sum()), 1),
            number,
        )


class _Allocations(TorchDispatchMode):
    """Counts the storage that torch allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func._schema.name.startswith(_ALLOCATING)
        return func(*args, **(kwargs or {}))


class _Results:
    """Counts the storage of results that calls of the op table allocate on the CPU."""

    def __init__(self) -> None:
        self.count = 0

    def call(
        self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Run one call."""
        result = run()
        given = {t.data_ptr() for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)}
        made = result if isinstance(result, tuple) else (result,)
        self.count += sum(isinstance(t, torch.Tensor) and t.data_ptr() not in given for t in made)
        return result


@contextlib.contextmanager
def count(device: str = "cpu") -> Iterator[collections.Counter[str]]:
    """Count ``launches`` (by op too), ``syncs`` and ``allocations`` inside the block.

    Allocations are those of torch, the tape's own included, where ``runtime.counting`` sees a
    launcher's alone.
    """
    found: collections.Counter[str] = collections.Counter()
    on_gpu = device != "cpu"
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"] if on_gpu else 0
    results, storage = _Results(), _Allocations()
    with contextlib.ExitStack() as stack:
        counts = stack.enter_context(runtime.counting())
        if not on_gpu:
            stack.enter_context(recorded(results))
            stack.enter_context(storage)
        yield found
    found.update(counts.by_op)
    found["launches"], found["syncs"] = counts.launches, counts.waits
    after = torch.cuda.memory_stats(device)["allocation.all.allocated"] if on_gpu else 0
    found["allocations"] = after - before if on_gpu else results.count + storage.count


def kernels_of_update(layers: int) -> int | None:
    """Return the kernels that norm, clip factor and AdamW launch; None where triton is absent.

    The launchers run on the CPU with a runner that executes nothing.
    """
    if not runtime.triton_available() or runtime.interpreting_requested():
        return None
    from entrenar.kernels import _launch, adamw, clip

    arena = TinyLlama(layers).arena
    launched: list[str] = []
    before = os.environ.get("ENTRENAR_BACKEND")
    os.environ["ENTRENAR_BACKEND"] = "ptx"  # CPU storage is refused without a backend for kernels
    try:
        with _launch.launching(lambda op, *rest: launched.append(op)):
            _, factor, skip = clip.clip_factor(arena.grads, 1.0)
            buffers = (arena.params, arena.grads, arena.m, arena.v, arena.step)
            rate = torch.zeros(1)
            adamw.adamw_step(*buffers, rate, grad_scale=factor, skip=skip, skipped=arena.skipped)
    finally:
        os.environ.pop("ENTRENAR_BACKEND")
        if before is not None:
            os.environ["ENTRENAR_BACKEND"] = before
    return len(launched)


def measure(layers: int, tokens: int, device: str = "cpu") -> list[dict[str, Any]]:
    """Return one row for the step as the tape runs it, and one for its replay.

    Args:
        layers: Blocks of the model.
        tokens: Tokens of the batch.
        device: ``"cpu"`` or ``"cuda:N"``.
    """
    rows = []
    for graphed in (False, True):
        model = TinyLlama(layers, device)
        graph = Graph(model.step, device=device, watch=[model.arena])
        for number in range(3 if graphed else 1):
            run = graph if graphed else _plain(model)
            run(*model.batch(tokens, number))[0].item()
        batch = model.batch(tokens, 3)
        with count(device) as found:
            loss = run(*batch)[0]
            loss.item()
        update = found["clip_factor"] + found["adamw_step"]
        rows.append(
            {"mode": "graphed" if graphed else "ungraphed", "model": "tiny", "layers": layers,
             "tokens": tokens, "device": device, "launches": found["launches"],
             "optimiser_and_clip_launches": update,
             "optimiser_and_clip_kernels": 0 if graphed else kernels_of_update(layers), "syncs": found["syncs"],
             "allocations": found["allocations"]}
        )  # fmt: skip
    return rows


def _plain(model: TinyLlama) -> Callable[..., Any]:
    def run(ids: Any, targets: Any, lr: float, scale: float, seed: int) -> Any:
        given = (ids, targets, np.float32([lr]), np.float32([scale]), np.array([seed]))
        return model.step(*(torch.from_numpy(np.asarray(x)).to(model.device) for x in given))

    return run


def main(arguments: list[str]) -> int:
    """Print the rows as a table, or write them as JSON; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m perf launches", description=__doc__)
    parser.add_argument("--model", choices=("tiny",), default="tiny")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", metavar="PATH", help="write rows there; - is standard output")
    options = parser.parse_args(arguments)
    rows = measure(options.layers, options.tokens, runtime.resolve_device(options.device))
    if options.json:
        write_json(rows, options.json, indent=2)
    if options.json == "-":
        return 0
    for row in rows:
        print(
            f"{row['mode']:<10} {row['launches']:>5} launches, of them clip and optimiser "
            f"{row['optimiser_and_clip_launches']} ({row['optimiser_and_clip_kernels']} kernels); "
            f"{row['syncs']} waits; "
            f"{row['allocations']} allocations"
        )
    return 0
