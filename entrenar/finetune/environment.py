"""``environment.json``: what a run ran on, for comparing it later with another one."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

from entrenar import __version__, runtime

__all__ = ["describe_environment", "package_version"]

_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "gguf", "jinja2")


def package_version(name: str) -> str | None:
    """Return an installed package's version; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_environment(device: str) -> dict[str, Any]:
    """Return versions, processor, memory, device and backend, ready for JSON.

    Args:
        device: ``"cpu"`` or ``"cuda:N"``.
    """
    found: dict[str, Any] = {
        "entrenar": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "available_memory_bytes": runtime.available_memory_bytes("cpu"),
        "device": device,
        "backend": runtime.backend() if device == "cpu" else "triton",
        "packages": {name: package_version(name) for name in _PACKAGES},
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("ENTRENAR_")
            or name in ("TRITON_INTERPRET", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        },
    }
    if device.startswith("cuda"):
        import torch

        found["gpu"] = torch.cuda.get_device_name(device)
        found["capability"] = list(torch.cuda.get_device_capability(device))
    return found
