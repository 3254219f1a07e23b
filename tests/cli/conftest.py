"""The same tiny model as the fine-tuning tests use."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "finetune" / "conftest.py"
_spec = importlib.util.spec_from_file_location("tiny_model_fixtures", SOURCE)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

tiny_model = _module.tiny_model
make_model = _module.make_model
pairs_file = _module.pairs_file
