"""Train one step of a tiny model on the backend the environment names; write what came out.

    ENTRENAR_BACKEND=triton python step_on_backend.py MODEL_FOLDER OUT.npz [nf4] [all-linear]

Writes the loss, the gradient norm, every gradient and the parameters after the step, and the set of
places that launches ran.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from entrenar import InstructConfig, InstructPipeline, runtime

PAIRS = [([5, 9, 17, 3], [8, 44, 2]), ([7], [12, 30, 60, 9, 2])]


def main(folder: str, out: str, *options: str) -> None:
    some = ("q_proj", "v_proj", "down_proj")
    config = InstructConfig(
        lora_rank=4,
        lora_alpha=8.0,
        target_modules="all-linear" if "all-linear" in options else some,
        learning_rate=1e-2,
        schedule="constant",
        max_seq_len=32,
        quantize_nf4="nf4" in options,
        double_quant="nf4" in options,
        lora_dropout=0.1,
        checkpointing=True,
        device="cpu",
        seed=3,
    )
    pipeline = InstructPipeline.from_pretrained(Path(folder), config)
    rng = np.random.default_rng(1)
    state = {
        k: (rng.standard_normal(v.shape) * 0.2).astype(np.float32)
        for k, v in pipeline.adapters.state_dict().items()
    }
    pipeline.adapters.load_state_dict(state)
    records: list[runtime.LaunchRecord] = []
    with runtime.listening(records.append):
        result = pipeline.train_batch(PAIRS)
    np.savez(
        out,
        loss=result.avg_loss,
        grad_norm=result.grad_norm,
        where=np.array(sorted({r.where for r in records})),
        launches=len(records),
        **{f"gradient/{k}": v for k, v in pipeline.adapters.grad_dict().items()},
        **{f"after/{k}": v for k, v in pipeline.adapters.state_dict().items()},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
