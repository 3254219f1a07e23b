"""A minimal tape autograd over the op table: streams, tensors, the tape and differentiable ops."""

from __future__ import annotations

from entrenar.autograd import ops
from entrenar.autograd.arena import Arena
from entrenar.autograd.checkpoint import checkpoint
from entrenar.autograd.gradcheck import gradcheck
from entrenar.autograd.graph import Graph
from entrenar.autograd.hazards import detect_hazards
from entrenar.autograd.node import ACCUMULATED, Node
from entrenar.autograd.prefetch import DecodeAhead, Prefetcher, loaded_ahead, upload
from entrenar.autograd.stream import Event, Stream, current_stream
from entrenar.autograd.tape import Tape, no_grad, record, recording, run
from entrenar.autograd.tensor import HookHandle, Tensor

__all__ = [
    "ACCUMULATED",
    "Arena",
    "DecodeAhead",
    "Event",
    "Graph",
    "HookHandle",
    "Node",
    "Prefetcher",
    "Stream",
    "Tape",
    "Tensor",
    "checkpoint",
    "current_stream",
    "detect_hazards",
    "gradcheck",
    "loaded_ahead",
    "no_grad",
    "ops",
    "record",
    "recording",
    "run",
    "upload",
]
