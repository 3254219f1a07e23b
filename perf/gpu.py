"""Run the tests and every timing that need a GPU, most valuable first, within a time limit.

    python -m perf gpu --out DIR --minutes 9

Appends to ``DIR/results.jsonl``, a JSON object a line, and ``DIR/log.txt`` as it goes, so that a run cut short
keeps what it has. Each part is a process of its own with a share of the time; one that hangs is ended with all
it started, and the next begins. First the op suite on the GPU, then every op at a model's sizes beside torch,
Liger, bitsandbytes and Unsloth (perf.kernels), the tests of streams and graphs, launches of a training step,
the step itself where ``--model`` names one, then other token counts, models and dtypes. A peer that is not
installed is stated as absent. Exits 3 where there is no GPU, 1 where a part failed or tests were cut off.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from entrenar import runtime
from perf.timing import environment, version

__all__ = ["Part", "Results", "main", "parse_counts", "parts", "run_child", "run_parts"]

ROOT = Path(__file__).resolve().parents[1]
PEERS = ("torch", "liger-kernel", "bitsandbytes", "unsloth")
RESERVE_S, LEAST_S = 5.0, 10.0
TAIL = 100_000
Child = Callable[[tuple[str, ...], Path, float], tuple[int | None, str]]


class Results:
    """Two files that grow line by line: rows for programs, a log for people."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.rows, self.log = folder / "results.jsonl", folder / "log.txt"

    def add(self, kind: str, **fields: Any) -> None:
        """Append a row, and the same to the log."""
        row = {"kind": kind, **fields}
        with self.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        told = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
        self.say(" ".join(told))

    def say(self, text: str) -> None:
        """Append a line to the log and show it."""
        with self.log.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text, flush=True)


@dataclasses.dataclass(frozen=True)
class Part:
    """One process of the run.

    Attributes:
        name: As it stands in the rows.
        command: What runs, from the repository's root.
        share: Most of the whole time that it may take.
        tests: Its output ends with pytest's counts.
        rows: A JSON file it writes, whose rows are added to the results, or None where it appends itself.
    """

    name: str
    command: tuple[str, ...]
    share: float
    tests: bool = False
    rows: Path | None = None


def parts(results: Results, model: Path | None) -> Iterator[Part]:
    """Yield what is run, most valuable first.

    Args:
        results: Where rows go.
        model: A model folder or file for the training step, or None.
    """

    def python(*arguments: str) -> tuple[str, ...]:
        return (sys.executable, "-m", *arguments)

    def tests(*arguments: str) -> tuple[str, ...]:
        return python("pytest", *arguments, "-q", "--maxfail=40", "-p", "no:cacheprovider")

    def kernels(shapes: str, tokens: str, dtype: str = "bf16") -> tuple[str, ...]:
        return python(
            "perf", "kernels", "--device", "cuda:0", "--shapes", shapes, "--tokens", tokens,
            "--dtype", dtype, "--seconds", "0.2", "--append", str(results.rows),
        )  # fmt: skip

    yield Part("op suite", tests("tests/ops", "--backend=cuda"), 0.3, tests=True)
    yield Part("kernels qwen2.5-1.5b, 2048", kernels("qwen2.5-1.5b", "2048"), 0.3)
    yield Part("stream tests", tests("tests/autograd", "-m", "gpu"), 0.1, tests=True)
    launches = results.folder / "launches.json"
    command = python("perf", "launches", "--device", "cuda:0", "--json", str(launches))
    yield Part("launches", command, 0.1, rows=launches)
    if model is not None:
        step = results.folder / "step.json"
        command = python(
            "perf", "step", "--model", str(model), "--tokens", "2048", "--json", str(step)
        )
        yield Part("step", command, 0.2, rows=step)
    yield Part("kernels qwen2.5-1.5b, 1 and 512", kernels("qwen2.5-1.5b", "1,512"), 0.2)
    yield Part("kernels llama-3.1-8b, 2048", kernels("llama-3.1-8b", "2048"), 0.3)
    yield Part("kernel tests", tests("tests/kernels"), 0.2, tests=True)
    yield Part("kernels qwen2.5-7b, 2048", kernels("qwen2.5-7b", "2048"), 0.3)
    yield Part("kernels smollm2-135m, fp32", kernels("smollm2-135m", "512,2048", "fp32"), 0.2)


def parse_counts(output: str) -> dict[str, int]:
    """Return what pytest's last line counts: passed, failed, skipped, errors."""
    names = ("passed", "failed", "skipped", "errors?")
    found = {name.rstrip("s?"): re.findall(rf"(\d+) {name}\b", output) for name in names}
    return {name: int(numbers[-1]) if numbers else 0 for name, numbers in found.items()}


def run_child(command: tuple[str, ...], log: Path, seconds: float) -> tuple[int | None, str]:
    """Run a command, its output appended to the log as it comes, no longer than ``seconds``.

    Returns:
        Its exit code, or None where it was ended with all that it had started; and the end of its output.
    """
    start = log.stat().st_size if log.exists() else 0
    with log.open("ab") as file:
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        code: int | None
        try:
            code = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # its own session: children of it as well
                child.wait()
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - TAIL))
        return code, file.read().decode(errors="replace")


def run_parts(
    todo: Iterator[Part],
    results: Results,
    seconds: float,
    run: Child = run_child,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run parts one after the other within ``seconds``; return whether none failed and no tests were cut off.

    A part gets its share of the whole time and no more than is left. One for which too little is left is
    stated as not run, and timings that were cut off keep the rows they have.
    """
    start, good = clock(), True
    for part in todo:
        began = clock()
        limit = min(part.share * seconds, seconds - (began - start) - RESERVE_S)
        if limit < min(LEAST_S, part.share * seconds):
            results.add("not run", part=part.name, why="out of time")
            continue
        results.say(f"== {part.name}: {' '.join(part.command)}")
        code, output = run(part.command, results.log, limit)
        fields: dict[str, Any] = {"part": part.name, "exit_code": code, "seconds": clock() - began}
        if code is None:
            fields["cut_off_after_s"] = limit
        if part.tests:
            fields |= parse_counts(output)
        for row in _rows_of(part.rows):
            results.add(part.name, **row)
        results.add("tests" if part.tests else "part", **fields)
        good = good and (code == 0 or (code is None and not part.tests))
    return good


def _rows_of(path: Path | None) -> list[dict[str, Any]]:
    """Return the rows a part wrote, none where it did not come that far, and remove the file."""
    if path is None or not path.exists():
        return []
    value = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    rows = value if isinstance(value, list) else [value]
    return [{k: v for k, v in row.items() if k != "kind"} for row in rows]


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m perf gpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--out", required=True, type=Path, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument(
        "--model", type=Path, help="model folder or GGUF file for the training step"
    )
    options = parser.parse_args(arguments)
    if not runtime.cuda_available():
        print("perf gpu: torch sees no GPU on this machine; nothing was measured", file=sys.stderr)
        return 3
    start = time.monotonic()
    results = Results(options.out.resolve())
    results.add("environment", **environment("cuda:0"))
    results.add("peers", **{name: version(name) or "absent" for name in PEERS})
    left = 60 * options.minutes - (time.monotonic() - start)
    model = options.model.resolve() if options.model else None
    return 0 if run_parts(parts(results, model), results, left) else 1
