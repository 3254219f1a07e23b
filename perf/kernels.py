"""Time every op at the sizes of real models, beside its peers and its floor, after it has been checked.

    python -m perf kernels --op nf4 --shapes smollm2-135m --tokens 512 --json -

A gate first: results and gradients against the reference in float64, with the tolerance of the op's row.
Where it fails no time is taken, and the exit code is 1. Then the call and its peers take turns with cold
caches (perf.timing). On a GPU the peers are torch (cuBLAS and its own kernels), Liger, bitsandbytes and
Unsloth; on a CPU our NumPy backend runs against torch and bitsandbytes. An absent peer has a row that says so.

A row is one call beside one peer: ms, p20_ms, p80_ms of ours; floor_bytes, every input read once and every
output written once; flops, null where the row does not count them; share_of_floor, the least time for these at
the copy bandwidth and product rate measured in the same run, over ms; ratio, ms over peer_ms, below 1 where
ours is faster; gate_error, the largest error as a share of its tolerance.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from entrenar import runtime
from entrenar.errors import ConfigError
from entrenar.optable import FUNCTIONS, OPS, Op
from entrenar.testing import torch_dtype
from perf.calls import DTYPES, Maker
from perf.output import write_json
from perf.passes import Pass, Work, build, described, feasible, gate, gate_rows
from perf.peer_calls import AGREEMENT, disagreement, peers
from perf.shapes import MODELS, Case, Model, cases
from perf.timing import (
    Roofs,
    Timer,
    Variant,
    environment,
    measure_roofs,
    quantiles,
    take_turns,
    timer_of,
)
from perf.traffic import complete, floor_bytes

__all__ = ["Bench", "chosen", "main", "measure", "table"]

Row = dict[str, Any]
# Products of a backward call over those of the forward one, where they are not as many.
TIMES_FORWARD = {"attention_backward": 2.5}
SHORT = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Bench:
    """What cases are timed with.

    Attributes:
        device: ``"cpu"`` or ``"cuda:N"``.
        timer: Of the device.
        roofs: By the name of a dtype, ``"fp32"`` and so on.
        where: What every row says of the machine.
        seconds: How long the turns of one call may take.
    """

    device: str
    timer: Timer
    roofs: dict[str, Roofs]
    where: Row
    seconds: float


def chosen(only: str = "") -> list[Case]:
    """Return the cases whose op, or one of whose functions, contains ``only``.

    Raises:
        ConfigError: There is none.
    """
    found = [
        case
        for case in cases()
        if any(only in name for name in (case.op, *(f.name for f in _functions(OPS[case.op]))))
    ]
    if not found:
        raise ConfigError(f"no op has {only!r} in its name", f"ops are {', '.join(OPS)}")
    return found


def _functions(op: Op) -> tuple[Any, ...]:
    return (op.forward, *op.backward)


def _complete(op: Op, given: Row) -> Row:
    return _with_defaults(op.forward.name, given)


def _with_defaults(function: str, given: Row) -> Row:
    family = importlib.import_module(f"entrenar.kernels.{FUNCTIONS[function].family}")
    return complete(getattr(family, function), given)


def _flops(op: Op, call: Pass, forward: int) -> int | None:
    """Return the operations of a call, where they are known: those of rows are not counted backwards."""
    if call.name == "forward":
        return forward
    if not op.has_dot:
        return None
    if call.function == "lora_backward":
        a, rows = call.given["lora_a"], len(call.given["x"])
        outer = len(call.given["lora_b"])
        return 2 * rows * (outer * a.shape[1] + 2 * len(a) * (outer + a.shape[1]))
    return int(forward * TIMES_FORWARD.get(call.function, 1))


def _costs(op: Op, call: Pass, work: Work) -> tuple[int, int | None]:
    """Return the floor in bytes and the operations of a call."""
    inputs = described(_complete(op, work.given))
    flops = _flops(op, call, int(op.flops(inputs))) if call.function != "bias_backward" else None
    if call.name == "forward":
        floats = [v for k, v in work.given.items() if k in op.floats and hasattr(v, "dtype")]
        return int(op.bytes_moved(inputs, floats[0].dtype.itemsize)), flops
    given = _with_defaults(call.function, call.given)
    moved = floor_bytes(None, call, given, 0, FUNCTIONS[call.function].mutates, call.result)
    return moved, flops


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _times(bench: Bench, call: Pass, work: Work, dtype: str, costs: Row) -> Iterator[Row]:
    """Yield a row for each peer, or one without."""
    variants, others = {"ours": call.variant()}, []
    for peer in peers(work, call, bench.device):
        note, variant = peer.note, peer.variant
        share = None
        if variant is not None:
            note, share = _agrees(variant, peer.wanted, note)
            if share is not None and not share <= AGREEMENT[dtype]:
                note = f"its results differ from ours by {share:.3g} of the largest"
            elif share is not None:
                variants[peer.package] = variant
        others.append((peer.package, note, share if share is None or share < math.inf else None))
    times = take_turns(variants, bench.timer, seconds=bench.seconds)
    roofs, ours = bench.roofs[dtype], quantiles(times["ours"])
    row = {
        **ours, "rounds": len(times["ours"]), **costs,
        "share_of_floor": roofs.floor_ms(costs["floor_bytes"], costs["flops"]) / ours["ms"],
        "copy_gb_s": roofs.copy_bytes_per_s / 1e9,
        "product_tflop_s": roofs.product_flops_per_s / 1e12,
    }  # fmt: skip
    for package, note, share in others or [(None, "no peer has this op", None)]:
        theirs = quantiles(times[package])["ms"] if package in times else None
        yield {
            **row, "peer": package, "peer_ms": theirs,
            "ratio": None if theirs is None else ours["ms"] / theirs,
            "peer_disagreement": share, "note": note,
        }  # fmt: skip


def _agrees(variant: Variant, wanted: tuple[Any, ...], note: str) -> tuple[str, float | None]:
    """Run a peer once; return its note, and how far its results are from ours."""
    try:
        if variant.before is not None:
            variant.before()
        return note, disagreement(variant.run(), wanted)
    except Exception as error:  # another package's fault must not lose our own times
        return f"failed: {type(error).__name__}: {error}"[:300], None


def _gated(work: Work, case: Case, letters: dict[str, int], dtype: str, device: str) -> Row:
    """Return what the gate found; raises AssertionError where it is shut."""
    op = work.op
    small = feasible(op, case, letters, lambda given: _complete(op, given))
    if small == letters:
        return {"gate": "whole", "gate_error": gate(work, dtype)}
    maker = Maker(torch_dtype(dtype), device=device, values=True)
    errors = [gate(build(op, case.make(maker, small), maker), dtype), gate_rows(work, dtype)]
    title = case.title(small).rpartition("(")[2].rstrip(")")
    rows = " and rows of these sizes" if errors[1] is not None else ""
    return {"gate": title + rows, "gate_error": max(e for e in errors if e is not None)}


def _case(bench: Bench, case: Case, model: Model, tokens: int, dtype: str) -> Iterator[Row]:
    """Yield the rows of one case; one with ``error`` alone where the gate is shut or it cannot run."""
    op, letters = OPS[case.op], model.letters(tokens)
    name = SHORT[dtype]
    row = {
        "op": op.name, "pass": "forward", "function": op.forward.name, "model": model.name,
        "tokens": tokens, "shape": case.title(letters), "dtype": name,
    }  # fmt: skip
    try:
        maker = Maker(DTYPES[name], device=bench.device, values=True)
        work = build(op, case.make(maker, letters), maker)
        gated = _gated(work, case, letters, dtype, bench.device)
        for call in work.passes:
            floor, flops = _costs(op, call, work)
            row |= {"pass": call.name, "function": call.function, **gated}
            costs = {"floor_bytes": floor, "flops": flops}
            for found in _times(bench, call, work, name, costs):
                merged = {**row, **found, **bench.where}
                yield {key: _rounded(value) for key, value in merged.items()}
    except AssertionError as error:
        yield {**row, "error": f"gate: {error}", **bench.where}
    except (
        Exception
    ) as error:  # one that cannot run, for want of memory say, must not lose the others
        yield {**row, "error": f"{type(error).__name__}: {error}"[:500], **bench.where}


def measure(
    only: str,
    models: Sequence[str],
    tokens: Sequence[int],
    dtypes: Sequence[str],
    device: str,
    seconds: float,
) -> Iterator[Row]:
    """Yield a row for each call and peer, as they come.

    Args:
        only: Part of an op's name.
        models: Names in ``shapes.MODELS``.
        tokens: Token counts.
        dtypes: Names in ``calls.DTYPES``; an op that does not take one is timed in fp32.
        device: ``"cpu"`` or ``"cuda:N"``.
        seconds: How long the turns of one call may take.
    """
    found = chosen(only)
    timer = timer_of(device)
    names = {*dtypes, "fp32"}
    roofs = {name: measure_roofs(timer, device, DTYPES[name]) for name in sorted(names)}
    bench = Bench(device, timer, roofs, environment(device), seconds)
    done = set()
    for model in models:
        for count in tokens:
            for case in found:
                for dtype in dtypes:
                    full = str(DTYPES[dtype]).removeprefix("torch.")
                    full = full if full in OPS[case.op].dtypes else "float32"
                    title = (model, case.op, case.title(MODELS[model].letters(count)), full)
                    if title not in done:  # sizes of an optimiser do not depend on tokens
                        done.add(title)
                        yield from _case(bench, case, MODELS[model], count, full)


def table(rows: Sequence[Row]) -> str:
    """Return rows as text, aligned."""
    head = [
        "op",
        "pass",
        "model",
        "shape",
        "dtype",
        "ms",
        "p20",
        "p80",
        "of floor",
        "peer",
        "peer ms",
        "ratio",
    ]
    lines = [head]
    for row in rows:
        name = [row["op"], row["pass"], row["model"], row["shape"], row["dtype"]]
        if "error" in row:
            lines.append([*name, row["error"], *[""] * 6])
            continue
        ours = [
            *(f"{row[k]:.3f}" for k in ("ms", "p20_ms", "p80_ms")),
            f"{row['share_of_floor']:.0%}",
        ]
        timed = row["peer_ms"] is not None
        peer = [f"{row['peer_ms']:.3f}", f"{row['ratio']:.2f}"] if timed else [row["note"][:40], ""]
        lines.append([*name, *ours, row["peer"] or "", *peer])
    shown = [line for line in lines if line[-6:] != [""] * 6]
    widths = [max(len(line[i]) for line in shown) for i in range(len(head))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _list(text: str, known: Sequence[str], what: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"{what} {name!r} is not known", f"known are {', '.join(known)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf kernels",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--op", default="", help="part of an op's or a function's name")
    parser.add_argument("--shapes", default="smollm2-135m", help=", ".join(MODELS) + "; or several")
    parser.add_argument("--tokens", default="512", help="comma-separated")
    parser.add_argument(
        "--dtype", help="fp32, fp16, bf16, or several; fp32 on a CPU, bf16 on a GPU"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=0.5, help="of turns for one call")
    parser.add_argument("--json", metavar="PATH", help="write the rows there; - is standard output")
    parser.add_argument(
        "--append", type=Path, metavar="PATH", help="add each row to JSON lines as it comes"
    )
    return parser


def main(arguments: list[str]) -> int:
    """Run the command; 1 where a gate is shut or a case could not run."""
    options = _parser().parse_args(arguments)
    device = runtime.resolve_device(options.device)
    if device == "cpu" and runtime.backend() != "numpy":
        raise ConfigError(
            f"ENTRENAR_BACKEND={runtime.backend()} runs kernels slowly to check them",
            "unset it: on a CPU the NumPy backend is timed",
        )
    dtypes = _list(options.dtype or ("fp32" if device == "cpu" else "bf16"), tuple(DTYPES), "dtype")
    models = _list(options.shapes, tuple(MODELS), "shape")
    try:
        tokens = [int(n) for n in options.tokens.split(",")]
    except ValueError:
        tokens = [0]
    if min(tokens) < 1:
        raise ConfigError(f"--tokens is {options.tokens}", "give positive numbers, as in 1,512")
    rows = []
    for row in measure(options.op, models, tokens, dtypes, device, options.seconds):
        rows.append(row)
        told = row.get("error") or f"{row['ms']:.3f} ms, {row['peer']} {row['peer_ms']}"
        print(f"{row['op']} {row['pass']} {row['shape']} {row['dtype']}: {told}", file=sys.stderr)
        if options.append:
            with options.append.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": "kernel", **row}) + "\n")
    if options.json:
        write_json(rows, options.json)
    if options.json != "-":
        print(table(rows))
    return 1 if any("error" in row for row in rows) else 0
