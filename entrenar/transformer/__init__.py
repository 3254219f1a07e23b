"""Llama-type decoders: config, checkpoints from disk, tokenizer, model, generation."""
