"""Draw result rows of ``perf kernels`` or ``perf gpu``: the roofline, and each op's share of its floor.

    python -m perf plot perf/results/kernels_cpu.json --out perf/results

Writes ``roofline.png``, operations a second over operations a byte under the roofs of the same run, and
``share_of_floor.png``, a bar for each call and a tick where a peer is. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from entrenar import runtime
from entrenar.errors import ConfigError, DataError

__all__ = ["main", "read_rows", "roofline", "share_of_floor"]

Row = dict[str, Any]
MOST_BARS = 80
COLOURS = ("#3b6fb6", "#c1543c", "#4f9d69", "#8a63a8", "#b8902f", "#5b6770")


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a JSON array, or of JSON lines, that are times of kernels; one for each call.

    Raises:
        DataError: The file is no such thing, or has no time of a kernel.
    """
    hint = "give what perf kernels --json or perf gpu wrote"
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}", hint) from error
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if isinstance(row, dict) and {"ms", "share_of_floor", "floor_bytes"} <= row.keys():
            key = tuple(row.get(k) for k in ("op", "pass", "model", "shape", "dtype", "device"))
            kept = found.setdefault(key, {**row, "peers": {}})
            if row.get("peer_ms"):
                kept["peers"][row["peer"]] = row["peer_ms"]
    if not found:
        raise DataError(f"{path} has no row with the time of a kernel", hint)
    return list(found.values())


def _figure(width: float, height: float) -> tuple[Any, Any]:
    runtime.require("matplotlib", extra="plot", feature="perf plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _where(rows: list[Row]) -> str:
    return "; ".join(sorted({f"{r['device']}, {r['dtype']}" for r in rows}))


def roofline(rows: list[Row]) -> Any:
    """Return a figure of operations a second over operations a byte, with the roofs.

    Rows whose operations are not counted are left out.

    Raises:
        DataError: None is left.
    """
    counted = [r for r in rows if r.get("flops")]
    if not counted:
        raise DataError(
            "no row counts operations", "the roofline needs rows of forward passes or products"
        )
    figure, axes = _figure(9, 6)
    points = [(r["flops"] / r["floor_bytes"], r["flops"] / r["ms"] / 1e9) for r in counted]
    low, high = min(x for x, _ in points) / 2, max(x for x, _ in points) * 2
    for roof in sorted({(r["copy_gb_s"], r["product_tflop_s"], r["dtype"]) for r in counted}):
        copy, product, dtype = roof
        ridge = 1e3 * product / copy
        xs = sorted({low, min(max(ridge, low), high), high})
        axes.plot(
            xs, [min(copy * x / 1e3, product) for x in xs], color="black", linewidth=1.2,
            label=f"{dtype}: copy {copy:.3g} GB/s, product {product:.3g} TFLOP/s",
        )  # fmt: skip
    families = list(dict.fromkeys(r["op"] for r in counted))
    marks = "osD^v<>Ph*Xd"
    for number, name in enumerate(families):
        own = [p for p, r in zip(points, counted, strict=True) if r["op"] == name]
        axes.scatter(
            *zip(*own, strict=True), s=26, marker=marks[number // len(COLOURS) % len(marks)],
            color=COLOURS[number % len(COLOURS)], label=name, zorder=3,
        )  # fmt: skip
    axes.set(
        xscale="log", yscale="log", xlabel="operations per byte of the floor (FLOP/B)",
        ylabel="operations per second (TFLOP/s)", title=f"Roofline, {_where(counted)}",
    )  # fmt: skip
    axes.grid(visible=True, which="major", linewidth=0.4, alpha=0.6)
    axes.legend(fontsize=7, ncols=1, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def share_of_floor(rows: list[Row]) -> Any:
    """Return a figure with a bar for each call's share of its floor, and a tick for each peer's."""
    several = len({(r["model"], r["tokens"]) for r in rows}) > 1
    kept = sorted(rows, key=lambda r: r["share_of_floor"])[:MOST_BARS]
    figure, axes = _figure(10, 1.5 + 0.22 * len(kept))
    names = []
    for at, row in enumerate(kept):
        which = f", {row['model']} T={row['tokens']}" if several else ""
        sizes = row["shape"].partition(" (")[0]
        names.append(f"{row['op']} {row['pass']}, {sizes}{which}")
        axes.barh(at, 100 * row["share_of_floor"], color=COLOURS[0], height=0.7)
    for number, package in enumerate(sorted({p for r in kept for p in r["peers"]})):
        own = [
            (at, 100 * r["share_of_floor"] * r["ms"] / r["peers"][package])
            for at, r in enumerate(kept) if package in r["peers"]
        ]  # fmt: skip
        axes.scatter(
            [x for _, x in own], [at for at, _ in own], marker="|", s=90, linewidths=2, zorder=3,
            color=COLOURS[1 + number % (len(COLOURS) - 1)], label=package,
        )  # fmt: skip
    axes.set_yticks(range(len(kept)), names, fontsize=7)
    left_out = f" ({len(kept)} lowest of {len(rows)})" if len(kept) < len(rows) else ""
    axes.set(
        xlabel="share of the floor (%): least time at the roofs of the run, over the time taken",
        ylabel="call", title=f"Share of the floor, {_where(rows)}{left_out}",
        ylim=(-0.6, len(kept) - 0.4),
    )  # fmt: skip
    axes.set_xlim(0, max(105, 105 * max(r["share_of_floor"] for r in kept)))
    axes.axvline(100, color="black", linewidth=0.8)
    axes.grid(visible=True, axis="x", linewidth=0.4, alpha=0.6)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, loc="lower right")
    return figure


def main(arguments: list[str]) -> int:
    """Run the command: write both pictures and name them."""
    parser = argparse.ArgumentParser(
        prog="python -m perf plot",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("rows", type=Path, help="result rows, JSON or JSON lines")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the pictures")
    parser.add_argument("--op", default="", help="part of an op's name")
    parser.add_argument("--shapes", default="", help="part of a model's name")
    options = parser.parse_args(arguments)
    rows = [
        r for r in read_rows(options.rows)
        if options.op in r["op"] and options.shapes in r["model"]
    ]  # fmt: skip
    if not rows:
        raise ConfigError(
            f"no row of {options.rows} has {options.op!r} in its op and {options.shapes!r} in its model",
            "leave out --op and --shapes to draw all",
        )
    options.out.mkdir(parents=True, exist_ok=True)
    for name, draw in (("roofline", roofline), ("share_of_floor", share_of_floor)):
        path = options.out / f"{name}.png"
        draw(rows).savefig(path, dpi=130)
        print(path)
    return 0
