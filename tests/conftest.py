"""Options and counts every test shares; the op suite's slow backends and the kernels' own tests, run beside.

Triton decides at import whether kernels are interpreted, so the interpreted part of the op suite needs a
process of its own. A run of all tests starts one with the session, has it run the emulated part,
``tests/kernels`` and ``tests/perf`` too, so that two cores work, and collects them in
``tests/test_child_suites.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

BACKENDS = ("cpu", "ptx", "ptx_sm_90", "ptx_sm_120", "interpret", "cuda")
CHILDREN = {"interpret": ("interpret",), "ptx": ("ptx", "ptx_sm_90", "ptx_sm_120"), "kernels": ()}
BESIDE = ("kernels", "perf")  # the folders that the part ``kernels`` runs
DELEGATES = pytest.StashKey[bool]()
PROVE = os.environ.get("ENTRENAR_PROVE", "") not in ("", "0")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        action="append",
        choices=BACKENDS,
        help="op suite: run this backend only (repeatable); all that this machine has otherwise",
    )


def runs_everything(config: pytest.Config) -> bool:
    """Whether all of ``tests`` was asked for, and no backend: then children run their part."""
    if config.getoption("--backend") or config.getoption("keyword") or config.getoption("markexpr"):
        return False
    here = Path(__file__).resolve().parent
    return any(Path(arg.split("::")[0]).resolve() in (here, here.parent) for arg in config.args)


def pytest_configure(config: pytest.Config) -> None:
    # Two test processes share two cores; BLAS threads on top would only contend.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1" if not PROVE else "2")
    if "interpret" in (config.getoption("--backend") or ()):
        os.environ["ENTRENAR_BACKEND"] = "triton"
        os.environ["TRITON_INTERPRET"] = "1"
    if runs_everything(config):
        apart = {backend for part in CHILDREN.values() for backend in part}
        config.option.backend = [b for b in BACKENDS if b not in apart]
        config.stash[DELEGATES] = True


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave to a child what it runs."""
    here = Path(__file__).resolve().parent
    apart = collection_path.parent == here and collection_path.name in BESIDE
    return True if apart and config.stash.get(DELEGATES, False) else None


@pytest.fixture(scope="session")
def counts() -> Callable[[int, int], int]:
    """``counts(reduced, full)``: the first in ``make test``, the second in ``make prove``."""
    return lambda reduced, full: full if PROVE else reduced


class Children:
    """The parts of ``CHILDREN``, one after the other, in processes of their own."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.process: subprocess.Popen[bytes] | None = None
        self.codes: dict[str, int] = {}
        self.thread = threading.Thread(target=self._run_all, daemon=True)
        self.stopped = False
        self.thread.start()

    def _run_all(self) -> None:
        for part in CHILDREN:
            if not self.stopped:
                self.codes[part] = self._run(part)

    def _run(self, part: str) -> int:
        environment = {k: v for k, v in os.environ.items() if k != "ENTRENAR_BACKEND"}
        if part == "interpret":
            environment |= {"ENTRENAR_BACKEND": "triton", "TRITON_INTERPRET": "1"}
        folders = ["tests/ops"] if CHILDREN[part] else [f"tests/{name}" for name in BESIDE]
        command = [sys.executable, "-m", "pytest", *folders, "-q"]
        command += [f"--backend={backend}" for backend in CHILDREN[part]]
        command += ["-p", "no:cacheprovider", "-x" if not PROVE else "--maxfail=20"]
        with (self.folder / part).open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            return self.process.wait()

    def wait(self, part: str) -> tuple[int, str]:
        """Return the exit code and all output of a part's run."""
        self.thread.join()
        return self.codes[part], (self.folder / part).read_text()

    def stop(self) -> None:
        """End what still runs."""
        self.stopped = True
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        self.thread.join()


@pytest.fixture(scope="session", autouse=True)
def children(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Children | None]:
    """The runs beside this one; None where the tests asked for are not all."""
    if not request.config.stash.get(DELEGATES, False):
        yield None
        return
    started = Children(request.config.rootpath, tmp_path_factory.mktemp("children"))
    try:
        yield started
    finally:
        started.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Collect the children last, so that both processes work until then."""
    items.sort(key=lambda item: "test_child_suites" in item.nodeid)
