"""`entrenar chat`: a conversation on the terminal; an empty line or end of file ends it."""

from __future__ import annotations

import argparse

from entrenar.cli.generate import answer, tokenizer_of
from entrenar.cli.model_flags import load, sampling
from entrenar.errors import DataError

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from entrenar.finetune.chat import ChatEncoder

    settings = sampling(arguments)
    model, _ = load(arguments)
    encoder = ChatEncoder(tokenizer_of(model))
    start = [{"role": "system", "content": arguments.system}] if arguments.system else []
    turns = list(start)
    print("say something; /new starts over, an empty line ends", flush=True)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return 0
        if not text:
            return 0
        if text == "/new":
            turns = list(start)
            continue
        turns.append({"role": "user", "content": text})
        try:
            reply = answer(model, encoder.prompt_ids(turns), settings)
        except DataError as error:  # the conversation has outgrown the context
            print(f"entrenar: {error}; /new starts over", flush=True)
            turns.pop()
            continue
        turns.append({"role": "assistant", "content": reply})
