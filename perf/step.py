"""Time a whole QLoRA training step on a real model, beside the floor that its matrix products set.

    python -m perf step --model PATH --tokens 512 --json -
    python -m perf step --model PATH --tokens 512 --peers ENV
    python -m perf step --model PATH --tokens 128 --generate 64 --json -

One sequence of ``--tokens`` ids, loss on its second half, LoRA r=16 alpha=32 on q_proj and v_proj,
AdamW with learning rate 2e-4 and no decay, gradient norm clipped to 1.0: the task that peers are
timed on. Ids come from ``numpy.random.default_rng(0)``. With ``--generate`` it is greedy decoding after a
prompt of ``--tokens`` ids instead. With ``--peers`` both are run in turns, see :mod:`perf.step_beside`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from entrenar import InstructConfig, InstructPipeline, runtime
from entrenar.cpu import threads
from entrenar.errors import ConfigError
from entrenar.transformer.generation import GenerateConfig, stream_tokens
from entrenar.transformer.model import Transformer
from perf.output import write_json
from perf.step_beside import beside, table

__all__ = ["decode", "floor_seconds", "main", "measure", "products"]


def products(pipeline: InstructPipeline, tokens: int, response: int) -> list[tuple[int, int, int]]:
    """Return (m, k, n) of each dense product that a step cannot do without.

    Forward and input gradient of every linear layer, the head on response rows both ways, and the
    seven products of attention. The first block's q, k and v need no input gradient, since nothing
    below them trains; LoRA's own products and recomputation are left out, so this is a true floor.
    """
    model = pipeline.model
    config = model.config
    found: list[tuple[int, int, int]] = []
    for name, (out_features, in_features) in model.linear_shapes().items():
        found.append((tokens, in_features, out_features))
        if not (".layers.0.self_attn." in name and not name.endswith("o_proj")):
            found.append((tokens, out_features, in_features))
    found += [
        (response, config.hidden_size, config.vocab_size),
        (response, config.vocab_size, config.hidden_size),
    ]
    per_head = (tokens, config.head_dim, tokens)
    found += [per_head] * (7 * config.num_attention_heads * config.num_hidden_layers // 2)
    return found


def best_of(run: Callable[[], Any], repeats: int = 5) -> float:
    """Return the shortest of several timings of ``run`` in seconds, after one that is not timed."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def floor_seconds(shapes: list[tuple[int, int, int]]) -> float:
    """Return the seconds NumPy's matrix products of these shapes take, each at its best.

    Each is taken with BLAS's own threads and cut over ours, and the faster counts.
    """
    rng = np.random.default_rng(0)
    seconds: dict[tuple[int, int, int], float] = {}
    for m, k, n in set(shapes):
        a = rng.standard_normal((m, k), np.float32)
        b = rng.standard_normal((k, n), np.float32)
        out = np.empty((m, n), np.float32)
        seconds[m, k, n] = min(
            best_of(lambda a=a, b=b, out=out: np.matmul(a, b, out=out)),
            best_of(lambda a=a, b=b, out=out: threads.product(a, b, out)),
        )
    return sum(seconds[shape] for shape in shapes)


def _floor_in_child(shapes: list[tuple[int, int, int]]) -> float:
    """Return :func:`floor_seconds` of a process that has done nothing else."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(floor_seconds, shapes).result()


def measure(model: Path, tokens: int, steps: int, *, dense: bool = False) -> dict[str, Any]:
    """Run ``steps`` training steps and return the figures of the report.

    Returns:
        ``tokens_per_s``, ``step_s`` (median, the first step left out), ``cpu_s`` (of all threads, a
        step), ``peak_rss_bytes``, ``losses``, ``gemm_floor_s`` (timed in a child process),
        ``share_of_floor``, ``launches`` and ``allocations`` (of one step), and ``to_first_step_s``:
        from the start of loading to the end of the first step.
    """
    config = InstructConfig(
        quantize_nf4=not dense,
        learning_rate=2e-4,
        weight_decay=0.0,
        max_seq_len=tokens,
        schedule="constant",
    )
    begin = time.perf_counter()
    pipeline = InstructPipeline.from_pretrained(model, config)
    vocab = pipeline.model.config.vocab_size
    ids = np.random.default_rng(0).integers(0, vocab, (1, tokens))[0].tolist()
    pair = (ids[: tokens // 2], ids[tokens // 2 :])
    times, cpu_times, losses = [], [], []
    for _ in range(steps):
        start, before = time.perf_counter(), time.process_time()
        losses.append(pipeline.train_step(*pair).loss)
        times.append(time.perf_counter() - start)
        cpu_times.append(time.process_time() - before)
        if len(times) == 1:
            to_first_step = time.perf_counter() - begin
    with runtime.counting() as counts:
        pipeline.train_step(*pair)
    peak = runtime.peak_memory_bytes(pipeline.model.device)
    step = statistics.median(times[1:])
    floor = _floor_in_child(products(pipeline, tokens, tokens - tokens // 2))
    return {
        "who": "entrenar" + ("" if dense else " nf4"),
        "tokens": tokens,
        "step_s": step,
        "tokens_per_s": tokens / step,
        "cpu_s": statistics.median(cpu_times[1:]),
        "to_first_step_s": to_first_step,
        "peak_rss_bytes": peak,
        "losses": losses,
        "gemm_floor_s": floor,
        "share_of_floor": floor / step,
        "launches": counts.launches,
        "allocations": counts.allocations,
    }


def decode(model: Path, tokens: int, new: int, *, dense: bool = False) -> dict[str, Any]:
    """Decode ``new`` ids greedily after a prompt of random ones, twice; the second run counts.

    Returns:
        ``tokens_per_s`` (the prompt's time included), ``peak_rss_bytes`` and the ``ids``.
    """
    loaded = Transformer.from_pretrained(model, None if dense else "nf4", device="cpu")
    prompt = np.random.default_rng(0).integers(0, loaded.config.vocab_size, tokens).tolist()
    settings = GenerateConfig(max_new_tokens=new, temperature=0.0)
    times, ids = [], []
    for _ in range(2):
        start = time.perf_counter()
        ids = list(stream_tokens(loaded, prompt, settings))
        times.append(time.perf_counter() - start)
    return {
        "who": "entrenar" + ("" if dense else " nf4"),
        "tokens_per_s": len(ids) / times[-1],
        "peak_rss_bytes": runtime.peak_memory_bytes(loaded.device),
        "ids": ids,
    }


def main(arguments: list[str]) -> int:
    """Run the command; print or write the JSON record."""
    parser = argparse.ArgumentParser(prog="python -m perf step", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", required=True, type=Path, help="Hugging Face folder or GGUF file"
    )
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dense", action="store_true", help="LoRA on fp32 weights, no NF4")
    parser.add_argument(
        "--generate", type=int, default=0, metavar="NEW", help="decode NEW ids instead of training"
    )
    parser.add_argument("--json", default="-", help="a path, or - for standard output")
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="ENV",
        help="run transformers and peft in turns with ours, in this environment; made if absent",
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each with --peers")
    parser.add_argument("--log", type=Path, help="append the runs of --peers here as JSON lines")
    options = parser.parse_args(arguments)
    if options.tokens < 2:
        raise ConfigError(f"--tokens is {options.tokens}, wanted at least 2", "")
    if options.steps < 2:
        raise ConfigError(
            f"--steps is {options.steps}, wanted at least 2: the first is left out", ""
        )
    if options.peers is not None:
        both = ["--tokens", str(options.tokens), "--steps", str(options.steps)]
        both += ["--generate", str(options.generate)] if options.generate else []
        print(table(beside(options.model, options.peers, both, options.rounds, options.log)))
        return 0
    if options.generate:
        row = decode(options.model, options.tokens, options.generate, dense=options.dense)
    else:
        row = measure(options.model, options.tokens, options.steps, dense=options.dense)
    write_json(row, options.json, indent=None)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
