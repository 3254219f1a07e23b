"""Kernels on storage of this machine: on its GPU, else compiled for sm_80 and executed by the emulator."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest
import torch

if importlib.util.find_spec("triton") is None:  # a supported state, in which there are no kernels
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where kernel tests put their storage."""
    if os.environ.get("ENTRENAR_BACKEND") == "triton":
        pytest.skip("kernels of this process are interpreted")
    if torch.cuda.is_available():
        return "cuda"
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("the emulator needs a C compiler")
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")
    return "cpu"
