"""`entrenar doctor`: what this machine offers, and whether the library computes right on it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from typing import Any

from entrenar import runtime
from entrenar.cli import OLDEST_TORCH, kernel_check, machine
from entrenar.cli.console import Console, gibibytes
from entrenar.errors import EntrenarError
from entrenar.finetune.environment import describe_environment, package_version

__all__ = ["diagnose", "run"]

_EXTRAS = {
    "train": ("tokenizers", "jinja2"),
    "gguf": ("gguf",),
    "ui": ("rich",),
    "plot": ("matplotlib",),
}


def run(arguments: argparse.Namespace) -> int:
    """Run the command; 3 where something that is here cannot be used, or computes wrong."""
    found, findings = diagnose()
    code = 3 if findings.problems else 0
    if arguments.json:
        print(
            json.dumps({**found, "problems": findings.problems, "notes": findings.notes}, indent=2)
        )
        return code
    console = Console()
    for problem in findings.problems:
        console.line(f"problem: {problem}", style="bold red")
    for note in findings.notes:
        console.notice(note)
    packages = found["packages"]
    gpu = ""
    if "capability" in found:
        gpu = f" ({found['gpu']}, capability {'.'.join(map(str, found['capability']))})"
    console.facts(
        {
            "entrenar": f"{found['entrenar']}, Python {found['python']}, {found['platform']}",
            "packages": ", ".join(f"{k} {v}" for k, v in packages.items() if v),
            "device": f"{found['device']}{gpu}, computes with {found['backend']}",
            "memory": ", ".join(
                f"{gibibytes(size)} free on {place}" for place, size in found["memory"].items()
            )
            + f", {found['cores']} cores",
            "extras": ", ".join(f"{k} {'yes' if v else 'no'}" for k, v in found["extras"].items()),
            "caches": ", ".join(f"{k} {v}" for k, v in found["caches"].items()),
            "check": found["check"],
            "kernel": found["kernel"],
        }
    )
    if not findings.problems:
        console.line("everything needed is here")
    return code


def diagnose() -> tuple[dict[str, Any], machine.Findings]:
    """Return what was found, and sentences about what is wrong or missing."""
    findings = machine.Findings()
    machine.check_gpu(findings)
    device = runtime.resolve_device("auto")
    found = describe_environment(device)
    found["memory"] = {
        place: runtime.available_memory_bytes(place) for place in dict.fromkeys(("cpu", device))
    }
    found["extras"] = {
        name: all(importlib.util.find_spec(package) is not None for package in packages)
        for name, packages in _EXTRAS.items()
    }
    _check_packages(found, findings)
    found["caches"] = machine.check_caches(findings)
    found["check"] = _check_device(device, findings)
    found["kernel"] = _check_kernel(device, findings)
    return found, findings


def _check_packages(found: dict[str, Any], findings: machine.Findings) -> None:
    version = package_version("torch") or "0"
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        findings.problems.append(f"torch is {version}, wanted at least {oldest}; upgrade it")
    if importlib.util.find_spec("safetensors") is None:
        findings.problems.append(
            "safetensors is not installed: no weights can be read; pip install safetensors"
        )
    if not found["extras"]["train"]:
        findings.problems.append(
            "training needs tokenizers and jinja2; pip install 'entrenar[train]'"
        )


def _check_device(device: str, findings: machine.Findings) -> str:
    """Run one op where the library would."""
    try:
        off = kernel_check.difference(device)
    except (EntrenarError, RuntimeError) as error:
        findings.problems.append(f"an op on {device} failed: {error}")
        return "failed"
    return _judged(f"RMS norm on {device}", off, findings)


def _check_kernel(device: str, findings: machine.Findings) -> str:
    """Compile one kernel for a GPU that is not here and emulate it; the device's own was run above."""
    if device != "cpu":
        return "compiled and run on the GPU"
    if sys.platform != "linux" or not runtime.triton_available():
        return "not compiled: triton is not installed"
    target = runtime.ptx_target()
    result = kernel_check.emulated(target)
    if "difference" in result:
        return _judged(
            f"RMS norm compiled for {target} and emulated", result["difference"], findings
        )
    error = str(result["error"])
    if "needs a C compiler" in error:
        findings.notes.append(f"the kernel was not run: {error}")
        return "not run: no C compiler"
    findings.problems.append(f"a kernel compiled for {target} failed: {error}")
    return "failed"


def _judged(what: str, off: Any, findings: machine.Findings) -> str:
    most = kernel_check.LARGEST_DIFFERENCE
    if not off < most:  # NaN is wrong too
        findings.problems.append(f"{what} is off by {off:.1e}, wanted less than {most:.0e}")
        return "wrong"
    return f"{what} agrees with float64 to {off:.0e}"
