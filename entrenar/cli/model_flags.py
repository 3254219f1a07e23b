"""The flags of commands that load a model, with or without an adapter."""

from __future__ import annotations

import argparse
from typing import Any

from entrenar import runtime

__all__ = ["add_model_flags", "add_sampling_flags", "load", "sampling"]


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that :func:`load` reads."""
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="a Hugging Face folder or a GGUF file (default: the base that the adapter names)",
    )
    parser.add_argument("--adapter", metavar="DIR", help="an adapter folder (default: none)")
    parser.add_argument(
        "--quantize-nf4", action="store_true", help="hold the weights in 4 bits (NF4)"
    )
    parser.add_argument("--double-quant", action="store_true", help="quantise NF4's scales too")
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="WORD",
        help="storage of weights: auto (float32 on a CPU, else bfloat16), float32, bfloat16, float16",
    )
    parser.add_argument(
        "--device", default="auto", metavar="WORD", help="auto, cpu, cuda or cuda:N"
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that :func:`sampling` reads."""
    parser.add_argument(
        "--system", metavar="TEXT", help="instructions before the conversation (default: none)"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="tokens of an answer at most"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        metavar="X",
        help="divides the logits; 0 takes the likeliest token",
    )
    parser.add_argument(
        "--top-k", type=int, default=50, metavar="N", help="draw among the N likeliest; 0 is off"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="X",
        help="draw among the likeliest that together have probability X; 1 is off",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="X",
        help="draw among those with at least X times the likeliest's probability; 0 is off",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="lowers tokens that the text has already; 1 is off",
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="repeat the same answer (default: another each time)"
    )


def load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Load the model and adapter that the flags name.

    Returns:
        The model with the adapter attached, and the adapters or None.

    Raises:
        EntrenarError: Model or adapter cannot be loaded.
    """
    from entrenar.finetune.adapted import load_adapted

    device = runtime.resolve_device(arguments.device)
    return load_adapted(
        arguments.model,
        arguments.adapter,
        quantize="nf4" if arguments.quantize_nf4 else None,
        dtype=arguments.dtype,
        device=device,
        double_quant=arguments.double_quant,
    )


def sampling(arguments: argparse.Namespace) -> Any:
    """Return the ``GenerateConfig`` of the flags.

    Raises:
        ConfigError: A value is out of range.
    """
    from entrenar.transformer.sampling import GenerateConfig

    names = "max_new_tokens temperature top_k top_p min_p repetition_penalty seed"
    return GenerateConfig(**{name: getattr(arguments, name) for name in names.split()})
