"""The flat arena: all trainable parameters in one buffer, and so their gradients and moments.

An optimiser step, a norm, an all-reduce or a checkpoint write is then one operation, however many
layers there are: two launches for norm, clip factor and skip flag, and for each group of parameters
one for AdamW and one that advances its step counter.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from entrenar.autograd.stream import Stream, current_stream
from entrenar.autograd.tape import wrap
from entrenar.autograd.tensor import Tensor
from entrenar.errors import CheckpointError, ConfigError
from entrenar.optable import call

__all__ = ["Arena"]

# Views start at multiples of 16 bytes, so that kernels may load them with 128-bit accesses.
_ALIGNMENT = 4
_BUFFERS = ("params", "grads", "m", "v")
_SAVED = ("params", "m", "v")


class Arena:
    """Parameters, gradients and AdamW's moments as views of four flat float32 buffers.

    Parameters that are decayed come first, those that are not after them, so that each group is a
    range. The few elements of padding between views stay zero in all four.

    Args:
        shapes: Name to shape of each parameter.
        device: Where the buffers lie.
        decays: Whether a parameter of this name is decayed; every one is where None.

    Attributes:
        params, grads, m, v: The buffers, float32 [n].
        step: int64 [groups], optimiser steps completed, on the device.
        skipped: int64 [1], steps that changed nothing because the norm was not finite, on the device.
        tensors: Name to parameter: a leaf whose ``data`` and ``grad`` are views.
        groups: (first element, one past the last, whether decayed) of each group that is not empty.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        device: str | torch.device = "cpu",
        decays: Callable[[str], bool] | None = None,
    ) -> None:
        places: dict[str, int] = {}
        self.groups: list[tuple[int, int, bool]] = []
        total = 0
        for decayed in (True, False):
            start = total
            for name, shape in shapes.items():
                if (decays is None or bool(decays(name))) is decayed:
                    places[name] = total
                    total += -(-int(np.prod(shape)) // _ALIGNMENT) * _ALIGNMENT
            if total > start:
                self.groups.append((start, total, decayed))
        self.groups = self.groups or [(0, 0, True)]
        self.params, self.grads, self.m, self.v = (
            torch.zeros(total, dtype=torch.float32, device=device) for _ in _BUFFERS
        )
        self.step = torch.zeros(len(self.groups), dtype=torch.int64, device=device)
        self.skipped = torch.zeros(1, dtype=torch.int64, device=device)
        self._places = {name: (places[name], tuple(shape)) for name, shape in shapes.items()}
        self.tensors = {name: self._parameter(name) for name in shapes}

    def _view(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        start, shape = self._places[name]
        return buffer[start : start + int(np.prod(shape))].view(shape)

    def _parameter(self, name: str) -> Tensor:
        tensor = Tensor(self._view(self.params, name), requires_grad=True, name=name)
        tensor.grad = self._view(self.grads, name)
        return tensor

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Everything a training step reads and writes here: what a captured graph holds on to."""
        return (self.params, self.grads, self.m, self.v, self.step, self.skipped)

    @property
    def nbytes(self) -> int:
        """Bytes of parameters, gradients and both moments."""
        return sum(t.numel() * t.element_size() for t in (self.params, self.grads, self.m, self.v))

    def zero_grad(self) -> None:
        """Set every gradient to zero, in place, on the current stream."""
        call("fill_", self.grads, 0.0, stream=current_stream(self.grads.device))

    def update(
        self,
        lr: torch.Tensor,
        max_norm: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> tuple[Tensor, Tensor]:
        """Clip by the global norm and take one AdamW step, on the current stream, without waiting.

        Where the norm is not finite, parameters, moments and step counters stay as they are and
        ``skipped`` becomes one more.

        Args:
            lr: float32 [1] on the arena's device.
            max_norm: Largest norm of the gradient; None does not clip.
            betas: Decay rates of the moments.
            eps: Added to the root of the second moment; above 0, or the padding would become NaN.
            weight_decay: Decoupled decay of the group that is decayed.

        Returns:
            The norm before clipping, float32 [1], and whether the step was skipped, int32 [1]; both
            on the device.

        Raises:
            ConfigError: A setting is out of range.
        """
        if not eps > 0:
            raise ConfigError(f"update: eps is {eps}, wanted above 0", "")
        stream = current_stream(self.grads.device)
        norm, factor, skip = call("clip_factor", self.grads, max_norm, stream=stream)
        self.adamw(stream, lr, betas, eps, weight_decay, factor, skip)
        return wrap(norm, stream), wrap(skip, stream)

    def adamw(
        self,
        stream: Stream,
        lr: torch.Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        factor: torch.Tensor | None,
        skip: torch.Tensor | None,
    ) -> None:
        """Take one AdamW step with a factor on the gradient and a skip flag from the device."""
        for number, (start, stop, decayed) in enumerate(self.groups):
            call(
                "adamw_step",
                *(getattr(self, name)[start:stop] for name in _BUFFERS),
                self.step[number : number + 1],
                lr,
                beta1=betas[0],
                beta2=betas[1],
                eps=eps,
                weight_decay=weight_decay if decayed else 0.0,
                grad_scale=factor,
                skip=skip,
                skipped=self.skipped if number == 0 else None,
                stream=stream,
            )

    # state on disk

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of ``params.NAME``, ``m.NAME``, ``v.NAME`` and both counters."""
        current_stream(self.params.device).synchronize()
        state = {
            f"{buffer}.{name}": np.array(self._view(getattr(self, buffer), name).cpu().numpy())
            for buffer in _SAVED
            for name in self.tensors
        }
        return {
            **state,
            "step": np.array(self.step.cpu().numpy()),
            "skipped": np.array(self.skipped.cpu().numpy()),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over what :meth:`state_dict` returned; gradients stay.

        Raises:
            CheckpointError: A name is missing or not expected, or an array has another shape or
                dtype; nothing has changed then.
        """
        targets = {
            f"{buffer}.{name}": self._view(getattr(self, buffer), name)
            for buffer in _SAVED
            for name in self.tensors
        }
        targets |= {"step": self.step, "skipped": self.skipped}
        if targets.keys() != state.keys():
            names = sorted(targets.keys() ^ state.keys())
            raise CheckpointError(
                f"the state has not the arena's names: {', '.join(names[:3])} "
                f"{'is' if len(names) == 1 else 'are'} in one of them only",
                "it belongs to other parameters",
            )
        for name, target in targets.items():
            source = torch.from_numpy(np.array(state[name]))
            if source.shape != target.shape or source.dtype != target.dtype:
                raise CheckpointError(
                    f"{name} is {source.dtype} {tuple(source.shape)}, wanted "
                    f"{target.dtype} {tuple(target.shape)}",
                    "it belongs to other parameters",
                )
        for name, target in targets.items():
            target.copy_(torch.from_numpy(np.array(state[name])))

    def save(self, path: str | Path) -> None:
        """Write the state to a safetensors file, which takes its name when it is complete.

        Raises:
            CheckpointError: The disk refuses; a file that was there is untouched.
        """
        path = Path(path)
        with _replacing(path) as temporary:
            save_file(self.state_dict(), temporary)

    def load(self, path: str | Path) -> None:
        """Read the state from a safetensors file.

        Raises:
            CheckpointError: It cannot be read or belongs to other parameters; nothing has changed.
        """
        try:
            state = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}", "") from error
        self.load_state_dict(state)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}", "free some disk space") from error
    finally:
        temporary.unlink(missing_ok=True)
