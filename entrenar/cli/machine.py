"""What a machine lacks, in sentences that say what to do: no GPU, no triton, a torch without CUDA."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from entrenar import runtime
from entrenar.errors import VramError
from entrenar.gpu import Card, cards_seen, ledger_path, read_cards

__all__ = ["Findings", "cache_folders", "check_caches", "check_gpu"]

OLDEST_CAPABILITY = (7, 5)
_TORCH = "install a CUDA build: https://pytorch.org/get-started/locally"


class Findings:
    """What the doctor has to say.

    Attributes:
        problems: Sentences about what keeps something that is here from being used.
        notes: Sentences about what is not here and need not be.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []


def check_gpu(findings: Findings) -> None:
    """Say what keeps a GPU from being used, or that there is none."""
    if runtime.cuda_available():
        _check_usable(findings)
        return
    try:
        cards = read_cards()
    except VramError:
        findings.problems.append(
            "nvidia-smi is installed but fails, so the driver is not running; repair it, or all is "
            "computed on the CPU"
        )
    else:
        if cards:
            _check_hidden(findings, cards)
        else:
            _say_none(findings)
    if sys.platform == "linux" and not runtime.triton_available():
        findings.notes.append(
            "triton is not installed, so kernels can be neither compiled nor checked here; the CPU does "
            "not need it; pip install triton"
        )


def _say_none(findings: Findings) -> None:
    findings.notes.append(
        "no GPU was found, so everything is computed by NumPy on the CPU, which small models need "
        "no more than; for larger ones use a machine with an NVIDIA GPU"
    )


def _check_usable(findings: Findings) -> None:
    import torch

    if not runtime.triton_available():
        findings.problems.append(
            "there is a GPU, but triton is not installed, and without it no kernel runs there; pip "
            "install triton, or pass --device cpu"
        )
    if torch.version.hip:
        return
    capability = torch.cuda.get_device_capability(0)
    if capability < OLDEST_CAPABILITY:
        found, oldest = (".".join(map(str, c)) for c in (capability, OLDEST_CAPABILITY))
        findings.problems.append(
            f"the GPU has compute capability {found}, kernels need at least {oldest}; pass --device cpu"
        )


def _check_hidden(findings: Findings, cards: Sequence[Card]) -> None:
    import torch

    version, name = torch.__version__, cards[0].name
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        findings.problems.append(
            f"this machine has a GPU ({name}), but torch {version} is built for the CPU only, so the "
            f"GPU is not used; {_TORCH}"
        )
    elif visible is not None and not cards_seen(cards, visible):
        findings.notes.append(
            f"this machine has a GPU ({name}), which CUDA_VISIBLE_DEVICES={visible!r} hides; unset it to "
            "use the GPU"
        )
    else:
        findings.problems.append(
            f"this machine has a GPU ({name}), but torch {version} with CUDA {torch.version.cuda} cannot "
            "use it; its driver is likely older than that CUDA: update it, or install a torch for an "
            "older CUDA"
        )


def cache_folders() -> dict[str, tuple[Path, str]]:
    """Return each folder that is written without being asked for: its path and the variable to move it."""
    from entrenar.emulator.build import cache_folder

    found = {"emulator": (cache_folder(), "ENTRENAR_EMULATOR_CACHE")}
    if runtime.triton_available():
        home = Path(os.environ.get("TRITON_HOME") or Path.home())
        named = os.environ.get("TRITON_CACHE_DIR")
        found["triton"] = (Path(named) if named else home / ".triton" / "cache", "TRITON_CACHE_DIR")
    if runtime.cuda_available():
        found["vram ledger"] = (ledger_path().parent, "ENTRENAR_VRAM_LEDGER")
    return found


def check_caches(findings: Findings) -> dict[str, str]:
    """Try each cache folder, or the one it would be made in; return their paths by name."""
    folders = cache_folders()
    for name, (folder, variable) in folders.items():
        nearest = folder
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
        try:
            with tempfile.TemporaryFile(dir=nearest) as file:
                file.write(b"0")
        except OSError as error:
            findings.problems.append(
                f"the {name} cache {folder} cannot be written: {error.strerror or error}; set {variable} "
                "to a place that can"
            )
    return {name: str(folder) for name, (folder, _) in folders.items()}
