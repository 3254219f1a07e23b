"""`entrenar train`: check everything that can be checked, load the model, train, show."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from entrenar.cli.config_flags import config_from
from entrenar.errors import ConfigError
from entrenar.finetune.config import InstructConfig, nearest
from entrenar.finetune.ranks import Ranks
from entrenar.finetune.run_folder import RunFolder

__all__ = ["RunSettings", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a run is told beside the training settings; written to ``config.toml`` as ``[run]``.

    Attributes:
        model: A Hugging Face folder or a GGUF file.
        data: Training samples.
        eval_data: Held-out samples; None takes ``eval_fraction`` of the training ones.
        command: The command that started the run.
        save_every: Steps between checkpoints; 0 only when stopped.
        eval_every: Steps between evaluations; 0 before and after only.
        log_every: Steps between lines printed.
        keep_checkpoints: Checkpoints that are kept; 0 keeps all.
        patience: Evaluations without a lower held-out loss that end the run; 0 never does.
        answers: Held-out questions answered before and after.
        vram_wait: Seconds to wait for other processes to give GPU memory back; 0 refuses at once.
    """

    model: str
    data: str
    eval_data: str | None = None
    command: str = "train"
    save_every: int = 0
    eval_every: int = 0
    log_every: int = 1
    keep_checkpoints: int = 3
    patience: int = 0
    answers: int = 3
    vram_wait: int = 0

    def __post_init__(self) -> None:
        least = {"save_every": 0, "eval_every": 0, "log_every": 1, "answers": 0, "vram_wait": 0}
        least |= {"keep_checkpoints": 0, "patience": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(
                    f"{name} is {value!r}, wanted a whole number of at least {low}", "correct it"
                )

    @classmethod
    def resolve(cls, arguments: argparse.Namespace, table: dict[str, Any]) -> RunSettings:
        """Take each setting from its flag, else from the file's ``[run]``, else its default.

        Raises:
            ConfigError: A name is unknown, or model or data is missing.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name in table:
            if name not in names:
                raise ConfigError(f"[run] has the unknown key {name!r}", nearest(name, names))
        values = dict(table)
        for name in names:
            given = getattr(arguments, name, None)
            if given is not None:
                values[name] = given
        for name in ("model", "data"):
            if not values.get(name):
                raise ConfigError(f"--{name} is missing", f"say --{name} and a path")
        return cls(**values)

    def table(self) -> dict[str, Any]:
        """Return the settings that are set, for TOML."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.print_config:
        config, settings = _resolved(arguments)
        print(config.to_toml(settings.table()), end="")
        return 0
    if not arguments.output:
        raise ConfigError(
            "--output is missing", "say --output and a new folder, such as runs/first"
        )
    ranks = Ranks.from_environment()
    folder = RunFolder(arguments.output)
    if ranks.leads:  # the others would find what it has begun to write
        folder.check(arguments.resume, arguments.overwrite)
    config, settings = _resolved(arguments)
    if arguments.allow_drift and not arguments.resume:
        raise ConfigError("--allow-drift is for --resume alone", "say both, or neither")
    if arguments.resume and not arguments.allow_drift:
        _check_model(folder, settings.model)
    return train(
        config,
        settings,
        folder,
        resume=arguments.resume,
        allow_drift=arguments.allow_drift,
        show=arguments.show,
        ranks=ranks,
    )


def _resolved(arguments: argparse.Namespace) -> tuple[InstructConfig, RunSettings]:
    """Return the settings in force: of flags, file and defaults."""
    file = arguments.config
    if file is None and arguments.resume and arguments.output:
        folder = RunFolder(arguments.output)
        if folder.is_run:  # the run's own settings, so that --output --resume is enough
            file = str(folder.config)
    config, table = config_from(arguments, file)
    return config, RunSettings.resolve(arguments, table)


def _check_model(folder: RunFolder, model: str) -> None:
    """Refuse to continue a run on a model that is not the one it began with, where both are here.

    Raises:
        ConfigError: They differ.
    """
    earlier = folder.run_settings().get("model")
    paths = [Path(str(path)) for path in (earlier, model)]
    if earlier and all(path.exists() for path in paths) and not paths[0].samefile(paths[1]):
        raise ConfigError(
            f"the run in {folder.path} began with the model {earlier}, not {model}",
            "resume without --model, or start a new run with --overwrite",
        )


def train(
    config: InstructConfig,
    settings: RunSettings,
    folder: RunFolder,
    *,
    resume: bool = False,
    allow_drift: bool = False,
    show: int = 0,
    ranks: Ranks | None = None,
) -> int:
    """Train and report; everything that can fail early fails before the model is loaded."""
    from entrenar.cli.session import Session

    session = Session(
        config, settings, folder, resume=resume, allow_drift=allow_drift, ranks=ranks or Ranks()
    )
    return session.run(show)
