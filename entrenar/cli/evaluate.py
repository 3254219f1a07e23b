"""`entrenar evaluate`: the loss of a model, with or without an adapter, on a data file."""

from __future__ import annotations

import argparse
import json

from entrenar.cli.console import Console, count
from entrenar.cli.generate import tokenizer_of
from entrenar.cli.model_flags import load
from entrenar.finetune.config import InstructConfig
from entrenar.finetune.corpus import read_corpus

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from entrenar.finetune.chat import encode_corpus
    from entrenar.finetune.instruct_pipeline import InstructPipeline

    console = Console()
    config = InstructConfig(
        max_seq_len=arguments.max_seq_len,
        batch_size=arguments.batch_size,
        device=arguments.device,
        dtype=arguments.dtype,
    )
    corpus = read_corpus(arguments.data)
    model, adapters = load(arguments)
    pipeline = InstructPipeline(model, config, adapters)
    encoded = encode_corpus(corpus, tokenizer_of(model), pipeline.config.max_seq_len)
    result = pipeline.evaluate_examples(encoded.examples)
    figures = {
        "loss": result.avg_loss,
        "perplexity": result.perplexity,
        "samples": len(encoded.examples),
        "response_tokens": result.total_response_tokens,
        "skipped": len(encoded.skipped) + len(corpus.empty_lines),
        "truncated": encoded.truncated,
    }
    if arguments.json:
        print(json.dumps(figures))
        return 0
    for notice in pipeline.notices:
        console.notice(notice)
    console.facts(
        {
            "loss": f"{result.avg_loss:.4f}",
            "perplexity": f"{result.perplexity:.3f}",
            "samples": f"{count(len(encoded.examples))} ({count(figures['skipped'])} skipped, "
            f"{count(encoded.truncated)} truncated)",
            "response tokens": count(result.total_response_tokens),
        }
    )
    return 0
