"""What a training step holds besides weights and adapters, moment by moment, from sizes alone.

Every number here restates which tensors the tape saves (``entrenar.autograd.ops``), which local names
of ``Block`` are alive, and what a function allocates while it runs. Three moments can be the highest:
the end of the forward pass of the last block, the loss, and the backward pass of the last block that
is trained; before and after them less is held.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from entrenar.cpu.attention import BLOCK_ROWS
from entrenar.cpu.cross_entropy import CHUNK_BYTES
from entrenar.cpu.nf4 import SCRATCH_VALUES
from entrenar.cpu.nf4_gemm import PRODUCT_VALUES
from entrenar.transformer.weights import linear_shapes

__all__ = ["Moment", "StepSizes", "highest_moment", "saved_bytes"]

_STATISTIC = 4  # bytes of a float32 root mean square or log-sum-exp
_CHUNK_ROWS = 256  # rows of logits at once, of ops.linear_cross_entropy


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """The sizes of one micro-batch.

    Attributes:
        model: The model's dimensions.
        adapted: Full names of the linears that carry an adapter.
        rank: Rank of the adapters.
        dropout: Whether the adapters drop inputs.
        tokens: Rows of the micro-batch.
        longest: Rows of its longest sequence.
        loss_rows: Rows that carry loss.
        itemsize: Bytes of an element of an activation.
        nf4: Whether the frozen linears are held in 4 bits.
        threads: Threads that NumPy's work is spread over; 0 where kernels compute.
    """

    model: Any
    adapted: Collection[str]
    rank: int
    dropout: bool
    tokens: int
    longest: int
    loss_rows: int
    itemsize: int
    nf4: bool
    threads: int

    @property
    def on_cpu(self) -> bool:
        """Whether NumPy computes, rather than kernels."""
        return self.threads > 0

    def rows(self, elements: int) -> int:
        """Return the bytes of so many elements for each token."""
        return self.tokens * elements * self.itemsize

    @property
    def query_width(self) -> int:
        """Elements of a token's queries."""
        return int(self.model.num_attention_heads * self.model.head_dim)

    @property
    def key_width(self) -> int:
        """Elements of a token's keys."""
        return int(self.model.num_key_value_heads * self.model.head_dim)


@dataclasses.dataclass(frozen=True)
class Moment:
    """What is held at one moment of a step, in bytes.

    Attributes:
        name: Where in the step it is.
        activations: Saved for the backward pass.
        logits: Logits, which are overwritten by their own gradient.
        scratch: Everything else: gradients on their way, results in use, room that functions need.
    """

    name: str
    activations: int
    logits: int
    scratch: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.activations + self.logits + self.scratch


@dataclasses.dataclass(frozen=True)
class _Block:
    """Bytes one block saves: its attention half, its MLP, and whether its output is differentiated."""

    attention: int
    gated: int  # what the activation function saves
    product: int  # the input of the last linear
    normed: int  # the input of the gates
    mlp: int  # the rest of the MLP half
    grad: bool

    @property
    def total(self) -> int:
        return self.attention + self.gated + self.product + self.normed + self.mlp


def highest_moment(sizes: StepSizes, recompute: bool) -> Moment:
    """Return the moment of a training step at which the most is held.

    Args:
        sizes: The micro-batch.
        recompute: Whether each block keeps only its inputs and computes the rest again.
    """
    trained = [block for block in _blocks(sizes) if block.grad]
    if not trained:
        return _loss(sizes, 0)
    kept, last = saved_bytes(sizes, recompute), trained[-1]
    before = kept if recompute else kept - last.total
    moments = [
        _forward(sizes, before, last, recompute),
        _loss(sizes, kept),
        *_backward(sizes, before + last.total, last, recompute),
    ]
    return max(moments, key=lambda moment: moment.total)


def saved_bytes(sizes: StepSizes, recompute: bool) -> int:
    """Return the bytes that all blocks save in the forward pass, the final norm and the loss aside."""
    blocks = _blocks(sizes)
    trained = [block for block in blocks if block.grad]
    if not recompute:
        return sum(block.total for block in trained)
    # what is added and the stream before it; the first block has no stream before it
    inputs = 2 * len(trained) - (len(trained) == len(blocks) > 0)
    return inputs * sizes.rows(sizes.model.hidden_size)


def _blocks(sizes: StepSizes) -> list[_Block]:
    blocks: list[_Block] = []
    for layer in range(sizes.model.num_hidden_layers):
        blocks.append(_block(sizes, layer, bool(blocks) and blocks[-1].grad))
    return blocks


def _block(sizes: StepSizes, layer: int, grad: bool) -> _Block:
    """Return what a block saves; ``grad`` says whether its input is differentiated."""
    model, hidden, inner = sizes.model, sizes.model.hidden_size, sizes.model.intermediate_size
    prefix = f"model.layers.{layer}."
    adapted = {n.rpartition(".")[2] for n in sizes.adapted if n.startswith(prefix)}
    ranks = sizes.rows(sizes.rank)
    norm = sizes.rows(hidden) + _STATISTIC * sizes.tokens
    inputs = adapted & {"q_proj", "k_proj", "v_proj", "qkv_proj"}
    attention = norm * grad + len(inputs) * ranks + bool(inputs) * sizes.rows(hidden)
    if grad or inputs:
        heads = [grad or bool(inputs & {name, "qkv_proj"}) for name in ("q_proj", "k_proj")]
        attention, grad = attention + _attention(sizes, layer, *heads), True
    elif "o_proj" in adapted:
        attention += sizes.rows(sizes.query_width)
    if "o_proj" in adapted:
        attention, grad = attention + ranks, True
    attention += norm * grad * model.post_norms
    mlp = norm * grad
    gates = adapted & {"gate_proj", "up_proj", "gate_up_proj"}
    mlp += len(gates) * ranks
    normed = bool(gates) * sizes.rows(hidden)
    factors = [grad or bool(gates & {name, "gate_up_proj"}) for name in ("gate_proj", "up_proj")]
    grad = grad or bool(gates)
    # swiglu saves both its inputs; another activation its input where that is differentiated, and the
    # product the factor beside each that is
    gated = sizes.rows(inner) * (
        2 * grad if model.hidden_act == "silu" else 2 * factors[0] + factors[1]
    )
    product = 0
    if "down_proj" in adapted:
        product, mlp, grad = sizes.rows(inner), mlp + ranks, True
    mlp += norm * grad * model.post_norms
    return _Block(attention, gated, product, normed, mlp, grad)


def _attention(sizes: StepSizes, layer: int, q_grad: bool, k_grad: bool) -> int:
    """Return what attention and the steps before it save: q, k, v, the output, statistics."""
    model, q, k = sizes.model, sizes.query_width, sizes.key_width
    elements = q + 2 * k + q
    statistics = model.num_attention_heads
    if model.qk_norm:
        # the head norms save what they are given, beside the queries and keys they return
        elements += q * q_grad + k * k_grad
        statistics += model.num_attention_heads * q_grad + model.num_key_value_heads * k_grad
    elif model.fused_projections and model.rope_layers[layer]:
        # views of one product cannot be rotated in place, and the values keep all of it
        elements += q + k
    return sizes.rows(elements) + _STATISTIC * statistics * sizes.tokens


def _forward(sizes: StepSizes, before: int, block: _Block, recompute: bool) -> Moment:
    """The end of a block's forward pass, when the last linear has written its result."""
    alive = _late_in_forward(sizes, block)
    if recompute:
        # nothing is saved: gate, up and the residual stream are alive as results
        alive = sizes.rows(4 * sizes.model.hidden_size + sizes.model.intermediate_size)
        return Moment("forward pass", before, 0, alive + block.gated + _linear_room(sizes))
    alive += sizes.rows(sizes.model.hidden_size)  # the block's input
    return Moment("forward pass", before + block.total, 0, alive + _linear_room(sizes))


def _late_in_forward(sizes: StepSizes, block: _Block) -> int:
    """Return what is alive beside what is saved: attention's addition, normalised rows, result."""
    alive = sizes.rows(3 * sizes.model.hidden_size + sizes.model.intermediate_size)
    return alive - block.product - block.normed


def _loss(sizes: StepSizes, kept: int) -> Moment:
    """The loss: a chunk of logits, the rows that carry loss, their gradient."""
    model, rows, item = sizes.model, sizes.loss_rows, sizes.itemsize
    hidden, vocab = model.hidden_size, model.vocab_size
    kept += sizes.rows(hidden) + _STATISTIC * sizes.tokens  # of the final norm
    scratch = sizes.rows(hidden) + 2 * rows * hidden * item
    step = _CHUNK_ROWS
    buffers = 1
    if sizes.on_cpu:
        buffers = 2 if model.final_logit_softcapping else 1
        step = min(step, max(CHUNK_BYTES // max(buffers * vocab * 4, 1), 1))
    chunks = max(-(-rows // step), 1)
    step = -(-rows // chunks)
    logits = buffers * step * vocab * (4 if sizes.on_cpu else item)
    if sizes.on_cpu:
        scratch += 2 * step * hidden * 4  # the chunk's rows and their gradient
        if item < 4:
            scratch += 4 * (vocab + 2 * rows) * hidden  # NumPy computes on copies in float32
    return Moment("loss", kept, logits, scratch + _standing_room(sizes))


def _backward(sizes: StepSizes, held: int, block: _Block, recompute: bool) -> list[Moment]:
    """The backward pass of a block: its last linear, its activation function, its attention."""
    model, q, k = sizes.model, sizes.query_width, sizes.key_width
    hidden, inner = sizes.rows(model.hidden_size), sizes.rows(model.intermediate_size)
    # the gradient of the residual stream; a block computed again keeps its result too
    stream = hidden * (2 if recompute else 1)
    name = "backward pass"
    again = 0
    if recompute:
        again = hidden + _late_in_forward(sizes, block)  # when the block has been computed again
    down = Moment(name, held, 0, max(stream + inner, again) + _linear_room(sizes))
    held -= block.product
    # swiglu's gradients take the place of its inputs, unless these are views of one product, which are
    # copied first; those of another activation take room of their own
    fresh = 0 if model.hidden_act == "silu" else 2 * inner
    fresh += 4 * inner * model.fused_projections
    gated = Moment(name, held, 0, stream + inner + fresh + _standing_room(sizes))
    held -= block.gated + block.normed + block.mlp
    moved = sizes.rows(q) + sizes.rows(q + 2 * k)  # gradients of the output, of q, k and v
    room = 4 * sizes.tokens * model.num_attention_heads
    if sizes.on_cpu:
        blocks = -(-sizes.longest // BLOCK_ROWS)
        samples = max(sizes.tokens // max(sizes.longest, 1), 1)
        # each thread has sums of keys' gradients for itself, and scores and their gradient of a block
        room += min(sizes.threads, blocks) * sizes.rows(2 * k)
        scores = model.num_attention_heads * min(BLOCK_ROWS, sizes.longest) * sizes.longest
        room += min(sizes.threads, blocks * samples) * 2 * scores * max(sizes.itemsize, 4)
    attention = Moment(name, held, 0, stream + moved + room + _standing_room(sizes))
    return [down, gated, attention]


def _linear_room(sizes: StepSizes) -> int:
    """Return what a linear of a block needs besides its operands and its result."""
    room = _standing_room(sizes)
    if sizes.on_cpu and sizes.itemsize < 4:
        model = sizes.model
        largest = 0 if sizes.nf4 else max(a * b for a, b in linear_shapes(model).values())
        room += 4 * (largest + sizes.tokens * (model.hidden_size + model.intermediate_size))
    return room


def _standing_room(sizes: StepSizes) -> int:
    """Return the scratch that lasts over the step: decoded weights, pieces of products, dropout."""
    shapes = linear_shapes(sizes.model)
    largest = max(math.prod(shape) for shape in shapes.values())
    if not sizes.on_cpu:
        return 2 * largest * sizes.itemsize if sizes.nf4 else 0
    room = 4 * min(largest, sizes.threads * SCRATCH_VALUES) if sizes.nf4 else 0
    widths = [max(shapes[name]) for name in sizes.adapted]
    if widths:
        pieces = [max(PRODUCT_VALUES // w, 16) * sizes.threads for w in widths]
        room += 4 * max(min(sizes.tokens, n) * w for n, w in zip(pieces, widths, strict=True))
    if sizes.dropout and widths:
        room += 4 * sizes.tokens * max(shapes[name][1] for name in sizes.adapted)
    return room
