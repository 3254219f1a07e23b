"""Our kernels and two peers' Triton kernels, compiled and counted by the same emulator, side by side.

    python -m perf counters --peers /path/to/an/environment/with/peers/bin/python

Peers are Liger (liger-kernel) and bitsandbytes, whose Triton kernels are launched by their own host
functions with the settings these choose. Both sides get the same values and their results must agree,
else the comparison is refused. A peer that is not installed is stated as absent. What a peer computes in
torch around its kernels (Liger sums its partial gradients of a weight there) is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from entrenar.errors import NumericsError
from perf.peer_calls import disagreement
from perf.peer_cases import Comparison, comparisons
from perf.tally import tally
from perf.timing import version

__all__ = ["AGREEMENT", "main", "measure"]

Row = dict[str, Any]
# As a share of the largest value. bf16: one side rounds up to three times where the other rounds once,
# 2^-9 each. fp32: sums of 2048 terms in two orders, sqrt(2048) roundings of 2^-24.
AGREEMENT = {"bf16": 2.0**-7, "fp32": 2.0**-18}


def driver() -> Any:
    """Return the counting driver in force."""
    from entrenar.emulator import active_driver

    return active_driver()


def _compare(case: Comparison, target: str) -> Row:
    where = {"op": case.op, "dtype": case.dtype, "shape": case.shape, "target": target}
    emulator = driver()
    emulator.history = []
    ours = case.ours()
    row: Row = {**where, "ours": tally(emulator.history, case.elements), "peer": None}
    if case.note:
        row["note"] = case.note
    if case.theirs is None or case.peer is None:
        return row
    found = version(case.peer)
    row["peer"] = f"{case.peer} {found or 'absent'}"
    if found is None:
        return row
    emulator.history = []
    theirs = case.theirs()
    row["theirs"] = tally(emulator.history, case.elements)
    row["disagreement"] = disagreement(tuple(theirs), tuple(ours))
    if not row["disagreement"] <= AGREEMENT[case.dtype]:
        raise NumericsError(
            f"{case.op} ({case.dtype}): ours and {row['peer']} differ by {row['disagreement']:.3g} of "
            f"the largest value, wanted at most {AGREEMENT[case.dtype]:.3g}",
            "counts of kernels that compute different things cannot be compared",
        )
    return row


def measure(
    target: str = "sm_80", dtypes: tuple[str, ...] = ("bf16", "fp32"), only: str = ""
) -> list[Row]:
    """Run both sides of every comparison; return a row each.

    Raises:
        NumericsError: The two sides compute different results.
    """
    os.environ["ENTRENAR_BACKEND"], os.environ["ENTRENAR_PTX_TARGET"] = "ptx", target
    from entrenar.emulator import install_driver

    install_driver(target, counters=True)
    return [_compare(case, target) for case in comparisons(dtypes, only)]


def main(arguments: list[str]) -> int:
    """Print rows as JSON: what ``perf counters --peers`` runs in the environment of the peers."""
    parser = argparse.ArgumentParser(prog="python -m perf.peer_kernels", description=__doc__)
    parser.add_argument("--target", default="sm_80")
    parser.add_argument("--op", default="")
    parser.add_argument("--dtypes", default="bf16,fp32")
    options = parser.parse_args(arguments)
    rows = measure(options.target, tuple(options.dtypes.split(",")), options.op)
    print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
