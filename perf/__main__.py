"""``python -m perf COMMAND``: what a CPU can measure exactly of the kernels, and timings.

Commands:
static    compile every kernel for GPUs offline: registers, spills, matrix instructions
traffic   bytes each op loads and stores in the emulator, over the floor
counters  instructions, sectors and bank conflicts in the emulator; races and unset memory
emulation seconds that kernels take emulated, beside interpreted
model     the least time of a launch at published rates; a model, not a measurement
mutate    faults planted in every compiled kernel, and what notices them
launches  launches, waits and allocations of a training step, as it runs and replayed
step      one QLoRA training step on a real model, beside its floor
gpu       the tests and every timing that needs a GPU
prove     every test at full counts; the record is kept in perf/results/prove.json
"""

from __future__ import annotations

import importlib
import sys

from entrenar.errors import EntrenarError

COMMANDS = (
    "static",
    "traffic",
    "counters",
    "emulation",
    "model",
    "mutate",
    "launches",
    "step",
    "gpu",
    "prove",
)


def main(arguments: list[str]) -> int:
    """Run one command; return its exit code."""
    if not arguments or arguments[0] not in COMMANDS:
        print(__doc__, file=sys.stdout if arguments[:1] in (["-h"], ["--help"]) else sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    try:
        return int(importlib.import_module(f"perf.{arguments[0]}").main(arguments[1:]))
    except EntrenarError as error:
        print(f"perf {arguments[0]}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
