"""``python -m perf COMMAND``: what a CPU can measure exactly of the kernels, and timings."""

from __future__ import annotations

import importlib
import sys

from entrenar.errors import EntrenarError

__all__ = ["COMMANDS", "main", "usage"]

# The module whose main(arguments) a command is, and what it does in a line.
COMMANDS: dict[str, tuple[str, str]] = {
    "static": ("perf.static", "compile every kernel for GPUs: registers, spills, matrix instructions"),
    "traffic": ("perf.traffic", "bytes each op loads and stores in the emulator, over the floor"),
    "counters": ("perf.counters", "instructions, sectors and bank conflicts in the emulator; races"),
    "emulation": ("perf.emulation", "seconds that kernels take emulated, beside interpreted"),
    "model": ("perf.model", "the least time of a launch at published rates; a model, not a measurement"),
    "mutate": ("perf.mutate", "faults planted in every compiled kernel, and what notices them"),
    "kernels": ("perf.kernels", "time every op at model sizes beside peers and floor, once it is checked"),
    "launches": ("perf.launches", "launches, waits and allocations of a training step"),
    "overhead": ("perf.overhead", "what a launcher costs in Python, beside Triton's own launch"),
    "plan": ("perf.plan", "a training step on paper: launches, bytes, operations and floor of each"),
    "step": ("perf.step", "one QLoRA training step on a real model, beside its floor"),
    "gpu": ("perf.gpu", "the tests and every timing that needs a GPU, in ten minutes"),
    "plot": ("perf.plot", "draw result rows: the roofline and each op's share of its floor"),
    "report": ("perf.report", "results of the tree over those of a revision, regressions first"),
    "prove": ("perf.prove", "every test at full counts; the record is kept in perf/results/prove.json"),
}  # fmt: skip


def usage() -> str:
    """Return the commands there are, a line each."""
    width = max(map(len, COMMANDS))
    lines = (f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items())
    return "\n".join(("usage: python -m perf COMMAND [-h] ...", "", *lines))


def main(arguments: list[str]) -> int:
    """Run one command; return its exit code."""
    if not arguments or arguments[0] not in COMMANDS:
        asked = arguments[:1] in (["-h"], ["--help"])
        print(usage(), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        return int(importlib.import_module(COMMANDS[arguments[0]][0]).main(arguments[1:]))
    except EntrenarError as error:
        print(f"perf {arguments[0]}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
