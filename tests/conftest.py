"""Options and counts every test shares; the interpreted suite, started beside the rest.

Triton decides at import whether kernels are interpreted, so the interpreted part of the op suite runs
in a process of its own, started with the session and collected by ``tests/test_interpreted.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BACKENDS = ("cpu", "ptx", "interpret", "cuda")
PROVE = os.environ.get("ENTRENAR_PROVE", "") not in ("", "0")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        action="append",
        choices=BACKENDS,
        help="op suite: run this backend only (repeatable); all that this machine has otherwise",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Two test processes share two cores; BLAS threads on top would only contend.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1" if not PROVE else "2")
    if "interpret" in (config.getoption("--backend") or ()):
        os.environ["ENTRENAR_BACKEND"] = "triton"
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def counts() -> Callable[[int, int], int]:
    """``counts(reduced, full)``: the first in ``make test``, the second in ``make prove``."""
    return lambda reduced, full: full if PROVE else reduced


class Child:
    """The interpreted suite in a process of its own, its output in a file."""

    def __init__(self, root: Path, log: Path) -> None:
        self.log = log
        environment = {**os.environ, "ENTRENAR_BACKEND": "triton", "TRITON_INTERPRET": "1"}
        command = [sys.executable, "-m", "pytest", "tests/ops", "--backend=interpret", "-q"]
        command += ["-p", "no:cacheprovider", "-x" if not PROVE else "--maxfail=20"]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, cwd=root, env=environment, stdout=out, stderr=subprocess.STDOUT
            )

    def wait(self) -> tuple[int, str]:
        """Return the exit code and all output."""
        return self.process.wait(), self.log.read_text()


@pytest.fixture(scope="session", autouse=True)
def interpreted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """The child that runs the suite interpreted; None where the test for it is not selected."""
    wanted = any("test_interpreted" in item.nodeid for item in request.session.items)
    if not wanted or request.config.getoption("--backend"):
        yield None
        return
    child = Child(request.config.rootpath, tmp_path_factory.mktemp("interpreted") / "log.txt")
    try:
        yield child
    finally:
        child.process.kill()
        child.process.wait()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Collect the child last, so that both processes work until then."""
    items.sort(key=lambda item: "test_interpreted" in item.nodeid)
