"""Run the tests and every timing that need a GPU, most valuable first, within a time limit.

    python -m perf gpu --out DIR --minutes 9

Appends to ``DIR/results.jsonl``, a JSON object a line, and ``DIR/log.txt`` as it goes, so that a run cut
short keeps what it has. First the roofs of this machine, copy bandwidth and torch's bf16 product; then
the op suite on the GPU; then each launcher at a model's sizes (perf.calls) beside torch's own function.
A timing is the median of many, between events on the stream, with the second-level cache overwritten
before each, and the two variants taking turns. Exits 3 where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from entrenar import runtime

__all__ = ["main", "parse_counts", "quantiles"]

# Most valuable first: what a QLoRA step spends its time in, then the rest.
ORDER = (
    "lora", "nf4_gemm", "attention", "gemm", "cross_entropy", "nf4", "rms_norm", "swiglu", "rope",
    "adamw", "clip", "softmax", "embedding", "elementwise",
)  # fmt: skip
CACHE_BYTES = 256 << 20
SHARE_FOR_TESTS = 0.4


class Results:
    """Two files that grow line by line: rows for programs, a log for people."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows, self.log = folder / "results.jsonl", folder / "log.txt"

    def add(self, kind: str, **fields: Any) -> None:
        """Append a row, and the same to the log."""
        row = {"kind": kind, **fields}
        with self.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.say(
            " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
        )

    def say(self, text: str) -> None:
        """Append a line to the log and show it."""
        with self.log.open("a") as file:
            file.write(text + "\n")
        print(text, flush=True)


def quantiles(times: list[float]) -> dict[str, float]:
    """Return the median and the 20th and 80th percentile of times in milliseconds."""
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return {"ms": statistics.median(times), "ms_20": cuts[1], "ms_80": cuts[7]}


def time_turns(
    variants: dict[str, Callable[[], Any]], repeats: int = 30, seconds: float = 2.0
) -> dict[str, dict[str, float]]:
    """Time variants in turn, each with a cold cache; return quantiles by name.

    Args:
        variants: What to call; each is called three times untimed first.
        repeats: Rounds.
        seconds: Rounds end early after this long, but not before five.
    """
    import torch

    dirty = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda")
    for run in variants.values():
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in variants}
    start = time.perf_counter()
    for turn in range(repeats):
        if turn >= 5 and time.perf_counter() - start > seconds:
            break
        for name, run in variants.items():
            dirty.zero_()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            run()
            after.record()
            after.synchronize()
            times[name].append(before.elapsed_time(after))
    return {name: quantiles(found) for name, found in times.items()}


def roofs(results: Results) -> tuple[float, float]:
    """Measure and return copy bandwidth in GB/s and torch's bf16 product in TFLOP/s."""
    import torch

    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = time_turns({"copy": lambda: target.copy_(source), "product": lambda: a @ b})
    bandwidth = 2 * source.numel() / found["copy"]["ms"] / 1e6
    rate = 2 * n**3 / found["product"]["ms"] / 1e9
    results.add("roof", what="copy of 1 GiB", gb_s=bandwidth)
    results.add("roof", what="torch bf16 8192^3", tflop_s=rate)
    return bandwidth, rate


def parse_counts(output: str) -> dict[str, int]:
    """Return what pytest's last line counts: passed, failed, skipped, errors."""
    names = ("passed", "failed", "skipped", "errors?")
    found = {name.rstrip("s?"): re.findall(rf"(\d+) {name}\b", output) for name in names}
    return {name: int(numbers[-1]) if numbers else 0 for name, numbers in found.items()}


def run_tests(results: Results, root: Path, seconds: float) -> None:
    """Run the op suite on the GPU in a process of its own, no longer than ``seconds``."""
    command = [sys.executable, "-m", "pytest", "tests/ops", "--backend=cuda", "-q", "--maxfail=40"]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=seconds, check=False
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as cut:
        output = cut.stdout.decode() if isinstance(cut.stdout, bytes) else cut.stdout or ""
        code = -1
    results.say(output[-20_000:])
    taken = time.perf_counter() - start
    results.add("tests", exit_code=code, seconds=taken, **parse_counts(output))


def _peer(op: Any, call: Any, given: dict[str, Any]) -> Callable[[], Any] | None:
    """Return torch's own function on the same arguments, where the row names one for this call."""
    if (
        op.torch_baseline is None
        or call.function != op.forward.name
        or given.get("out") is not None
    ):
        return None
    accepted = inspect.signature(op.torch_baseline).parameters
    if not set(given) <= set(accepted):
        return None
    return lambda: op.torch_baseline(**given)


def timings(results: Results, roof: tuple[float, float], deadline: float) -> None:
    """Time every call until the deadline, families in order of value, bf16 before fp32."""
    import torch

    from entrenar.optable import FUNCTIONS, OPS
    from perf.calls import CALLS, DTYPES, Maker
    from perf.traffic import floor_bytes

    for dtype in ("bf16", "fp32"):
        for call in sorted(CALLS, key=lambda c: ORDER.index(c.family)):
            if dtype not in call.dtypes:
                continue
            if time.perf_counter() > deadline:
                results.say("out of time")
                return
            op = OPS[call.op]
            launcher = getattr(
                importlib.import_module(f"entrenar.kernels.{call.family}"), call.function
            )
            where = {"op": call.function, "dtype": dtype, "shape": call.shape}
            try:
                given = call.make(Maker(DTYPES[dtype], 4096, "cuda", values=True))
                variants = {"ours": lambda f=launcher, g=given: f(**g)}
                peer = _peer(op, call, given)
                if peer is not None:
                    variants["torch"] = peer
                found = time_turns(variants)
                result = launcher(**given)
            except Exception as error:  # one call that fails must not lose the others
                results.add("error", **where, error=f"{type(error).__name__}: {error}"[:500])
                torch.cuda.empty_cache()
                continue
            mutates = FUNCTIONS[call.function].mutates
            floor = floor_bytes(None, call, given, 0, mutates, result)
            rate = floor / found["ours"]["ms"] / 1e6
            extra = {} if peer is None else {"torch_ms": found["torch"]["ms"]}
            results.add(
                "timing", **where, **found["ours"], **extra,
                floor_bytes=floor, gb_s=rate, share_of_copy=rate / roof[0],
            )  # fmt: skip


def environment() -> dict[str, Any]:
    """Return what the numbers were measured with."""
    import torch

    triton = importlib.import_module("triton")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@contextlib.contextmanager
def _logged(results: Results, what: str) -> Iterator[None]:
    """Write what stopped a part into the log, and go on with the next."""
    try:
        yield
    except Exception as error:
        results.add("error", op=what, error=f"{type(error).__name__}: {error}"[:500])


def main(arguments: list[str]) -> int:
    """Run the command; 3 without a GPU, 1 where a test or a call failed."""
    parser = argparse.ArgumentParser(
        prog="python -m perf gpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--out", required=True, type=Path, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=9.0)
    options = parser.parse_args(arguments)
    if not runtime.cuda_available():
        print("perf gpu: torch sees no GPU on this machine; nothing was measured", file=sys.stderr)
        return 3
    seconds = 60 * options.minutes
    deadline = time.perf_counter() + seconds
    results = Results(options.out)
    results.add("environment", **environment())
    roof = (float("nan"), float("nan"))
    with _logged(results, "roofs"):
        roof = roofs(results)
    run_tests(results, Path(__file__).resolve().parents[1], SHARE_FOR_TESTS * seconds)
    timings(results, roof, deadline - 10)
    rows = [json.loads(line) for line in results.rows.read_text().splitlines()]
    bad = [r for r in rows if r["kind"] == "error" or (r["kind"] == "tests" and r["exit_code"])]
    return 1 if bad else 0
