"""One training step of a tiny model, wholly through the Triton kernels, against the NumPy backend."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from entrenar.transformer.families import FAMILIES
from tests.finetune.test_train_families import write

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "data" / "peft_tiny_llama.npz"


def step(folder: Path, out: Path, backend: str, *options: str) -> dict[str, np.ndarray]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["ENTRENAR_BACKEND"] = backend
    if backend == "triton":
        environment["TRITON_INTERPRET"] = "1"
    environment["PYTHONPATH"] = str(HERE.parents[1])
    done = subprocess.run(
        [sys.executable, str(HERE / "step_on_backend.py"), str(folder), str(out), *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    with np.load(out) as data:
        return dict(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_llama")
    with np.load(GOLDEN) as data:
        (path / "config.json").write_text(str(data["config"]))
        weights = {k.removeprefix("weight/"): data[k] for k in data if k.startswith("weight/")}
    save_file(weights, path / "model.safetensors")
    return path


@pytest.mark.parametrize("weights", ["dense", "nf4"])
@pytest.mark.parametrize("backend", ["triton", "ptx"])
def test_a_training_step_matches_numpy(
    folder: Path, tmp_path: Path, backend: str, weights: str
) -> None:
    pytest.importorskip("triton")
    if backend == "ptx" and shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("the emulator needs a C compiler")
    compare(folder, tmp_path, backend, *(() if weights == "dense" else (weights,)))


def test_a_training_step_of_every_family_matches_numpy(
    tmp_path: Path, counts: Callable[[int, int], int]
) -> None:
    """Through compiled kernels: parts of one projection as strided views, capped and windowed scores."""
    pytest.importorskip("triton")
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("the emulator needs a C compiler")
    first = ("gemma2", "phi3")
    families = [*first, *sorted(set(FAMILIES) - set(first))]
    for family in families[: counts(len(first), len(families))]:
        folder = tmp_path / family
        folder.mkdir()
        compare(write(folder / "model", family, num_hidden_layers=2), folder, "ptx", "all-linear")


def compare(folder: Path, out: Path, backend: str, *options: str) -> None:
    """Hold a step on a backend to the same on NumPy."""
    wanted = step(folder, out / "numpy.npz", "numpy", *options)
    got = step(folder, out / f"{backend}.npz", backend, *options)
    assert wanted["where"].tolist() == ["numpy"]
    assert got["where"].tolist() == [backend]
    assert got["loss"] == pytest.approx(float(wanted["loss"]), abs=1e-5)
    assert got["grad_norm"] == pytest.approx(float(wanted["grad_norm"]), rel=1e-4)
    for name in (n for n in wanted if n.startswith("gradient/")):
        # two fp32 paths of a few hundred roundings each: 1e-4 of the tensor's largest gradient
        scale = np.abs(wanted[name]).max()
        assert scale > 0, (folder, name)
        np.testing.assert_allclose(got[name], wanted[name], rtol=0, atol=1e-4 * scale, err_msg=name)
    for name in (n for n in wanted if n.startswith("after/")):
        # Adam's first step is lr times the sign of the gradient, which is theirs where it is not tiny
        gradient = np.abs(wanted[name.replace("after/", "gradient/")])
        firm = gradient > 2e-4 * gradient.max()
        assert firm.mean() > 0.5, name
        np.testing.assert_allclose(
            got[name][firm], wanted[name][firm], rtol=0, atol=1e-3, err_msg=name
        )
