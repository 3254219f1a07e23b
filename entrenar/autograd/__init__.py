"""A minimal tape autograd over the op table: streams, tensors, the tape and differentiable ops."""

from __future__ import annotations

from entrenar.autograd import ops
from entrenar.autograd.checkpoint import checkpoint
from entrenar.autograd.gradcheck import gradcheck
from entrenar.autograd.node import ACCUMULATED, Node
from entrenar.autograd.stream import Event, Stream, current_stream
from entrenar.autograd.tape import Tape, no_grad, record, recording, run
from entrenar.autograd.tensor import HookHandle, Tensor

__all__ = [
    "ACCUMULATED",
    "Event",
    "HookHandle",
    "Node",
    "Stream",
    "Tape",
    "Tensor",
    "checkpoint",
    "current_stream",
    "gradcheck",
    "no_grad",
    "ops",
    "record",
    "recording",
    "run",
]
