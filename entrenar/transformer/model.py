"""A decoder with its weights: from a checkpoint to hidden states and logits.

Weights are frozen; what trains is an adapter attached to the linears. With ``quantize="nf4"`` every
decoder linear is held in 4 bits, while embedding, norms and the output projection stay dense.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from entrenar import runtime
from entrenar.autograd import (
    DecodeAhead,
    Tensor,
    checkpoint,
    current_stream,
    no_grad,
    ops,
    recording,
)
from entrenar.autograd.ops.nf4_gemm import DecodedWeights
from entrenar.errors import AdapterError, ConfigError, ShapeMismatchError
from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.optable import call
from entrenar.quant import quantize_weight
from entrenar.transformer.block import Block, Rows
from entrenar.transformer.checkpoint import open_checkpoint
from entrenar.transformer.config import TransformerConfig
from entrenar.transformer.kv_cache import KVCache
from entrenar.transformer.linear import Linear, layer_seeds
from entrenar.transformer.rope import RopeTable
from entrenar.transformer.weights import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    check_tensors,
    linear_shapes,
)

if TYPE_CHECKING:
    from entrenar.lora import LoraAdapters
    from entrenar.transformer.tokenizer import Tokenizer

__all__ = ["Transformer"]

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_LOGIT_ROWS = 512
# Share of the free memory that weights decoded for generation may take.
DECODED_SHARE = 0.25


class Transformer:
    """A decoder-only language model.

    Args:
        config: Its sizes.
        weights: (Hugging Face name, tensor) of every weight; consumed one at a time. A decoder linear
            may come in NF4 and is then held as it is.
        quantize: ``"nf4"`` to hold decoder linears in 4 bits, or None.
        dtype: Storage dtype of dense weights and activations; ``"auto"`` is float32 on the CPU and
            bfloat16 on a GPU. float64 is for checking gradients on the CPU.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        double_quant: Quantise the NF4 scales too.
        tokenizer: The model's, or None.
        path: Where it came from, or None.
        stop_token_ids: Ids that end a text; the config's where None.
        decode_ahead: Decode each 4-bit linear on a side stream while the one before computes, which
            takes scratch of two decoded weights. None does so on a GPU; on the CPU it would only cost.

    Attributes:
        dropout_step: Forward passes recorded so far; seeds the adapters' dropout, so a run that
            resumes sets it to what it was.

    Raises:
        CheckpointError: A weight is missing, extra, or of a wrong shape.
        ConfigError: An option is not one of those above.
    """

    def __init__(
        self,
        config: TransformerConfig,
        weights: Iterable[tuple[str, torch.Tensor | NF4Weight]],
        *,
        quantize: str | None = None,
        dtype: str = "float32",
        device: str = "auto",
        double_quant: bool = False,
        tokenizer: Tokenizer | None = None,
        path: Path | None = None,
        stop_token_ids: tuple[int, ...] | None = None,
        decode_ahead: bool | None = None,
    ) -> None:
        self.device = runtime.resolve_device(device)
        self.dtype = _storage_dtype(dtype, self.device)
        if quantize not in (None, "nf4"):
            raise ConfigError(f"quantize is {quantize!r}, wanted 'nf4' or None", "")
        self.tokenizer = tokenizer
        self.path = path
        self.stop_token_ids = config.eos_token_ids if stop_token_ids is None else stop_token_ids
        self.dropout_step = 0
        self._trains: Tensor | None = None
        self._double_quant = double_quant
        self.config = config
        linear_weights = {f"{name}.weight" for name in linear_shapes(config)}
        held: dict[str, Tensor | NF4Weight] = {}
        for name, tensor in weights:
            held[name] = self._hold(name, tensor, quantize if name in linear_weights else None)
            del tensor
        self.quantize = "nf4" if any(isinstance(w, NF4Weight) for w in held.values()) else None
        wanted = self.device != "cpu" if decode_ahead is None else decode_ahead
        self._ahead = DecodeAhead(self.device) if self.quantize and wanted else None
        shapes = {name: tuple(weight.shape) for name, weight in held.items()}
        check_tensors(str(path or "weights"), shapes, config)
        self.config = _settle_tie(config, held)
        self._weights = held
        self._build(held)
        # Any stream may read the weights from now on, so their copies and quantisation are done.
        current_stream(self.device).synchronize()

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        quantize: str | None = None,
        dtype: str = "float32",
        device: str = "auto",
        double_quant: bool = False,
    ) -> Transformer:
        """Load a model from a Hugging Face folder or a GGUF file.

        Args:
            path: The folder or file, on this machine. Of a folder that bitsandbytes quantised to
                NF4, the linears are held as they are, those it left dense too.
            quantize: ``"nf4"`` to hold decoder linears in 4 bits, or None.
            dtype: Storage dtype of dense weights and activations, or ``"auto"``.
            device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
            double_quant: Quantise the NF4 scales too.

        Raises:
            CheckpointError: The checkpoint is missing, incomplete or damaged.
            UnsupportedModelError: Its architecture or format is not implemented.
            ConfigError: Its config or an option is not sensible.
        """
        found = open_checkpoint(path)
        return cls(
            found.config,
            found.stored(),
            quantize=None if found.quantised else quantize,
            dtype=dtype,
            device=device,
            double_quant=double_quant,
            tokenizer=found.tokenizer(),
            path=found.path,
            stop_token_ids=found.stop_token_ids,
        )

    @property
    def embedding(self) -> Tensor:
        """The token embedding [V, H], frozen."""
        return self._embedding

    @property
    def lm_head_weight(self) -> Tensor:
        """The output projection [V, H]; the embedding itself where they are tied."""
        return self._lm_head

    def named_weights(self) -> dict[str, Tensor | NF4Weight]:
        """Return every weight as it is held by its Hugging Face name; norms with their offset."""
        return dict(self._weights)

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (out_features, in_features) of each linear an adapter can target, by full name."""
        return linear_shapes(self.config)

    def num_parameters(self) -> int:
        """Return the number of weights of the model itself, adapters not included."""
        return sum(math.prod(weight.shape) for weight in self._weights.values())

    def layer_seeds(self, seed: int) -> np.ndarray:
        """Return the dropout seed of every linear in a step with this seed, int64 [linears]."""
        return layer_seeds(seed, len(self._linears))

    def nbytes(self) -> int:
        """Return the bytes its weights occupy as they are held."""
        return sum(
            w.nbytes if isinstance(w, NF4Weight) else w.data.numel() * w.data.element_size()
            for w in self._weights.values()
        )

    def attach(self, adapters: LoraAdapters) -> None:
        """Let every linear an adapter names compute with it; earlier adapters are detached.

        Raises:
            AdapterError: It names a linear the model has not, or one of another shape.
        """
        for name, layer in adapters.layers.items():
            linear = self._linears.get(name)
            if linear is None:
                raise AdapterError(
                    f"the adapter targets {name}, which the model has not",
                    "it was made for another model",
                )
            shape = (layer.lora_b.shape[0], layer.lora_a.shape[1])
            if shape != tuple(linear.weight.shape):
                raise AdapterError(
                    f"the adapter's {name} is for {shape}, the model's is "
                    f"{tuple(linear.weight.shape)}",
                    "it was made for another model",
                )
        self.detach_adapters()
        for name, layer in adapters.layers.items():
            self._linears[name].adapter = layer
            self._trains = layer.lora_a

    def detach_adapters(self) -> None:
        """Let every linear compute with its own weight alone."""
        self._trains = None
        for linear in self._linears.values():
            linear.adapter = None

    def hidden(
        self,
        ids: Any,
        positions: Any,
        cu_seqlens: Any = None,
        cache: KVCache | None = None,
        checkpointing: bool = False,
        dropout_seed: int | torch.Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden state of packed rows, after the final norm.

        Where the rope scaling depends on the length, the longest sequence of the call decides how all
        its rows are rotated, as it does in a padded batch of transformers.

        Args:
            ids: int64 [T], token ids of all sequences, one after another; ndarray or torch.
            positions: int64 or int32 [T], place of each row in its own sequence.
            cu_seqlens: int32 [B+1], first row of each sequence, and T; None for one sequence.
            cache: Holds earlier positions of the one sequence these rows continue, and takes
                theirs; only without a tape.
            checkpointing: Keep only each block's inputs and compute it again in backward.
            dropout_seed: Seed of the adapters' dropout. None takes the next of the model's own,
                ``dropout_step``, where a tape records, and applies no dropout elsewhere. A replayed
                graph needs it on the device: int64 [linears], as :meth:`layer_seeds` returns it.

        Returns:
            [T, H].

        Raises:
            ShapeMismatchError: The arguments do not fit together, or a position lies past the
                model's context.
        """
        tokens = self._integers("ids", ids, torch.int64)
        if dropout_seed is None and recording(self._trains):
            dropout_seed = self.dropout_step
            self.dropout_step += 1
        rows = self._rows(tokens, positions, cu_seqlens, cache, dropout_seed)
        if self._ahead is not None:
            self._ahead.begin()
        x, residual = ops.embedding(tokens, self._embedding), None
        if self.config.scales_embedding:
            x = ops.scale(x, self._embedding_scale)
        for block in self._blocks:
            if not checkpointing:
                x, residual = block(x, residual, rows)
            elif residual is None:
                x, residual = checkpoint(functools.partial(block, residual=None, rows=rows), x)
            else:
                x, residual = checkpoint(functools.partial(block, rows=rows), x, residual)
        if cache is not None:
            cache.advance(tokens.shape[0])
        eps = self.config.rms_norm_eps
        if residual is None:
            return ops.rms_norm(x, self._norm, eps)
        return ops.rms_norm_residual(x, residual, self._norm, eps)[0]

    def logits(self, ids: Any) -> np.ndarray:
        """Return the logits of whole sequences.

        Args:
            ids: int [batch, seq], ndarray or nested lists.

        Returns:
            float32 [batch, seq, V] (float64 of a float64 model).

        Raises:
            ShapeMismatchError: ``ids`` is not rectangular, or longer than the context.
        """
        array = _rectangle(ids)
        batch, length = array.shape
        positions = np.tile(np.arange(length, dtype=np.int64), batch)
        cu_seqlens = np.arange(batch + 1, dtype=np.int32) * length
        if not array.size:
            return np.zeros((batch, length, self.config.vocab_size), dtype=np.float32)
        with no_grad():
            hidden = self.hidden(array.reshape(-1), positions, cu_seqlens)
            return self.project(hidden).reshape(batch, length, -1)

    def project(self, hidden: Tensor) -> np.ndarray:
        """Return the logits of hidden states [n, H] as float32 [n, V], on the host.

        Waits for the device.
        """
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        stream = current_stream(self.device)
        hidden.ready_on(stream)
        out = torch.empty((hidden.shape[0], self._lm_head.shape[0]), dtype=wide)
        for start in range(0, hidden.shape[0], _LOGIT_ROWS):
            part = hidden.data[start : start + _LOGIT_ROWS]
            target = out[start : start + _LOGIT_ROWS]
            made = target if self.device == "cpu" else torch.empty_like(target, device=self.device)
            call("matmul", part, self._lm_head.data, trans_b=True, out=made, stream=stream)
            if made is not target:
                target.copy_(made)
        logits = out.numpy()
        cap = self.config.final_logit_softcapping
        if cap:
            logits /= cap
            np.tanh(logits, out=logits)
            logits *= cap
        return logits

    def new_cache(self, capacity: int | None = None) -> KVCache:
        """Return an empty cache for one sequence of at most ``capacity`` positions."""
        return KVCache(self.config, self.dtype, self.device, capacity)

    def decoded_weights(self) -> DecodedWeights | None:
        """Return what keeps the 4-bit linears decoded while a text is generated on a CPU.

        None on a GPU, whose product with one row decodes in passing, in 16 bits, without 4-bit
        linears, and where they would take more than a quarter of the memory that is free.
        """
        numpy = self.device == "cpu" and runtime.backend() == "numpy"
        if not numpy or self.quantize is None or self.dtype not in (torch.float32, torch.float64):
            return None
        wide = 8 if self.dtype == torch.float64 else 4
        wanted = sum(math.prod(shape) for shape in self.linear_shapes().values()) * wide
        fits = wanted <= runtime.available_memory_bytes() * DECODED_SHARE
        return DecodedWeights() if fits else None

    def next_logits(self, ids: np.ndarray, cache: KVCache) -> np.ndarray:
        """Continue the cached sequence and return the logits after its last row: float32 [V]."""
        positions = np.arange(cache.length, cache.length + len(ids), dtype=np.int64)
        weights = cache.weights
        with no_grad(), weights.used() if weights is not None else contextlib.nullcontext():
            hidden = self.hidden(ids, positions, cache=cache)
            last = hidden.view(hidden.data[-1:])
            return self.project(last)[0]

    def _hold(
        self, name: str, tensor: torch.Tensor | NF4Weight, quantize: str | None
    ) -> Tensor | NF4Weight:
        if isinstance(tensor, NF4Weight):
            return dataclasses.replace(tensor.to(self.device), dtype=self.dtype)
        if quantize == "nf4":
            moved = tensor.to(device=self.device, dtype=torch.float32).contiguous()
            made = quantize_weight(moved, double_quant=self._double_quant, name=name)
            return dataclasses.replace(made, dtype=self.dtype)
        dtype, offset = self.dtype, self.config.norm_offset
        if offset and name.endswith("norm.weight"):
            # 1 + w in 16 bits would lose the low bits of w, which the norm multiplies in float32
            dtype = torch.float64 if dtype == torch.float64 else torch.float32
            tensor = torch.from_numpy(tensor.to(device="cpu", dtype=dtype).numpy() + offset)
        return Tensor(tensor.to(device=self.device, dtype=dtype).contiguous(), name=name)

    def _build(self, held: dict[str, Tensor | NF4Weight]) -> None:
        config = self.config
        self._embedding = _dense(held, EMBEDDING)
        self._norm = _dense(held, FINAL_NORM)
        self._lm_head = _dense(held, EMBEDDING if config.tie_word_embeddings else LM_HEAD)
        self._linears = {
            name: Linear(name, index, held[f"{name}.weight"], _bias(held, name), self._ahead)
            for index, name in enumerate(linear_shapes(config))
        }
        self._blocks = []
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            linears = {
                name.rpartition(".")[2]: linear
                for name, linear in self._linears.items()
                if name.startswith(prefix)
            }
            norms = {
                name.removesuffix(".weight").rpartition(".")[2]: _dense(held, name)
                for name in held
                if name.startswith(prefix) and name.endswith("norm.weight")
            }
            self._blocks.append(Block(config, layer, linears, norms))
        self._tables = [RopeTable(config.rotary_dim, config.rope_theta, config.rope_scaling)]
        if any(config.local_rope_layers):
            local = config.local_rope_theta, config.local_rope_scaling
            self._tables.append(RopeTable(config.rotary_dim, *local))
        self._on_device: dict[int, tuple[Any, torch.Tensor, torch.Tensor]] = {}
        # the factor is rounded to the storage dtype, as the product then is
        factor = torch.tensor(config.hidden_size**0.5, dtype=torch.float32).to(self.dtype)
        self._embedding_scale = factor.item()

    def _integers(self, name: str, values: Any, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(values, Tensor):
            values = values.data
        if not isinstance(values, torch.Tensor):
            values = torch.from_numpy(np.array(values, dtype=np.int64))
        if values.ndim != 1:
            raise ShapeMismatchError(
                f"{name} has shape {tuple(values.shape)}, wanted one dimension", ""
            )
        return values.to(device=self.device, dtype=dtype)

    def _rows(
        self,
        tokens: torch.Tensor,
        positions: Any,
        cu_seqlens: Any,
        cache: KVCache | None,
        dropout_seed: int | torch.Tensor | None,
    ) -> Rows:
        places = self._integers("positions", positions, torch.int64)
        if places.shape != tokens.shape:
            raise ShapeMismatchError(
                f"{tokens.shape[0]} ids and {places.shape[0]} positions, wanted as many", ""
            )
        starts = None
        if cu_seqlens is not None:
            starts = self._integers("cu_seqlens", cu_seqlens, torch.int32)
            starts = starts if starts.shape[0] > 2 else None
        if cache is not None:
            if starts is not None:
                raise ShapeMismatchError("a cache holds one sequence, cu_seqlens names several", "")
            cache.reserve(tokens.shape[0])
        length = self._table_length(positions, places)
        if cache is not None:
            self._check_same_rotation(cache.length, cache.length + tokens.shape[0])
        rotations = [self._rotation(table, length) for table in self._tables]
        local = rotations[1] if len(rotations) > 1 else None
        return Rows(places, starts, rotations[0], local, cache, dropout_seed)

    def _table_length(self, positions: Any, places: torch.Tensor) -> int:
        """Return how many positions the tables must cover, without waiting for a GPU's values.

        Raises:
            ShapeMismatchError: A position lies past the model's context.
        """
        limit = self.config.context_length
        length = limit
        if not places.is_cuda or self.config.rotation_depends_on_length:
            host = places.cpu().numpy()
            length = int(host.max(initial=-1)) + 1
        elif isinstance(positions, np.ndarray | list | tuple):
            length = int(np.max(positions, initial=-1)) + 1
        if length > limit:
            raise ShapeMismatchError(
                f"position {length - 1} lies past the model's context of {limit}",
                "shorten the sequence",
            )
        return length

    def rotation_changes(self, held: int, total: int) -> bool:
        """Whether keys cached for ``held`` positions are rotated otherwise in a text of ``total``.

        ``dynamic`` scaling keeps what is cached as it is, as transformers does; the two tables of
        ``longrope`` do not go together.
        """
        rules = (self.config.rope_scaling, self.config.local_rope_scaling)
        return any(
            rule.kind == "longrope" and 0 < held <= (rule.original_max_position or 0) < total
            for rule in rules
        )

    def _check_same_rotation(self, held: int, total: int) -> None:
        if self.rotation_changes(held, total):
            raise ShapeMismatchError(
                f"the cache holds {held} positions rotated for a short text, and {total} make a long "
                "one",
                "continue from an empty cache, with all ids",
            )

    def _rotation(self, table: RopeTable, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a table's cos and sin on the device, which are kept until it makes others.

        Making them waits for the copy.
        """
        tables = table.tables(length)
        cached = self._on_device.get(id(table))
        if cached is None or cached[0] is not tables:
            cos, sin = (torch.from_numpy(t).to(self.device) for t in tables)
            current_stream(self.device).synchronize()
            cached = self._on_device[id(table)] = (tables, cos, sin)
        return cached[1], cached[2]


def _storage_dtype(dtype: str, device: str) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, wanted auto or {', '.join(_DTYPES)}", "")
    return _DTYPES[dtype]


def _settle_tie(
    config: TransformerConfig, held: dict[str, Tensor | NF4Weight]
) -> TransformerConfig:
    """Decide what a file means that ties the output projection and holds one all the same."""
    if not config.tie_word_embeddings or LM_HEAD not in held:
        return config
    if np.array_equal(_dense(held, LM_HEAD).numpy(), _dense(held, EMBEDDING).numpy()):
        del held[LM_HEAD]
        return config
    warnings.warn(
        "the config ties lm_head.weight to the embedding, but the file holds another one; the "
        "file's is used",
        stacklevel=3,
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def _dense(held: dict[str, Tensor | NF4Weight], name: str) -> Tensor:
    weight = held[name]
    assert isinstance(weight, Tensor)
    return weight


def _bias(held: dict[str, Tensor | NF4Weight], module: str) -> Tensor | None:
    return _dense(held, f"{module}.bias") if f"{module}.bias" in held else None


def _rectangle(ids: Any) -> np.ndarray:
    try:
        array = np.asarray(ids, dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise ShapeMismatchError(
            "ids are not [batch, seq]: the rows differ in length or hold no whole numbers",
            "call logits once for each sequence",
        ) from error
    if array.ndim != 2:
        raise ShapeMismatchError(f"ids have shape {array.shape}, wanted [batch, seq]", "")
    return array
