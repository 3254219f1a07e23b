"""`entrenar generate`: answer one prompt, printing the text as it comes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from entrenar.cli.model_flags import load, sampling
from entrenar.errors import CheckpointError, ConfigError

__all__ = ["answer", "prompt_text", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    text = prompt_text(arguments.prompt)
    settings = sampling(arguments)
    model, _ = load(arguments)
    tokenizer = tokenizer_of(model)
    if arguments.raw:
        prompt = tokenizer.encode(text, add_special_tokens=True)
    else:
        from entrenar.finetune.chat import ChatEncoder

        messages = [{"role": "user", "content": text}]
        if arguments.system:
            messages.insert(0, {"role": "system", "content": arguments.system})
        prompt = ChatEncoder(tokenizer).prompt_ids(messages)
    answer(model, prompt, settings)
    return 0


def prompt_text(prompt: str | None) -> str:
    """Return the prompt; standard input where it is ``-``.

    Raises:
        ConfigError: There is none.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text or not text.strip():
        raise ConfigError("--prompt is missing or empty", "say --prompt and a text, or - for stdin")
    return text


def tokenizer_of(model: Any) -> Any:
    """Return the model's tokenizer.

    Raises:
        CheckpointError: It has none.
    """
    if model.tokenizer is None:
        raise CheckpointError(f"{model.path} has no tokenizer", "put tokenizer.json beside it")
    return model.tokenizer


def answer(model: Any, prompt: Sequence[int], settings: Any) -> str:
    """Generate, print each piece of text as soon as it is whole, and return all of it."""
    from entrenar.transformer.generation import generate
    from entrenar.transformer.tokenizer import TextStream

    stream = TextStream(model.tokenizer)

    def show(token: int) -> None:
        print(stream.push(token), end="", flush=True)

    result = generate(model, prompt, settings, on_token=show)
    print(stream.flush(), flush=True)
    return result.text
