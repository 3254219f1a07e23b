"""Settings of an instruction fine-tuning run: one frozen dataclass, checked when it is made.

The names are the same in Python, in TOML and, with dashes, on the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from entrenar.errors import ConfigError

__all__ = ["SCHEDULES", "InstructConfig", "nearest"]

SCHEDULES = ("cosine", "linear", "constant")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_RUN_TABLE = "run"  # what the command line adds to a run's config.toml; no setting of training


def _setting(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstructConfig:
    """Settings of instruction fine-tuning.

    Attributes:
        lora_rank: Rank r of every adapter.
        lora_alpha: Numerator of the adapter's scale, alpha / r (alpha / sqrt(r) with rsLoRA).
        lora_dropout: Share of an adapter's inputs zeroed while training.
        target_modules: Names of the linear layers that get an adapter, or ``"all-linear"``.
        use_rslora: Scale by alpha / sqrt(r).
        learning_rate: AdamW's peak learning rate.
        betas: AdamW's decay rates of the first and second moment.
        eps: AdamW's epsilon, added to the root of the second moment.
        weight_decay: AdamW's decoupled weight decay.
        warmup_steps: Steps of linear warm-up; not together with ``warmup_ratio``.
        warmup_ratio: Share of all steps spent warming up.
        schedule: Course of the learning rate after warm-up: cosine, linear or constant.
        epochs: Passes over the training data.
        max_steps: Optimiser steps; overrides ``epochs``, repeating the data where needed.
        batch_size: Samples (rows, with packing) in a micro-batch.
        grad_accum_steps: Micro-batches to an optimiser step.
        max_seq_len: Most tokens of a sample, prompt and response together.
        train_on: What carries loss: ``responses``, every turn of the assistant, or ``all`` tokens.
        long_samples: What becomes of a sample of more tokens than ``max_seq_len``: ``truncate`` cuts it
            from the right, ``skip`` leaves it out, ``error`` refuses the file.
        gradient_clip_norm: Largest global norm of the gradient; None switches clipping off.
        quantize_nf4: Hold the frozen weights in NF4.
        double_quant: Quantise NF4's scales too; needs ``quantize_nf4``.
        packing: Fill rows of ``max_seq_len`` tokens with several samples each; they do not see
            one another.
        checkpointing: Recompute each block's activations in the backward pass; ``"auto"`` decides
            by the memory at hand.
        graph: Capture each form of micro-batch once and replay it; rows are padded to few forms. Saves
            what launching costs and takes the memory of all forms kept. ``"auto"`` is off until it has
            been measured on a GPU.
        prewarm: Compile every kernel of a step before the model is loaded, when the device's memory is
            still free; of no effect where the CPU computes.
        weight_cache: ``"decoded"`` keeps a copy of every NF4 weight decoded to the activations' dtype, half
            precision on a GPU, so that none is decoded again in a step; ``"none"`` decodes at each use.
        lm_head_device: Where the output projection lies; ``"auto"``: with the model.
        eval_fraction: Share of the data held out for evaluation.
        profile_interval: Every so many steps one is profiled; 0 is off.
        seed: Seed of initialisation, shuffling, splitting and dropout.
        dtype: Storage of weights and activations; ``"auto"``: float32 on a CPU, else bfloat16.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        ConfigError: A value has the wrong type or is out of range, or two exclude each other.
    """

    lora_rank: int = _setting(16, "rank r of every adapter")
    lora_alpha: float = _setting(32.0, "the adapters' scale is alpha / rank")
    lora_dropout: float = _setting(0.0, "share of an adapter's inputs zeroed while training")
    target_modules: str | tuple[str, ...] = _setting(
        ("q_proj", "v_proj"), "layers that get an adapter, comma-separated, or all-linear"
    )
    use_rslora: bool = _setting(False, "scale adapters by alpha / sqrt(rank)")
    learning_rate: float = _setting(2e-4, "peak learning rate of AdamW")
    betas: tuple[float, float] = _setting((0.9, 0.999), "moment decay rates of AdamW")
    eps: float = _setting(1e-8, "epsilon of AdamW")
    weight_decay: float = _setting(0.01, "decoupled weight decay of AdamW")
    warmup_steps: int = _setting(0, "steps of linear warm-up")
    warmup_ratio: float = _setting(0.0, "share of all steps spent warming up")
    schedule: str = _setting("cosine", "learning rate after warm-up: cosine, linear, constant")
    epochs: int = _setting(3, "passes over the training data")
    max_steps: int | None = _setting(None, "optimiser steps; overrides --epochs")
    batch_size: int = _setting(1, "samples in a micro-batch")
    grad_accum_steps: int = _setting(1, "micro-batches to an optimiser step")
    max_seq_len: int = _setting(512, "tokens of a sample that are kept")
    train_on: str = _setting("responses", "what carries loss: responses, all")
    long_samples: str = _setting("truncate", "samples too long: truncate, skip, error")
    gradient_clip_norm: float | None = _setting(1.0, "largest gradient norm, or none")
    quantize_nf4: bool = _setting(False, "hold the frozen weights in 4 bits (NF4)")
    double_quant: bool = _setting(False, "quantise NF4's scales too")
    packing: bool = _setting(False, "fill rows of --max-seq-len tokens with several samples")
    checkpointing: str | bool = _setting("auto", "recompute activations: auto, true, false")
    graph: str | bool = _setting("auto", "replay captured micro-batches: auto (off), true, false")
    prewarm: bool = _setting(False, "compile every kernel of a step before the model is loaded")
    weight_cache: str = _setting(
        "none", "decoded copies of NF4 weights, kept for speed at the cost of memory: none, decoded"
    )
    lm_head_device: str = _setting("auto", "where the output projection lies: auto")
    eval_fraction: float = _setting(0.0, "share of the data held out for evaluation")
    profile_interval: int = _setting(0, "profile every Nth step; 0 is off")
    seed: int = _setting(0, "seed of initialisation, shuffling, splitting and dropout")
    dtype: str = _setting("auto", "storage of weights: auto, float32, bfloat16, float16")
    device: str = _setting("auto", "auto, cpu, cuda or cuda:N")

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.warmup_steps and self.warmup_ratio:
            raise ConfigError(
                f"warmup_steps is {self.warmup_steps} and warmup_ratio is {self.warmup_ratio}, "
                "wanted one of them",
                "leave one at 0",
            )
        if self.double_quant and not self.quantize_nf4:
            raise ConfigError(
                "double_quant is true but quantize_nf4 is false", "set quantize_nf4 as well"
            )
        if self.weight_cache != "none" and not self.quantize_nf4:
            raise ConfigError(
                f"weight_cache is {self.weight_cache} but quantize_nf4 is false: nothing is decoded",
                "set quantize_nf4 as well",
            )

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], where: str = "the configuration"
    ) -> InstructConfig:
        """Build a configuration from names and values; text such as ``"1e-4"`` is not parsed.

        Args:
            values: Field names and values; lists stand for tuples, the text ``"none"`` for None.
            where: What the values came from, for the message.

        Raises:
            ConfigError: A name is unknown (the nearest names are given), or a value is refused.
        """
        fields = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in fields:
                raise ConfigError(f"{where} has the unknown key {name!r}", nearest(name, fields))
        cleaned: dict[str, Any] = {
            name: None
            if isinstance(value, str) and value.lower() == "none" and name in _OPTIONAL
            else value
            for name, value in values.items()
        }
        try:
            return cls(**cleaned)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}", error.hint) from error

    @classmethod
    def from_toml(cls, path: str | Path) -> InstructConfig:
        """Read a configuration file, or the ``config.toml`` of an earlier run.

        Raises:
            ConfigError: The file is missing, is not TOML, or holds a value that is refused.
        """
        values = read_toml(path)
        values.pop(_RUN_TABLE, None)
        return cls.from_dict(values, str(path))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by name, tuples as lists."""
        values = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def to_toml(self, run: Mapping[str, Any] | None = None) -> str:
        """Return the text of a configuration file that :meth:`from_toml` reads back.

        Args:
            run: Further settings of the command line, written as the table ``[run]``.
        """
        lines = [
            _toml_line(name, value, name in _OPTIONAL) for name, value in self.to_dict().items()
        ]
        if run:
            lines += ["", f"[{_RUN_TABLE}]"]
            lines += [_toml_line(name, value, False) for name, value in run.items()]
        return "\n".join(line for line in lines if line is not None) + "\n"

    def replace(self, **changes: Any) -> InstructConfig:
        """Return a copy with some settings changed, checked again."""
        return dataclasses.replace(self, **changes)

    @property
    def pairs_per_step(self) -> int:
        """Samples (rows, with packing) that one optimiser step reads at most."""
        return self.batch_size * self.grad_accum_steps


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file into a dictionary.

    Raises:
        ConfigError: The file cannot be read or is not TOML; the message has the line.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no configuration file {path}", "check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "it must be a UTF-8 TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", "correct that line") from error


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that names what was probably meant."""
    known = list(known)
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "known are " + ", ".join(known)


def _toml_line(name: str, value: Any, optional: bool) -> str | None:
    if value is None:
        return f'{name} = "none"' if optional else None
    return f"{name} = {_toml_value(value)}"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, (int, float)):
        return repr(value)
    escaped = "".join(
        "\\" + c if c in '"\\' else c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}"
        for c in str(value)
    )
    return f'"{escaped}"'


# A check takes the name and the value of a setting and returns what the value stands for.


def _refuse(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}, wanted {wanted}", f"change {name}")


def _integer(low: int, optional: bool = False) -> Any:
    wanted = f"a whole number of at least {low}" + (" or none" if optional else "")

    def check(name: str, value: Any) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise _refuse(name, value, wanted)
        return int(value)

    return check


def _number(low: float, high: float, wanted: str, open_low: bool, optional: bool = False) -> Any:
    def check(name: str, value: Any) -> float | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _refuse(name, value, wanted)
        good = math.isfinite(value) and value < high and (value > low if open_low else value >= low)
        if not good:
            raise _refuse(name, value, wanted)
        return float(value)

    return check


_positive = _number(0.0, math.inf, "a number above 0", open_low=True)
_share = _number(0.0, 1.0, "at least 0 and below 1", open_low=False)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "true or false")
    return value


def _one_of(*known: Any) -> Any:
    def check(name: str, value: Any) -> Any:
        for option in known:
            if type(value) is type(option) and value == option:
                return value
        raise _refuse(name, value, " or ".join(str(option).lower() for option in known))

    return check


def _betas(name: str, value: Any) -> tuple[float, float]:
    try:
        first, second = value
        return _share(name, first), _share(name, second)
    except (ConfigError, TypeError, ValueError):
        raise _refuse(name, value, "two numbers of at least 0 and below 1") from None


def _targets(name: str, value: Any) -> str | tuple[str, ...]:
    if value == "all-linear":
        return "all-linear"
    names = (value,) if isinstance(value, str) else value
    good = isinstance(names, (list, tuple)) and bool(names)
    if not good or not all(isinstance(n, str) and n.strip() for n in names):
        raise _refuse(name, value, "names of layers or 'all-linear'")
    if len(set(names)) != len(names):
        raise _refuse(name, value, "each layer once")
    return tuple(names)


def _device(name: str, value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise _refuse(name, value, "auto, cpu, cuda or cuda:N")
    return value


_CHECKS: dict[str, Any] = {
    "lora_rank": _integer(1),
    "lora_alpha": _positive,
    "lora_dropout": _share,
    "target_modules": _targets,
    "use_rslora": _boolean,
    "learning_rate": _positive,
    "betas": _betas,
    "eps": _positive,
    "weight_decay": _number(0.0, math.inf, "a number of at least 0", open_low=False),
    "warmup_steps": _integer(0),
    "warmup_ratio": _share,
    "schedule": _one_of(*SCHEDULES),
    "epochs": _integer(1),
    "max_steps": _integer(1, optional=True),
    "batch_size": _integer(1),
    "grad_accum_steps": _integer(1),
    "max_seq_len": _integer(2),
    "train_on": _one_of("responses", "all"),
    "long_samples": _one_of("truncate", "skip", "error"),
    "gradient_clip_norm": _number(
        0.0, math.inf, "a number above 0 or none", open_low=True, optional=True
    ),
    "quantize_nf4": _boolean,
    "double_quant": _boolean,
    "packing": _boolean,
    "checkpointing": _one_of("auto", True, False),
    "graph": _one_of("auto", True, False),
    "prewarm": _boolean,
    # A head on the host comes with the GPU path; until then asking for one is an error rather than a
    # setting that does nothing.
    "weight_cache": _one_of("none", "decoded"),
    "lm_head_device": _one_of("auto"),
    "eval_fraction": _share,
    "profile_interval": _integer(0),
    "seed": _integer(0),
    "dtype": _one_of(*_DTYPES),
    "device": _device,
}
_OPTIONAL = ("max_steps", "gradient_clip_norm")
