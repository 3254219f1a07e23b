"""LoRA adapters of a model, all in one flat arena.

Every A and B is a view into one contiguous buffer, its gradient a view into another, so an optimiser
step, a norm or a checkpoint write is one operation however many layers there are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping

import numpy as np
import torch

from entrenar.autograd import Tensor, no_grad, ops
from entrenar.autograd.arena import Arena
from entrenar.errors import AdapterError, ConfigError
from entrenar.lora.config import LoraConfig, match_targets

__all__ = ["LoraAdapters", "LoraLayer", "peft_key"]

_PARTS = ("lora_A", "lora_B")


@dataclasses.dataclass(frozen=True)
class LoraLayer:
    """The adapter of one linear layer.

    Attributes:
        name: Full module name.
        lora_a: [r, in] float32, a view into the arena, as is its ``grad``.
        lora_b: [out, r] float32, likewise; not scaled.
        scaling: Factor of ``lora_b @ lora_a``.
        dropout: Share of the input dropped in training.
    """

    name: str
    lora_a: Tensor
    lora_b: Tensor
    scaling: float
    dropout: float

    def delta(self) -> torch.Tensor:
        """Return what merging adds to the weight: ``scaling * lora_b @ lora_a``, [out, in] float32."""
        with no_grad():
            return ops.matmul(self.lora_b, self.lora_a, scale=self.scaling).data


class LoraAdapters:
    """Adapters of every targeted layer, A drawn and B zero, so that the model starts unchanged.

    A is uniform within ``±1/sqrt(in)``, which is Kaiming's rule with ``a = sqrt(5)`` as PEFT uses it,
    from NumPy's generator seeded with ``config.seed``.

    Args:
        shapes: Full module name to (out features, in features), of all linear layers of the model.
        config: Rank, scale and targets.
        device: Where the arena lies.

    Attributes:
        arena: The buffers everything lies in.
        params, grads, m, v: The arena's buffers: parameters, gradients, first and second moments;
            flat float32. The few elements of padding between views stay zero in all of them.
        step: int64 [1], optimiser steps completed.
        layers: Adapted module name to its layer, in the model's order.

    Raises:
        AdapterError: A target, or a pattern of ranks or alphas, matches no layer.
        ConfigError: A layer's sizes are not positive.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        config: LoraConfig,
        device: str | torch.device = "cpu",
    ) -> None:
        self.config = config
        names = match_targets(shapes, config.target_modules)
        _check_patterns(names, config)
        places: dict[str, tuple[int, ...]] = {}
        for name in names:
            n_out, n_in = shapes[name]
            if n_out < 1 or n_in < 1:
                raise ConfigError(f"{name} has sizes ({n_out}, {n_in}), wanted at least 1", "")
            rank = config.rank_of(name)
            for part, shape in zip(_PARTS, ((rank, n_in), (n_out, rank)), strict=True):
                places[f"{name}.{part}"] = shape
        self.arena = Arena(places, device)
        self.params, self.grads = self.arena.params, self.arena.grads
        self.m, self.v, self.step = self.arena.m, self.arena.v, self.arena.step
        tensors = self.arena.tensors
        self.layers = {
            name: LoraLayer(
                name,
                tensors[f"{name}.lora_A"],
                tensors[f"{name}.lora_B"],
                config.scaling_of(name),
                config.lora_dropout,
            )
            for name in names
        }
        self._initialise()

    def _initialise(self) -> None:
        rng = np.random.default_rng(self.config.seed)
        for layer in self.layers.values():
            bound = 1.0 / math.sqrt(layer.lora_a.shape[1])
            values = rng.uniform(-bound, bound, layer.lora_a.shape).astype(np.float32)
            layer.lora_a.data.copy_(torch.from_numpy(values))

    @property
    def num_parameters(self) -> int:
        """Trainable parameters, padding of the arena left out."""
        return sum(t.data.numel() for _, t in self._items())

    @property
    def nbytes(self) -> int:
        """Bytes of the arena: parameters, gradients and both moments."""
        return self.arena.nbytes

    def zero_grad(self) -> None:
        """Set every gradient to zero, in place, on the current stream."""
        self.arena.zero_grad()

    def parameters(self) -> list[Tensor]:
        """Return every A and B, in the arena's order."""
        return [tensor for _, tensor in self._items()]

    def _items(self) -> list[tuple[str, Tensor]]:
        return [
            (peft_key(name, part), tensor)
            for name, layer in self.layers.items()
            for part, tensor in zip(_PARTS, (layer.lora_a, layer.lora_b), strict=True)
        ]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of every A and B as float32 ndarrays, under PEFT's names."""
        return {key: np.array(tensor.numpy()) for key, tensor in self._items()}

    def fingerprint(self) -> str:
        """Return a hash of every module's name, scale, A and B: equal where merging them is equal."""
        digest = hashlib.sha256()
        for name, layer in sorted(self.layers.items()):
            digest.update(f"{name} {layer.scaling!r}\n".encode())
            for tensor in (layer.lora_a, layer.lora_b):
                digest.update(repr(tensor.shape).encode() + tensor.numpy().tobytes())
        return digest.hexdigest()

    def grad_dict(self) -> dict[str, np.ndarray]:
        """Return copies of the gradients as float32 ndarrays, under the names of state_dict."""
        return {
            key: np.array(Tensor(tensor.grad).numpy())
            for key, tensor in self._items()
            if tensor.grad is not None
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Overwrite every A and B; gradients and moments stay.

        Raises:
            AdapterError: A key is missing or not expected, or an array has another shape or is not
                finite; nothing has changed then.
        """
        items = dict(self._items())
        check_keys(set(items), set(state))
        arrays = {key: checked_array(key, state[key]) for key in items}
        for key, array in arrays.items():
            if array.shape != items[key].shape:
                raise AdapterError(
                    f"{key} has shape {array.shape}, wanted {items[key].shape}",
                    "the adapter is of another rank or of another model",
                )
        for key, array in arrays.items():
            items[key].data.copy_(torch.from_numpy(array))


def _check_patterns(names: list[str], config: LoraConfig) -> None:
    """Refuse a pattern that no adapted module fits: a misspelt one would change nothing."""
    patterns = [pattern for pattern, _ in (*config.rank_pattern, *config.alpha_pattern)]
    for pattern in patterns:
        if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
            raise AdapterError(
                f"the pattern {pattern!r} fits none of the adapted modules",
                f"they are {names[0]}, ...",
            )


def peft_key(name: str, part: str) -> str:
    """Return PEFT's name of ``lora_A`` or ``lora_B`` of a module."""
    return f"base_model.model.{name}.{part}.weight"


def check_keys(wanted: set[str], found: set[str]) -> None:
    """Refuse a set of tensor names that is not the one wanted, naming the first few that differ."""
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    if not missing and not extra:
        return
    parts = []
    for label, keys in (("lacks", missing), ("has unexpected", extra)):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            parts.append(f"{label} {', '.join(keys[:3])}{more}")
    raise AdapterError(
        f"the adapter {'; it '.join(parts)}",
        "names must be those of the model's targeted modules, such as "
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
    )


def checked_array(key: str, array: np.ndarray) -> np.ndarray:
    """Return an array as contiguous float32, refusing what is not finite."""
    array = np.ascontiguousarray(array, dtype=np.float32)
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        where = tuple(int(i) for i in bad[0])
        raise AdapterError(f"{key} holds {array[where]} at {where}, wanted finite values", "")
    return array
