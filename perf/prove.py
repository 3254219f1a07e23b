"""Run every test at full counts and keep what came out in perf/results/prove.json.

    python -m perf prove [PYTEST ARGUMENTS]

The record has the counts, each skip with its reason, the failures, the slowest tests, the revision,
and the machine; it is written whether or not the tests pass, and the exit code is pytest's.
"""

from __future__ import annotations

import collections
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from perf.output import write_json

__all__ = ["main", "summary"]

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "perf" / "results" / "prove.json"
PACKAGES = ("torch", "triton", "numpy", "transformers", "peft", "bitsandbytes")


def version(package: str) -> str | None:
    """Return an installed package's version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def revision() -> str:
    """Return the commit the tests ran on, marked where the tree differs from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def summary(xml: Path) -> dict[str, Any]:
    """Count what a JUnit file of pytest holds."""
    tests = list(ElementTree.parse(xml).getroot().iter("testcase"))
    failed, skipped, slow = [], collections.Counter[str](), []
    for test in tests:
        name = f"{test.get('classname')}::{test.get('name')}"
        slow.append((float(test.get("time") or 0), name))
        skip = test.find("skipped")
        if skip is not None:
            skipped[skip.get("message") or ""] += 1
        elif test.find("failure") is not None or test.find("error") is not None:
            failed.append(name)
    return {
        "tests": len(tests),
        "passed": len(tests) - len(failed) - sum(skipped.values()),
        "failed": failed,
        "skipped": dict(skipped.most_common()),
        "slowest_s": {name: round(seconds, 1) for seconds, name in sorted(slow)[:-11:-1]},
    }


def main(arguments: list[str]) -> int:
    """Run the tests, write the record, return pytest's exit code."""
    started = datetime.datetime.now(datetime.UTC)
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "junit.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "tests", f"--junit-xml={xml}", *arguments],
            cwd=ROOT,
            env={**os.environ, "ENTRENAR_PROVE": "1"},
            check=False,
        )
        counts = summary(xml) if xml.exists() else {"tests": 0}
    record = {
        "date": started.date().isoformat(),
        "seconds": round((datetime.datetime.now(datetime.UTC) - started).total_seconds()),
        "revision": revision(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "packages": {name: version(name) for name in PACKAGES},
        **counts,
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    write_json(record, RESULT, indent=2)
    print(f"{RESULT.relative_to(ROOT)}: {record.get('passed', 0)} passed")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
