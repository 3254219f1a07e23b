"""NF4 model folders go both ways between transformers with bitsandbytes and this package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from entrenar import Transformer
from entrenar.finetune.merge import merge_adapter

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to mend
IDS = np.random.default_rng(3).integers(3, 100, (2, 13))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny llama whose rows are whole blocks: bitsandbytes misreads shorter rows on a CPU."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def theirs(folder: Path, **options: object) -> torch.nn.Module:
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def logits_of(model: torch.nn.Module) -> np.ndarray:
    """Logits in training mode: in evaluation bitsandbytes repacks, for kernels that round more."""
    with torch.no_grad():
        return model.train()(input_ids=torch.from_numpy(IDS)).logits.float().numpy()


@pytest.mark.parametrize("double_quant", [False, True])
def test_what_transformers_saves_opens_here(base: Path, tmp_path: Path, double_quant: bool) -> None:
    import transformers

    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = theirs(base, quantization_config=settings)
    model.save_pretrained(tmp_path / "nf4")
    ours = Transformer.from_pretrained(tmp_path / "nf4", device="cpu")
    assert ours.quantize == "nf4"
    np.testing.assert_allclose(ours.logits(IDS), logits_of(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("double_quant", [False, True])
def test_what_we_write_opens_in_transformers(
    base: Path, tmp_path: Path, double_quant: bool
) -> None:
    merge_adapter(base, None, tmp_path / "ours", "nf4", double_quant)
    ours = Transformer.from_pretrained(tmp_path / "ours", device="cpu")
    model = theirs(tmp_path / "ours")
    # the folder's compute dtype is bfloat16, so theirs rounds every activation to 8 bits
    wanted = logits_of(model)
    np.testing.assert_allclose(ours.logits(IDS), wanted, rtol=0, atol=0.05 * np.abs(wanted).max())
    mine = load_file(tmp_path / "ours" / "model.safetensors")
    linears = {n: m for n, m in model.named_modules() if "_proj" in n}
    assert len(linears) == 14
    for name, module in linears.items():
        assert torch.equal(mine[f"{name}.weight"], module.weight.data), name
        for key, value in module.weight.quant_state.as_dict(packed=True).items():
            if not key.startswith("quant_state"):  # JSON, whose dtype is the compute dtype's there
                assert torch.equal(mine[f"{name}.weight.{key}"], value), (name, key)
