"""Attention of :mod:`entrenar.reference.attention`, arranged for the BLAS behind NumPy.

All query heads that read one key/value head are rows of one product with it, so keys and values
are never repeated, and the gradient of a key sums over those heads inside the product. Queries are
taken in blocks of rows, each against the keys it can see at all: about half of them when causal,
and no array is larger than a block of rows. Scores are kept keys by rows, so that a reduction over
keys runs along memory. Short adjacent segments of equal lengths share their calls. Blocks are dealt
out to the threads of :mod:`entrenar.cpu.threads`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from entrenar.cpu import threads
from entrenar.reference.attention import Segment, check_attention, check_saved

__all__ = ["attention_backward", "attention_forward"]


BLOCK_ROWS = 64
"""Query rows at a time: the fastest of 32, 64 and 128 at 512 tokens of 9 heads, on two cores."""

BLOCK_SCORES = 1 << 15
"""Most scores at a time when segments share calls; larger batches were slower, out of cache."""


def attention_forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_k: np.ndarray | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute what :func:`entrenar.reference.attention.attention_forward` computes, fast.

    Numerics: scores, sums and output in the dtype of the inputs; queries are scaled before the
    product.
    """
    segments, scale = check_attention(
        "attention_forward", q, k, v, cu_seqlens_q, cu_seqlens_k, scale, window, softcap
    )
    out = np.empty(q.shape, q.dtype)
    lse = np.empty((q.shape[1], q.shape[0]), q.dtype)
    works: list[Callable[[], None]] = []
    for run in _runs(segments, q.shape[1]):
        keys, values = run.keys(k), run.keys(v)
        queries, outputs, lses = run.queries(q, k), run.queries(out, k), run.statistics(lse, k)

        def forward(
            blocks: list[_Block],
            size: int = run.scores(q),
            keys: np.ndarray = keys,
            values: np.ndarray = values,
            queries: np.ndarray = queries,
            outputs: np.ndarray = outputs,
            lses: np.ndarray = lses,
        ) -> None:
            scratch = np.empty(size, q.dtype)
            for block in blocks:
                rows = _fold(queries[..., block.rows, :] * q.dtype.type(scale))
                scores = _product(keys[..., block.keys, :], rows.swapaxes(2, 3), scratch)
                if softcap:
                    _bend(scores, softcap)
                    scores *= softcap
                block.hide(scores)
                result, statistic = _weigh(scores, values[..., block.keys, :], block.may_be_empty)
                outputs[..., block.rows, :] = result.reshape(outputs[..., block.rows, :].shape)
                lses[..., block.rows] = statistic.reshape(lses[..., block.rows].shape)

        shares = _shares(run, causal, window)
        works += [functools.partial(forward, blocks) for blocks in shares]
    threads.run(works)
    return out, lse


def _weigh(
    scores: np.ndarray, values: np.ndarray, may_be_empty: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the values weighed by the softmax of scores, and its log of sums; overwrites scores."""
    top = scores.max(axis=2, keepdims=True, initial=-np.inf)
    if may_be_empty:
        top[np.isneginf(top)] = 0
    with np.errstate(under="ignore"):
        np.exp(np.subtract(scores, top, out=scores), out=scores)
    total = np.ones(scores.shape[2], scores.dtype) @ scores
    result = scores.swapaxes(2, 3) @ values
    with np.errstate(divide="ignore"):
        statistic = top[:, :, 0] + np.log(total)
    if may_be_empty:
        total[total == 0] = 1
    result /= total[..., None]
    return result, statistic


def attention_backward(
    grad_out: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_k: np.ndarray | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute what :func:`entrenar.reference.attention.attention_backward` computes, fast."""
    op = "attention_backward"
    segments, scale = check_attention(
        op, q, k, v, cu_seqlens_q, cu_seqlens_k, scale, window, softcap
    )
    check_saved(op, grad_out, q, out, lse)
    grad_q, grad_k, grad_v = (np.empty(x.shape, x.dtype) for x in (q, k, v))
    delta = np.einsum("thd,thd->ht", grad_out, out)
    works: list[Callable[[], None]] = []
    sums: list[tuple[np.ndarray, np.ndarray]] = []
    for run in _runs(segments, q.shape[1]):
        keys, values = run.keys(k), run.keys(v)
        queries, grads, grads_q = (run.queries(x, k) for x in (q, grad_out, grad_q))
        deltas, lses = run.statistics(delta, k), run.statistics(lse.astype(q.dtype, copy=False), k)

        def backward(
            blocks: list[_Block],
            sum_k: np.ndarray,
            sum_v: np.ndarray,
            size: int = run.scores(q),
            keys: np.ndarray = keys,
            values: np.ndarray = values,
            queries: np.ndarray = queries,
            grads: np.ndarray = grads,
            grads_q: np.ndarray = grads_q,
            deltas: np.ndarray = deltas,
            lses: np.ndarray = lses,
        ) -> None:
            scratch, scratch_grad = np.empty(size, q.dtype), np.empty(size, q.dtype)
            for block in blocks:
                rows = _fold(queries[..., block.rows, :] * q.dtype.type(scale))
                grad = _fold(grads[..., block.rows, :])
                p = _product(keys[..., block.keys, :], rows.swapaxes(2, 3), scratch)
                slope = None
                if softcap:
                    _bend(p, softcap)
                    slope = 1 - np.square(p)
                    p *= softcap
                block.hide(p)
                statistic = lses[..., block.rows].reshape(*p.shape[:2], 1, -1)
                if block.may_be_empty:
                    statistic = np.where(np.isneginf(statistic), 0, statistic)
                with np.errstate(under="ignore"):
                    np.exp(np.subtract(p, statistic, out=p), out=p)
                sum_v[..., block.keys, :] += p @ grad
                grad_p = _product(values[..., block.keys, :], grad.swapaxes(2, 3), scratch_grad)
                grad_p -= deltas[..., block.rows].reshape(*p.shape[:2], 1, -1)
                grad_p *= p
                if slope is not None:
                    grad_p *= slope
                sum_k[..., block.keys, :] += grad_p @ rows  # rows carry the scale
                result = grad_p.swapaxes(2, 3) @ keys[..., block.keys, :]
                result *= q.dtype.type(scale)
                grads_q[..., block.rows, :] = result.reshape(grads_q[..., block.rows, :].shape)

        shares = _shares(run, causal, window)
        # each share adds to sums of its own, which are then added in order
        sum_k, sum_v = (np.zeros((len(shares), *keys.shape), q.dtype) for _ in range(2))
        works += [functools.partial(backward, *m) for m in zip(shares, sum_k, sum_v, strict=True)]
        sums += [(run.keys(grad_k), sum_k), (run.keys(grad_v), sum_v)]
    threads.run(works)
    for place, terms in sums:
        np.sum(terms, axis=0, out=place)
    return grad_q, grad_k, grad_v


@dataclasses.dataclass(frozen=True)
class _Run:
    """Adjacent segments of equal lengths, seen as one batch.

    Its views split axes, which never copies, so what is written to them reaches the array.

    Attributes:
        count: Number of segments.
        q0, k0: First row of queries and of keys.
        n_queries, n_keys: Rows of each segment.
    """

    count: int
    q0: int
    k0: int
    n_queries: int
    n_keys: int

    def queries(self, x: np.ndarray, k: np.ndarray) -> np.ndarray:
        """View [T, Hq, D] as [segments, Hkv, group, Lq, D]."""
        part = x[self.q0 : self.q0 + self.count * self.n_queries]
        shape = (self.count, self.n_queries, k.shape[1], x.shape[1] // k.shape[1], x.shape[2])
        return part.reshape(shape).transpose(0, 2, 3, 1, 4)

    def keys(self, x: np.ndarray) -> np.ndarray:
        """View [Tk, Hkv, D] as [segments, Hkv, Lk, D]."""
        part = x[self.k0 : self.k0 + self.count * self.n_keys]
        return part.reshape(self.count, self.n_keys, *x.shape[1:]).swapaxes(1, 2)

    def statistics(self, x: np.ndarray, k: np.ndarray) -> np.ndarray:
        """View [Hq, T] as [segments, Hkv, group, Lq]."""
        part = x[:, self.q0 : self.q0 + self.count * self.n_queries]
        shape = (k.shape[1], x.shape[0] // k.shape[1], self.count, self.n_queries)
        return part.reshape(shape).transpose(2, 0, 1, 3)

    def scores(self, q: np.ndarray) -> int:
        """Return the number of scores of its largest block."""
        rows = min(self.n_queries, BLOCK_ROWS)
        return self.count * q.shape[1] * rows * self.n_keys


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of query rows and the keys any of them sees.

    Attributes:
        rows: The query rows.
        keys: The keys.
        hidden: [keys, 1, rows], true where a key is hidden, from key ``first`` on; or None.
        first: Keys of the block before this one are visible to every row.
        may_be_empty: Some row may see no key.
    """

    rows: slice
    keys: slice
    hidden: np.ndarray | None
    first: int
    may_be_empty: bool

    def hide(self, scores: np.ndarray) -> None:
        """Set the scores of hidden keys, [.., keys, group * rows], to -inf."""
        if self.hidden is not None:
            folded = scores.reshape(*scores.shape[:3], -1, self.hidden.shape[-1])
            np.copyto(folded[:, :, self.first :], -np.inf, where=self.hidden)


def _runs(segments: list[Segment], heads: int) -> Iterator[_Run]:
    def lengths(segment: Segment) -> tuple[int, int]:
        q0, q1, k0, k1 = segment
        return q1 - q0, k1 - k0

    for (n_queries, n_keys), members in itertools.groupby(segments, lengths):
        run = list(members)
        if n_queries == 0 and n_keys == 0:
            continue
        scores = heads * min(n_queries, BLOCK_ROWS) * n_keys
        step = max(BLOCK_SCORES // max(scores, 1), 1)
        for first in range(0, len(run), step):
            count = min(step, len(run) - first)
            yield _Run(count, run[first][0], run[first][2], n_queries, n_keys)


def _shares(run: _Run, causal: bool, window: int) -> list[list[_Block]]:
    """Deal the blocks out to the threads; the last rows of a causal segment take longest."""
    blocks = list(_blocks(run, causal, window))
    hands = max(min(threads.count(), len(blocks)), 1)
    turns = [*range(hands), *reversed(range(hands))]
    shares: list[list[_Block]] = [[] for _ in range(hands)]
    for place, block in enumerate(reversed(blocks)):
        shares[turns[place % len(turns)]].append(block)
    return shares


def _blocks(run: _Run, causal: bool, window: int) -> Iterator[_Block]:
    offset = run.n_keys - run.n_queries
    for start in range(0, run.n_queries, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, run.n_queries)
        low = min(max(start + offset - window + 1, 0), run.n_keys) if window else 0
        high = max(min(stop + offset, run.n_keys), low) if causal else run.n_keys
        first = 0 if window else min(max(start + offset + 1, 0), high)
        hidden = None
        if (window or causal) and first < high:
            last = np.arange(start, stop)[None, None, :] + offset
            key = np.arange(low + first, high)[:, None, None]
            hidden = (key > last) if causal else np.zeros((len(key), 1, stop - start), bool)
            if window:
                hidden = hidden | (key <= last - window)
            if not hidden.any():
                hidden = None
        may_be_empty = high == low or offset < 0 or (bool(window) and not causal)
        yield _Block(slice(start, stop), slice(low, high), hidden, first, may_be_empty)


def _fold(x: np.ndarray) -> np.ndarray:
    """Make rows of the heads of a group: [segments, Hkv, group, rows, D] to [.., group * rows, D]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _bend(scores: np.ndarray, cap: float) -> None:
    scores *= 1 / cap
    np.tanh(scores, out=scores)


def _product(a: np.ndarray, b: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    """Multiply batches of matrices into the start of ``scratch``: fresh pages cost more than BLAS."""
    shape = (*a.shape[:-1], b.shape[-1])
    return np.matmul(a, b, out=scratch[: math.prod(shape)].reshape(shape))
