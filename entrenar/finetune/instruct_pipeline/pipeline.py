"""``InstructPipeline``: a base model, its adapters, and the steps that train them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from entrenar import runtime
from entrenar.autograd import Stream, Tape, Tensor, loaded_ahead, no_grad, ops
from entrenar.autograd.ops.nf4_gemm import DecodedWeights
from entrenar.autograd.tape import forked
from entrenar.errors import AdapterError, AllocationFailedError, CheckpointError, ConfigError
from entrenar.finetune.chat import ChatEncoder, Example
from entrenar.finetune.config import InstructConfig
from entrenar.finetune.instruct_pipeline.graphed import GraphedMicroBatches
from entrenar.finetune.instruct_pipeline.memory import wants_checkpointing
from entrenar.finetune.instruct_pipeline.packed import PackedBatch, pack
from entrenar.finetune.instruct_pipeline.prewarm import prewarm
from entrenar.finetune.instruct_pipeline.profiled import weight_owners
from entrenar.finetune.instruct_pipeline.results import (
    InstructBatchResult,
    InstructStepResult,
    perplexity,
)
from entrenar.finetune.merge import MergeReport, merge_adapter, refuse_merged
from entrenar.finetune.profiler import DeviceMarks, HostMarks, StepProfiler
from entrenar.finetune.ranks import Ranks
from entrenar.finetune.schedule import LearningRate
from entrenar.lora import LoraAdapters, LoraConfig
from entrenar.lora.peft_files import load_adapter, save_adapter
from entrenar.optable import call
from entrenar.transformer.checkpoint import open_checkpoint
from entrenar.transformer.generation import GenerateConfig, GenerateResult, generate
from entrenar.transformer.model import Transformer

__all__ = ["InstructPipeline"]

Pair = tuple[Sequence[int], Sequence[int]]
_NOTHING = contextlib.nullcontext()
_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


class InstructPipeline:
    """Fine-tunes LoRA adapters on instruction/response pairs.

    Args:
        model: The base model, frozen.
        config: The settings; ``max_seq_len`` is lowered to the model's context where it is longer.
        adapters: Adapters to go on with; fresh ones by the settings where None.
        ranks: The processes that train together; each takes its share of a step's micro-batches.

    Attributes:
        model: The base model with the adapters attached.
        config: The settings in force.
        adapters: The adapters and their optimiser state.
        notices: What the user should know about how the settings were applied.
        steps: Optimiser steps tried so far, those skipped as not finite included.
        non_finite_steps: Steps that changed nothing because loss or gradient was not finite.
        skipped_samples: Samples left out because truncation left them no response token.
    """

    def __init__(
        self,
        model: Transformer,
        config: InstructConfig,
        adapters: LoraAdapters | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.notices: list[str] = []
        context = model.config.context_length
        if config.max_seq_len > context:
            self.notices.append(
                f"max_seq_len is lowered from {config.max_seq_len} to {context}, the model's context"
            )
            config = config.replace(max_seq_len=context)
        self.model = model
        self.config = config
        self.device = str(model.device)
        if adapters is None:
            adapters = LoraAdapters(model.linear_shapes(), _lora_config(config), self.device)
        self.adapters = adapters
        model.attach(self.adapters)
        self.steps = 0
        self.non_finite_steps = 0
        self.skipped_samples = 0
        self._schedule = LearningRate.from_config(config, config.max_steps)
        self._fixed_rate: float | None = None
        self._checkpointing: bool | None = None
        self._stream = Stream(self.device)
        self._uploads = Stream(self.device)
        self._graphed: GraphedMicroBatches | None = None
        self._rate = torch.empty(1, dtype=torch.float32, device=self.device)
        # Decoded before the first step, so that no graph captures the decoding.
        self._decoded = DecodedWeights() if config.weight_cache == "decoded" else None
        if self._decoded is not None:
            with forked(self._stream):
                self._decoded.fill(model.named_weights().values(), model.dtype)
        self._profiler: StepProfiler | None = None
        self._profiling: StepProfiler | None = None  # while a step is profiled

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        config: InstructConfig | None = None,
        ranks: Ranks | None = None,
    ) -> InstructPipeline:
        """Load a base model and give it fresh adapters.

        Args:
            path: A Hugging Face folder or a GGUF file.
            config: The settings; the defaults where not given.
            ranks: The processes that train together.

        Raises:
            CheckpointError: There is no whole, supported model at ``path``.
            AdapterError: A target module matches no layer.
            DeviceError: The device is missing or too small.
        """
        config = config or InstructConfig()
        device = runtime.resolve_device(config.device)
        dtype = config.dtype
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        warmed = prewarm(path, config) if config.prewarm else None
        model = Transformer.from_pretrained(
            path,
            quantize="nf4" if config.quantize_nf4 else None,
            dtype=dtype,
            device=device,
            double_quant=config.double_quant,
        )
        pipeline = cls(model, config, ranks=ranks)
        if warmed is not None:
            pipeline.notices.append(
                f"{len(warmed.kernels)} kernels compiled before the model was loaded, in "
                f"{warmed.seconds:.0f} s"
            )
        return pipeline

    # training

    def train_step(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int]
    ) -> InstructStepResult:
        """Take one optimiser step on one pair.

        Args:
            prompt_ids: Tokens that carry no loss.
            response_ids: Tokens to be learned, the end of turn included. What is past
                ``max_seq_len`` is cut off.

        Returns:
            Loss, tokens and perplexity. Without a response token left nothing is updated.
        """
        result = self.train_batch([(prompt_ids, response_ids)])
        return InstructStepResult(result.avg_loss, result.total_response_tokens, result.perplexity)

    def train_batch(self, pairs: Sequence[Pair]) -> InstructBatchResult:
        """Take one optimiser step on many pairs, ``batch_size`` of them in the model at a time.

        The loss is the sum over all response tokens divided by their count over the whole batch,
        so it does not matter how the pairs fall into micro-batches.
        """
        kept, skipped = self._kept(pairs)
        size = self.config.batch_size
        batches = [kept[at : at + size] for at in range(0, len(kept), size)]
        return self.train_examples(batches, skipped=skipped)

    def train_examples(
        self,
        micro_batches: Sequence[Sequence[Example]],
        learning_rate: float | None = None,
        skipped: int = 0,
    ) -> InstructBatchResult:
        """Take one optimiser step on micro-batches of examples that carry loss.

        Args:
            micro_batches: Samples of all ranks, already cut; each with a response token.
            learning_rate: The step's rate; by the schedule of the configuration where None.
            skipped: Samples the caller left out, for the result.
        """
        total = sum(e.response_tokens for batch in micro_batches for e in batch)
        if total == 0:
            return InstructBatchResult(0.0, 0, 1.0, 0.0, skipped=skipped)
        rate = self.learning_rate if learning_rate is None else learning_rate
        try:
            with self._profiled():
                loss, norm, updated = self._step(micro_batches, total, rate)
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            raise _out_of_memory(self.device, micro_batches) from error
        self.steps += 1
        self.non_finite_steps += not updated
        return InstructBatchResult(
            avg_loss=loss,
            total_response_tokens=total,
            perplexity=perplexity(loss),
            grad_norm=norm,
            skipped=skipped,
            total_tokens=sum(len(e) for batch in micro_batches for e in batch),
            non_finite=not updated,
        )

    @property
    def learning_rate(self) -> float:
        """The rate of the next step: as set, or by the schedule of the configuration."""
        return self._schedule.at(self.steps) if self._fixed_rate is None else self._fixed_rate

    def set_learning_rate(self, rate: float | None) -> None:
        """Use one learning rate from here on; None returns to the schedule."""
        self._fixed_rate = rate

    def set_checkpointing(self, on: bool) -> None:
        """Recompute activations from here on, or keep them."""
        self._checkpointing = on

    @property
    def profiler(self) -> StepProfiler | None:
        """What was profiled so far; None where ``profile_interval`` is 0."""
        if self._profiler is None and self.config.profile_interval:
            marks = DeviceMarks() if self.device.startswith("cuda") else HostMarks()
            self._profiler = StepProfiler(weight_owners(self.model), marks)
        return self._profiler

    def _profiled(self) -> contextlib.AbstractContextManager[None]:
        """Profile the step at hand where it is one of every ``profile_interval``."""
        interval = self.config.profile_interval
        due = interval and (self.steps + 1) % interval == 0
        self._profiling = self.profiler if due else None
        if self._profiling is None:
            return _NOTHING
        return self._profiling.step(self.steps + 1, self._stream)

    def _using_decoded(self) -> contextlib.AbstractContextManager[None]:
        return _NOTHING if self._decoded is None else self._decoded.used()

    def _phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return _NOTHING if self._profiling is None else self._profiling.phase(name)

    def _step(
        self, micro_batches: Sequence[Sequence[Example]], total: int, rate: float
    ) -> tuple[float, float, bool]:
        """Return the loss, the gradient norm before clipping, and whether parameters changed."""
        sums = []
        # What is not finite is found in the loss and the norm below, not by NumPy's warnings.
        with forked(self._stream), self._using_decoded(), np.errstate(all="ignore"):
            with self._phase("zero"):
                self.adapters.zero_grad()
            mine = range(self.ranks.rank, len(micro_batches), self.ranks.world)
            if self.config.graph is True:
                with self._phase("replay"):
                    sums.append(self._replayed({n: micro_batches[n] for n in mine}, total))
                mine = range(0)
            packs = self._packed([micro_batches[number] for number in mine])
            for number in mine:
                with self._phase("data"):
                    packed = next(packs)
                recompute = self._recomputes(packed)
                seed = _dropout_seed(self.config, self.steps, number)
                with (
                    self._phase("forward"),
                    Tape(self._stream, overwrite_activations=True) as tape,
                ):
                    loss_sum, _ = self._loss(packed, 1.0 / total, recompute, seed)
                with self._phase("backward"):
                    tape.backward(loss_sum)
                sums.append(loss_sum)
            with self._phase("reduce"):
                self.ranks.add(self.adapters.grads, self._stream)
                summed = sum(loss_sum.item() for loss_sum in sums)
                loss = self.ranks.sums([summed], self.device)[0] / total
            if not math.isfinite(loss):
                return loss, math.nan, False
            with self._phase("clip"):
                norm, factor, skip = call(
                    "clip_factor",
                    self.adapters.grads,
                    self.config.gradient_clip_norm,
                    stream=self._stream,
                )
            with self._phase("optimiser"):
                self._update(rate, factor, skip)
            self._stream.synchronize()
            return loss, float(norm.item()), not bool(skip.item())

    def _update(self, rate: float, factor: torch.Tensor, skip: torch.Tensor) -> None:
        self._rate.copy_(torch.from_numpy(np.array([rate], dtype=np.float32)))
        arena = self.adapters
        call(
            "adamw_step",
            arena.params,
            arena.grads,
            arena.m,
            arena.v,
            arena.step,
            self._rate,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            eps=self.config.eps,
            weight_decay=self.config.weight_decay,
            grad_scale=factor,
            skip=skip,
            skipped=arena.arena.skipped,
            stream=self._stream,
        )

    def _packed(self, batches: Sequence[Sequence[Example]]) -> Iterator[PackedBatch]:
        """Yield packed micro-batches, each copied to the device while the one before is computed."""
        return loaded_ahead(batches, lambda batch: pack(batch, self.device), self._uploads)

    def _loss(
        self, packed: PackedBatch, grad_scale: Any, recompute: bool, dropout_seed: Any
    ) -> tuple[Tensor, int]:
        """Return the summed loss of the rows that carry it, and their number."""
        hidden = self.model.hidden(
            packed.ids,
            packed.positions,
            packed.cu_seqlens,
            checkpointing=recompute,
            dropout_seed=dropout_seed,
        )
        return ops.linear_cross_entropy(
            ops.take_rows(hidden, packed.rows),
            self.model.lm_head_weight,
            packed.targets,
            grad_scale=grad_scale,
            counted=packed.rows.shape[0],
            softcap=self.model.config.final_logit_softcapping,
        )

    def _replayed(self, batches: dict[int, Sequence[Example]], total: int) -> Tensor:
        """Add the gradients of micro-batches through captured graphs; return their summed loss."""
        if self._graphed is None:
            model = self.model.config
            if model.rotation_depends_on_length:
                kind = model.rope_scaling.kind
                raise ConfigError(
                    f"graph is true, but the model's {kind} rope scaling depends on each batch's length",
                    "set graph to auto",
                )
            samples = 1 if self.config.packing else self.config.batch_size
            self._graphed = GraphedMicroBatches(
                self._loss, self.device, [self.adapters.arena], model.context_length, samples
            )
        self._graphed.begin()
        for number, batch in batches.items():
            seed = _dropout_seed(self.config, self.steps, number)
            seeds = None if seed is None else self.model.layer_seeds(seed)
            self._graphed.add(batch, 1.0 / total, self._recomputes, seeds)
        return self._graphed.total

    def _recomputes(self, packed: PackedBatch) -> bool:
        if self._checkpointing is not None:
            return self._checkpointing
        itemsize = _ITEMSIZE.get(str(self.model.dtype).removeprefix("torch."), 4)
        bounds = packed.cu_seqlens
        return wants_checkpointing(
            self.config,
            self.model.config,
            self.adapters.layers,
            tokens=len(packed.ids),
            longest=int((bounds[1:] - bounds[:-1]).max()),
            itemsize=itemsize,
            device=self.device,
        )

    def _kept(self, pairs: Sequence[Pair]) -> tuple[list[Example], int]:
        cut = [Example.from_pair(*pair).truncated(self.config.max_seq_len) for pair in pairs]
        kept = [example for example in cut if example.response_tokens]
        self.skipped_samples += len(cut) - len(kept)
        return kept, len(cut) - len(kept)

    # evaluation and generation

    def evaluate(self, pairs: Sequence[Pair]) -> InstructBatchResult:
        """Return the loss on pairs without training: one mean over all their response tokens."""
        kept, skipped = self._kept(pairs)
        return self.evaluate_examples(kept, skipped)

    def evaluate_examples(
        self,
        examples: Sequence[Example],
        skipped: int = 0,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> InstructBatchResult:
        """Return the loss on examples without training.

        Args:
            examples: Samples, already cut; each with a response token.
            skipped: Samples the caller left out, for the result.
            should_stop: Asked between micro-batches; True ends the evaluation early with what was
                seen so far.
        """
        summed, counted, tokens = 0.0, 0, 0
        size = self.config.batch_size
        batches = [examples[at : at + size] for at in range(0, len(examples), size)]
        for batch, packed in zip(batches, self._packed(batches), strict=True):
            if should_stop():
                break
            with (
                forked(self._stream),
                self._using_decoded(),
                no_grad(),
                np.errstate(all="ignore"),
            ):
                loss_sum, rows = self._loss(packed, 1.0, False, None)
                summed += loss_sum.item()
            counted += rows
            tokens += sum(len(example) for example in batch)
        loss = summed / counted if counted else 0.0
        return InstructBatchResult(
            loss, counted, perplexity(loss), 0.0, skipped, tokens, not math.isfinite(loss)
        )

    def generate(
        self, prompt_ids: Sequence[int], config: GenerateConfig | None = None
    ) -> GenerateResult:
        """Continue a prompt with the adapted model.

        Args:
            prompt_ids: Tokens of the prompt; :meth:`chat_ids` makes them of a question.
            config: How to sample; the defaults where not given.
        """
        with forked(self._stream), no_grad():
            return generate(self.model, list(prompt_ids), config or GenerateConfig())

    def chat_ids(self, question: str, system: str | None = None) -> list[int]:
        """Return the prompt tokens of one question through the model's chat template.

        Raises:
            CheckpointError: The model has no tokenizer.
        """
        messages = [{"role": "user", "content": question}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return self.encoder().prompt_ids(messages)

    def encoder(self, plain_prompt: bool = False) -> ChatEncoder:
        """Return what turns messages into tokens.

        Raises:
            CheckpointError: The model has no tokenizer.
        """
        if self.model.tokenizer is None:
            raise CheckpointError(
                f"{self.model.path} has no tokenizer", "put tokenizer.json beside the weights"
            )
        return ChatEncoder(self.model.tokenizer, plain_prompt)

    # adapters on disk

    def adapter_state(self) -> dict[str, np.ndarray]:
        """Return the adapters' weights by PEFT's names, float32 copies."""
        return self.adapters.state_dict()

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapters as PEFT does; replaces an adapter folder in one step.

        Raises:
            AdapterError: ``folder`` holds something else.
        """
        save_adapter(folder, self.adapters, str(self.model.path))

    def load_adapter(self, folder: str | Path) -> None:
        """Take over the weights of an adapter folder; moments and step counter start anew.

        Raises:
            AdapterError: It is not one, or its rank, scale or layers are not those configured.
        """
        saved, state = load_adapter(folder)
        mine = self.adapters.config
        for name in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"):
            if getattr(saved, name) != getattr(mine, name):
                raise AdapterError(
                    f"the adapter {folder} has {name} {getattr(saved, name)}, this pipeline "
                    f"{getattr(mine, name)}",
                    "configure the pipeline as the adapter was trained",
                )
        before = self.adapters.state_dict()
        self.adapters.load_state_dict(state)
        if self.model.path is not None:
            try:
                refuse_merged(open_checkpoint(self.model.path), self.adapters)
            except AdapterError:
                self.adapters.load_state_dict(before)
                raise

    def merge(
        self, folder: str | Path, dtype: str = "bfloat16", double_quant: bool = False
    ) -> MergeReport:
        """Write the base model with the adapters added as a Hugging Face folder.

        The adapters are added in float32 to the weights as the checkpoint holds them, not to their
        NF4 form, and rounded once to ``dtype``. The pipeline's own weights stay as they are.

        Args:
            folder: A folder that is missing or empty.
            dtype: ``"bfloat16"``, ``"float16"``, ``"float32"``, or ``"nf4"``, which loses part of
                the update; how much is in the report.
            double_quant: Quantise the NF4 scales too.

        Raises:
            ConfigError: The folder is not empty, or the dtype is another.
            CheckpointError: The model was not read from a checkpoint.
        """
        if self.model.path is None:
            raise CheckpointError("the model was not read from a checkpoint", "merge one that was")
        return merge_adapter(self.model.path, self.adapters, folder, dtype, double_quant)


def _lora_config(config: InstructConfig) -> LoraConfig:
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=config.target_modules,
        use_rslora=config.use_rslora,
        seed=config.seed,
    )


def _dropout_seed(config: InstructConfig, step: int, micro_batch: int) -> int | None:
    """Return the seed of one micro-batch's masks, a function of nothing but where it stands."""
    if not config.lora_dropout:
        return None
    state = np.random.SeedSequence([config.seed, step, micro_batch]).generate_state(1)
    return int(state[0]) & 0x7FFFFFFF


def _out_of_memory(
    device: str, micro_batches: Sequence[Sequence[Example]]
) -> AllocationFailedError:
    longest = max(sum(len(e) for e in batch) for batch in micro_batches)
    free = runtime.available_memory_bytes(device) / 2**30
    return AllocationFailedError(
        f"{device} ran out of memory in a micro-batch of {longest} tokens, with {free:.1f} GiB free",
        "lower --batch-size and raise --grad-accum-steps, add --checkpointing true or "
        "--quantize-nf4, or lower --max-seq-len",
    )
