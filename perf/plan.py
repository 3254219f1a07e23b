"""A training step on paper: its launches in order, with the bytes, operations and floor of each.

    python -m perf plan --model qwen2.5-1.5b --tokens 2048 --device h200
    python -m perf plan --model llama-3.1-8b --tokens 2048 --device rtx4090 --json -

The step is the pipeline's own, run over weights that are untouched memory with nothing behind its launchers
(perf.plan_step), so the list cannot differ from what a step launches; a test compares it with a step that is
executed. QLoRA: the base in NF4, rank 16 on q_proj and v_proj, one sequence, loss on its second half.

A launch's floor is the larger of two times at a device's published rates (perf.devices): its bytes, each input
read once and each output written once, over the bandwidth of memory; and the operations of its products
over the rate of the matrix units, or of float32 arithmetic. Operations of element-wise work are not
counted. Nothing is measured: no device reaches the floor, and launches cost time that it leaves out.

The recipes differ in one choice each, so that what it buys is visible: everything recomputed, decoded copies
of the weights, every token learned instead of the labelled half. ``usual`` recomputes everything, learns every
token, and pays, in rows that are modelled and marked so, for adapters that are not fused (their products and
sums read and write the layer's rows again) and for logits of all rows held at once in float32.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from typing import Any

from entrenar.errors import ConfigError
from perf.devices import DEVICES, Device
from perf.output import write_json
from perf.plan_step import CONFIGS, Launch, step

__all__ = ["RECIPES", "floor_s", "main", "plan"]

Row = dict[str, Any]
# Settings of the pipeline by recipe; ``learn_all`` is perf.plan_step's, ``usual`` adds modelled rows.
RECIPES: dict[str, dict[str, Any]] = {
    "ours": {"checkpointing": False},
    "recompute all": {"checkpointing": True},
    "decoded copies": {"checkpointing": False, "weight_cache": "decoded"},
    "learn every token": {"checkpointing": False, "learn_all": True},
    "usual": {"checkpointing": True, "learn_all": True, "usual": True},
}


def floor_s(launch: Launch, device: Device) -> tuple[float, str]:
    """Return the least time of a launch, and what bounds it."""
    memory = launch.bytes / device.dram_bytes_per_s
    if launch.matrix == "fp32":
        rate = 2.0 * device.fp32_lanes * device.multiprocessors * device.clock_hz
    else:
        rate = device.matrix_flops_per_s["bf16"]
    arithmetic = launch.flops / rate
    return max(memory, arithmetic), "memory" if memory >= arithmetic else "products"


def plan(model: str, tokens: int, device: Device, recipe: str) -> Row:
    """Return a recipe's launches with their floors, sums, and memory by component.

    Raises:
        ConfigError: The model or the recipe is not known.
    """
    if model not in CONFIGS:
        raise ConfigError(f"model is {model!r}, wanted one of {', '.join(CONFIGS)}", "choose one")
    if recipe not in RECIPES:
        raise ConfigError(f"recipe is {recipe!r}, wanted one of {', '.join(RECIPES)}", "choose one")
    options = dict(RECIPES[recipe])
    usual = options.pop("usual", False)
    made, memory = step(CONFIGS[model], tokens, device.target, **options)
    launches = [*made, *_unfused(made), *_whole_logits(model, tokens)] if usual else made
    rows = []
    for launch in launches:
        seconds, bound = floor_s(launch, device)
        rows.append({**launch.as_row(), "floor_us": round(1e6 * seconds, 4), "bound": bound})
    total = sum(floor_s(launch, device)[0] for launch in launches)
    if usual:
        memory = {**memory, "logits": 2 * 4 * tokens * CONFIGS[model]["vocab_size"]}
    return {
        "model": model, "tokens": tokens, "device": device.name, "recipe": recipe,
        "launches": len(made), "bytes": sum(launch.bytes for launch in launches),
        "flops": sum(launch.flops for launch in launches), "floor_ms": round(1e3 * total, 4),
        "tokens_per_s_at_floor": round(tokens / total, 1), "memory": memory,
        "peak_bytes": sum(memory.values()), "rows": rows,
    }  # fmt: skip


def _unfused(made: list[Launch]) -> list[Launch]:
    """Return what adapters cost that add their product to the layer's in passes of their own.

    Forward and in each recomputation the layer's result is read and written once more; backward so is the
    gradient of its input.
    """
    extra = []
    for launch in made:
        if launch.op in ("lora_forward", "lora_backward") and launch.wide_bytes:
            again = 2 * launch.wide_bytes
            extra.append(
                Launch("modelled", launch.layer, f"{launch.op}, not fused", "add", "", again, 0)
            )
    return extra


def _whole_logits(model: str, tokens: int) -> list[Launch]:
    """Return what it costs to hold all logits in float32.

    They are written, read for the loss, read and written for its gradient, and read for the product behind.
    """
    size = 4 * tokens * CONFIGS[model]["vocab_size"]
    return [Launch("modelled", "lm_head", "logits, all at once", "copies", "", 5 * size, 0)]


def table(found: Row) -> str:
    """Return a recipe's launches as text: those alike in phase, op and shape in one line, in order."""
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in found["rows"]:
        groups[row["phase"], row["op"], row["shape"]].append(row)
    heads = ("phase", "op", "shape", "launches", "MB each", "GFLOP each", "floor us", "bound by")
    lines = [heads]
    for (phase, op, shape), rows in groups.items():
        lines.append(
            (phase, op, shape, str(len(rows)), f"{rows[0]['bytes'] / 1e6:.2f}",
             f"{rows[0]['flops'] / 1e9:.2f}", f"{sum(r['floor_us'] for r in rows):.1f}",
             rows[0]["bound"])
        )  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    texts = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([f"{found['model']}, {found['tokens']} tokens, {found['device']}", *texts])


def summary(found: list[Row]) -> str:
    """Return one line a recipe."""
    lines = [
        f"{'recipe':<18}{'launches':>9}{'GB':>9}{'TFLOP':>9}{'floor ms':>10}{'tokens/s':>10}{'peak GiB':>10}"
    ]
    lines += [
        f"{row['recipe']:<18}{row['launches']:>9}{row['bytes'] / 1e9:>9.1f}{row['flops'] / 1e12:>9.2f}"
        f"{row['floor_ms']:>10.1f}{row['tokens_per_s_at_floor']:>10.0f}"
        f"{row['peak_bytes'] / 2**30:>10.1f}"
        for row in found
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        "python -m perf plan", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", choices=CONFIGS, default="qwen2.5-1.5b")
    parser.add_argument("--tokens", type=int, default=2048, help="of the one sequence")
    parser.add_argument("--device", choices=DEVICES, default="h200")
    parser.add_argument("--recipe", choices=RECIPES, help="its launches too; all are summed up")
    parser.add_argument("--json", help="a path, or - for standard output")
    given = parser.parse_args(arguments)
    if given.tokens < 2:
        raise ConfigError(f"tokens is {given.tokens}, wanted at least 2", "")
    device = DEVICES[given.device]
    names = [given.recipe] if given.recipe else list(RECIPES)
    found = [plan(given.model, given.tokens, device, name) for name in names]
    if given.json:
        write_json(found, given.json)
        return 0
    print(table(found[0]))
    print()
    print(summary(found))
    print()
    for name, size in found[0]["memory"].items():
        print(f"{name:<14}{size / 2**30:>8.2f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
