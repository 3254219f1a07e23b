"""`entrenar doctor`: what this machine offers, and whether the library computes right on it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from typing import Any

from entrenar import runtime
from entrenar.cli import OLDEST_TORCH
from entrenar.cli.console import Console, gibibytes
from entrenar.errors import EntrenarError
from entrenar.finetune.environment import describe_environment, package_version

__all__ = ["run"]

_EXTRAS = {
    "train": ("tokenizers", "jinja2"),
    "gguf": ("gguf",),
    "ui": ("rich",),
    "plot": ("matplotlib",),
}


def run(arguments: argparse.Namespace) -> int:
    """Run the command; 3 where something needed is missing or computes wrong."""
    found, problems = diagnose()
    if arguments.json:
        print(json.dumps({**found, "problems": problems}, indent=2))
        return 3 if problems else 0
    console = Console()
    packages = found["packages"]
    shown = ", ".join(f"{k} {v}" for k, v in packages.items() if v)
    console.facts(
        {
            "entrenar": f"{found['entrenar']}, Python {found['python']}, {found['platform']}",
            "packages": shown,
            "device": f"{found['device']}, computes with {found['backend']}",
            "memory": f"{gibibytes(found['available_memory_bytes'])} free, {found['cores']} cores",
            "extras": ", ".join(f"{k} {'yes' if v else 'no'}" for k, v in found["extras"].items()),
            "check": found["check"],
        }
    )
    for problem in problems:
        console.notice(problem)
    if not problems:
        console.line("everything needed is here")
    return 3 if problems else 0


def diagnose() -> tuple[dict[str, Any], list[str]]:
    """Return what was found and a sentence for each problem."""
    problems: list[str] = []
    device = runtime.resolve_device("auto")
    found = describe_environment(device)
    found["extras"] = {
        name: all(importlib.util.find_spec(package) is not None for package in packages)
        for name, packages in _EXTRAS.items()
    }
    torch_version = package_version("torch") or "0"
    numbers = tuple(
        int(part) for part in torch_version.split("+")[0].split(".")[:2] if part.isdigit()
    )
    if numbers < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        problems.append(f"torch is {torch_version}, wanted at least {oldest}; upgrade it")
    if sys.platform == "linux" and not runtime.triton_available():
        problems.append("triton is not installed: there are no GPU kernels; pip install triton")
    if importlib.util.find_spec("safetensors") is None:
        problems.append(
            "safetensors is not installed: no weights can be read; pip install safetensors"
        )
    if not found["extras"]["train"]:
        problems.append("training needs tokenizers and jinja2; pip install 'entrenar[train]'")
    found["check"] = _check(device, problems)
    return found, problems


def _check(device: str, problems: list[str]) -> str:
    """Run one op where the library would, against NumPy in float64."""
    import numpy as np
    import torch

    from entrenar.optable import call
    from entrenar.reference.rms_norm import rms_norm_forward

    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((33, 257)), rng.standard_normal(257)
    wanted = rms_norm_forward(x, weight, 1e-5)[0]
    try:
        tensors = [torch.from_numpy(a.astype(np.float32)).to(device) for a in (x, weight)]
        got = call("rms_norm_forward", *tensors, 1e-5)[0].to("cpu").numpy()
    except (EntrenarError, RuntimeError) as error:
        problems.append(f"an op on {device} failed: {error}")
        return "failed"
    difference = float(np.abs(got - wanted).max())
    if not difference < 1e-4:
        problems.append(f"an op on {device} is off by {difference:.1e}, wanted less than 1e-4")
        return "wrong"
    return f"RMS norm on {device} agrees with float64 to {difference:.0e}"
