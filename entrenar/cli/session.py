"""One training run on the terminal: checks, banner, progress, answers before and after, summary."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from entrenar import runtime
from entrenar.cli.console import Console, count, duration, gibibytes
from entrenar.cli.machine import Findings, check_gpu
from entrenar.errors import CheckpointError, ConfigError
from entrenar.finetune.batching import split_heldout, total_steps
from entrenar.finetune.chat import EncodedCorpus, encode_corpus
from entrenar.finetune.config import InstructConfig
from entrenar.finetune.corpus import Conversation, Corpus, read_corpus
from entrenar.finetune.run_folder import RunFolder

if TYPE_CHECKING:
    from entrenar.cli.train import RunSettings
    from entrenar.finetune.instruct_pipeline import InstructPipeline
    from entrenar.finetune.ranks import Ranks
    from entrenar.finetune.training_run import RunResult, TrainingRun
    from entrenar.gpu import VramGuard

__all__ = ["Session"]

_ANSWER_TOKENS = 40


class Session:
    """A run from its settings to its last line of output.

    Args:
        config: The training settings.
        settings: Paths and intervals.
        folder: The run's folder, already checked.
        resume: Continue the folder's last checkpoint.
        allow_drift: Continue although settings, data or model differ.
        ranks: The processes that train together; only the first prints and writes.
    """

    def __init__(
        self,
        config: InstructConfig,
        settings: RunSettings,
        folder: RunFolder,
        *,
        resume: bool,
        allow_drift: bool = False,
        ranks: Ranks,
    ) -> None:
        self.config = config.replace(device=ranks.device(config.device))
        self.ranks = ranks
        self.settings = settings
        self.folder = folder
        self.resume = resume
        self.allow_drift = allow_drift
        self.console = Console("" if ranks.leads else f"rank {ranks.rank}")
        self.questions: list[Conversation] = []
        self._plain_prompt = False
        self._format = self._used = ""
        self._times: deque[float] = deque(maxlen=20)
        self._interrupts = 0
        self._guard: VramGuard | None = None

    def run(self, show: int) -> int:
        """Check, load, train, report; return the exit code."""
        device = runtime.resolve_device(self.config.device)
        if self.config.device == "auto":
            findings = Findings()
            check_gpu(findings)
            for sentence in findings.problems:
                self.console.notice(sentence)
        empty = self.folder.is_empty
        train, heldout, tokenizer = self._data()
        for example in train.examples[:show]:
            self.console.masked(_pieces(example, tokenizer))
        claimed = self.folder.claimed() if self.ranks.leads else contextlib.nullcontext()
        with self.ranks.joined(device), claimed:
            if (
                empty and self.ranks.leads
            ):  # unless a run that began in the meantime has written to it
                self.folder.check()
            with self._reserved(device):
                return self._run(train, heldout, device)

    @contextlib.contextmanager
    def _reserved(self, device: str) -> Iterator[None]:
        """Hold what the run will need of the GPU's memory; of the CPU's nothing is reserved."""
        from entrenar.finetune.vram import guard_for

        guard = guard_for(
            self.config,
            self.settings.model,
            device,
            task=f"entrenar {self.settings.command} {self.folder.path.name}",
            wait_s=self.settings.vram_wait,
            on_wait=self.console.notice,
        )
        if guard is None:
            yield
            return
        with guard:
            self._guard = guard
            yield

    def _run(self, train: EncodedCorpus, heldout: EncodedCorpus | None, device: str) -> int:
        """Load, train, report; return the exit code."""
        from entrenar.finetune.instruct_pipeline import InstructPipeline
        from entrenar.finetune.training_run import TrainingRun

        self.console.status("reading the model")
        started = time.perf_counter()
        pipeline = InstructPipeline.from_pretrained(self.settings.model, self.config, self.ranks)
        self.console.status(None)
        self._banner(pipeline, train, heldout, device, time.perf_counter() - started)
        training = TrainingRun(
            pipeline,
            train.examples,
            heldout.examples if heldout else (),
            folder=self.folder,
            settings=self.settings.table(),
            save_every=self.settings.save_every,
            eval_every=self.settings.eval_every,
            keep_checkpoints=self.settings.keep_checkpoints,
            patience=self.settings.patience,
            allow_drift=self.allow_drift,
            skipped=len(train.skipped) + len(train.left_out),
            on_row=self._row,
            on_notice=self.console.notice,
        )
        before = [] if self.resume else self._answers(pipeline)
        result = self._train(training)
        if not self.ranks.leads:
            return 130 if result.interrupted else 0
        return self._report(pipeline, result, before)

    # data

    def _data(self) -> tuple[EncodedCorpus, EncodedCorpus | None, Any]:
        """Read, check and tokenise the data; the model's weights are not read yet."""
        from entrenar.lora import match_targets
        from entrenar.transformer.checkpoint import open_checkpoint
        from entrenar.transformer.weights import linear_shapes

        corpus = read_corpus(self.settings.data)
        held = read_corpus(self.settings.eval_data) if self.settings.eval_data else None
        if held is not None and self.config.eval_fraction:
            raise ConfigError(
                "both --eval-data and --eval-fraction were given, wanted one", "leave one out"
            )
        checkpoint = open_checkpoint(self.settings.model)
        tokenizer = checkpoint.tokenizer()
        if tokenizer is None:
            raise CheckpointError(
                f"{self.settings.model} has no tokenizer", "put its tokenizer.json into the folder"
            )
        match_targets(linear_shapes(checkpoint.config), self.config.target_modules)
        context = checkpoint.config.context_length
        if self.config.max_seq_len > context:
            self.console.notice(
                f"max_seq_len is lowered from {self.config.max_seq_len} to {context}, "
                "the model's context"
            )
            self.config = self.config.replace(max_seq_len=context)
        if held is None:
            corpus, held = self._split(corpus)
        if held is not None:
            self._plain_prompt = held.format == "prompt+completion"
            self.questions = [
                c for c in held.conversations if [m["role"] for m in c.messages].count("user") == 1
            ][: self.settings.answers]
        train = self._encode(corpus, tokenizer)
        self._format, self._used = corpus.format, _what_became(corpus, train)
        return train, self._encode(held, tokenizer) if held else None, tokenizer

    def _split(self, corpus: Corpus) -> tuple[Corpus, Corpus | None]:
        if not self.config.eval_fraction:
            return corpus, None
        kept, held = split_heldout(len(corpus), self.config.eval_fraction, self.config.seed)
        if not held:
            self.console.notice(
                f"eval_fraction {self.config.eval_fraction:g} of {len(corpus)} samples is none: "
                "there is no evaluation"
            )
            return corpus, None
        rows = corpus.conversations
        return (
            dataclasses.replace(corpus, conversations=tuple(rows[i] for i in kept)),
            dataclasses.replace(corpus, conversations=tuple(rows[i] for i in held)),
        )

    def _encode(self, corpus: Corpus, tokenizer: Any) -> EncodedCorpus:
        limit = self.config.max_seq_len
        encoded = encode_corpus(
            corpus,
            tokenizer,
            limit,
            train_on=self.config.train_on,
            long_samples=self.config.long_samples,
        )
        self._note(corpus, encoded.left_out, f"have more than {limit} tokens: skipped")
        self._note(
            corpus, encoded.skipped, f"have no response token left within {limit} tokens: skipped"
        )
        self._note(corpus, corpus.empty_lines, "have an empty response: skipped")
        if encoded.truncated:
            self.console.notice(
                f"{corpus.path}: {count(encoded.truncated)} samples are cut at {limit} tokens"
            )
        if corpus.ignored_keys:
            names = ", ".join(corpus.ignored_keys)
            self.console.notice(f"{corpus.path}: keys that are not used: {names}")
        return encoded

    def _note(self, corpus: Corpus, where: Sequence[object], what: str) -> None:
        if where:
            first = ", ".join(str(item).rpartition(":")[2] for item in where[:3])
            self.console.notice(
                f"{corpus.path}: {count(len(where))} samples {what} (first: line {first})"
            )

    # what is printed

    def _banner(
        self,
        pipeline: InstructPipeline,
        train: EncodedCorpus,
        heldout: EncodedCorpus | None,
        device: str,
        seconds: float,
    ) -> None:
        config, adapters = pipeline.config, pipeline.adapters
        trainable = adapters.num_parameters
        total = pipeline.model.num_parameters()
        world = self.ranks.world
        plan = config.replace(grad_accum_steps=config.grad_accum_steps * world)
        steps = total_steps([len(e) for e in train.examples], plan)
        together = f" on {world} ranks" if world > 1 else ""
        weights = str(pipeline.model.dtype).removeprefix("torch.")
        if config.quantize_nf4:
            weights = "NF4 with quantised scales" if config.double_quant else "NF4"
        targets = config.target_modules
        shown = targets if isinstance(targets, str) else ", ".join(targets)
        held = f"; held out {count(len(heldout.examples))}" if heldout else "; none held out"
        self.console.heading("entrenar " + self.settings.command)
        self.console.facts(
            {
                "model": f"{self.settings.model} ({count(total)} parameters, {weights}, "
                f"read in {seconds:.0f} s)",
                "adapters": f"LoRA r={config.lora_rank} alpha={config.lora_alpha:g} on {shown}: "
                f"{count(trainable)} trained ({100 * trainable / total:.2f} %)",
                "data": f"{self.settings.data} ({self._format}): {count(len(train.examples))} samples, "
                f"{count(train.tokens)} tokens, {count(train.response_tokens)} learned, the longest "
                f"sample {count(train.longest)}{held}",
                "steps": f"{count(steps)} of {config.batch_size} × {config.grad_accum_steps} samples"
                f"{together}, peak learning rate {config.learning_rate:g}, {config.schedule}",
                "device": f"{device}, {gibibytes(runtime.available_memory_bytes(device))} free",
                "output": f"{self.folder.path} (seed {config.seed})",
            }
        )
        for notice in pipeline.notices:
            self.console.notice(notice)
        self._total = steps

    def _row(self, row: Mapping[str, Any]) -> None:
        if "step_time_s" not in row:
            when = "before training" if row["step"] == 0 else f"after step {row['step']}"
            loss = "not finite"
            if "eval_loss" in row:
                loss = f"{row['eval_loss']:.4f} (perplexity {row.get('perplexity', math.inf):.2f})"
            self.console.line(f"held-out loss {when}: {loss}", style="bold")
            return
        self._times.append(row["step_time_s"])
        step = row["step"]
        self._measured(row)
        left = (self._total - step) * sum(self._times) / len(self._times)
        loss = f"{row['loss']:.4f}" if "loss" in row else "not finite"
        norm = f"{row['grad_norm']:.3f}" if "grad_norm" in row else "not finite"
        text = (
            f"step {step:>{len(str(self._total))}}/{self._total}  loss {loss}  "
            f"lr {row['learning_rate']:.2e}  grad norm {norm}  {row['tokens_per_s']:.0f} tokens/s  "
            f"peak {gibibytes(row['peak_memory_bytes'])}  ETA {duration(left)}"
        )
        if step % self.settings.log_every == 0 or step in (1, self._total):
            self.console.line(text)
        self.console.status(f"step {step}/{self._total}, ETA {duration(left)}")

    def _measured(self, row: Mapping[str, Any]) -> None:
        """Tell the ledger what the first step took, once, in place of the estimate."""
        guard, self._guard = self._guard, None
        if guard is not None and guard.update(row["peak_memory_bytes"]):
            self.console.notice(
                f"the first step took {gibibytes(row['peak_memory_bytes'])} of GPU memory, more than the "
                f"{gibibytes(guard.nbytes)} that were reserved"
            )

    def _answers(self, pipeline: InstructPipeline) -> list[str]:
        """Answer the held-out questions greedily."""
        from entrenar.transformer.generation import GenerateConfig

        if not self.ranks.leads:
            return []
        greedy = GenerateConfig(max_new_tokens=_ANSWER_TOKENS, temperature=0.0)
        found = []
        for number, conversation in enumerate(self.questions, start=1):
            self.console.status(f"answering held-out question {number}")
            encoder = pipeline.encoder(self._plain_prompt)
            prompt = encoder.prompt_ids(conversation.messages[:-1])
            found.append(pipeline.generate(prompt, greedy).text)
        self.console.status(None)
        return found

    # training

    def _train(self, training: TrainingRun) -> RunResult:
        def stop(number: int, frame: Any) -> None:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
            training.stop()
            self.console.line("stopping after this step; interrupt again to stop at once")

        old = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
        self.console.line()
        try:
            return training.run(self.resume)
        finally:
            self.console.status(None)
            for number, handler in old.items():
                signal.signal(number, handler)

    def _report(self, pipeline: InstructPipeline, result: RunResult, before: list[str]) -> int:
        if result.non_finite:
            self.console.notice(
                f"{result.non_finite} of {result.steps} steps were not finite and changed nothing"
            )
        if result.interrupted:
            self.console.line(
                f"stopped after step {result.steps} of {result.total_steps}; continue with: "
                f"entrenar train --output {self.folder.path} --resume"
            )
            return 130
        after = self._answers(pipeline)
        if after:
            self.console.heading("held-out questions, before and after")
        for number, answer in enumerate(after):
            messages = self.questions[number].messages
            self.console.line()
            self.console.block("question", messages[-2]["content"])
            self.console.block("wanted", messages[-1]["content"])
            if before:
                self.console.block("before", before[number])
            self.console.block("after", answer)
        self._summary(pipeline, result)
        return 0

    def _summary(self, pipeline: InstructPipeline, result: RunResult) -> None:
        rows = {}
        if result.eval_after is not None:
            text = f"{result.eval_after:.4f}"
            if result.eval_before:
                change = 100 * (result.eval_after / result.eval_before - 1)
                text = f"{result.eval_before:.4f} → {text} ({change:+.1f} %)"
            rows["held-out loss"] = text
        if result.best_step is not None and result.best_step != result.steps:
            kept = self.folder.checkpoints / f"best-{result.best_step:06d}" / "adapter"
            rows["best"] = f"{result.best_loss:.4f} after step {result.best_step}: {kept}"
        rows["samples"] = self._used
        rows["time"] = f"{duration(result.seconds)}, {count(result.tokens)} tokens"
        rows["peak memory"] = gibibytes(runtime.peak_memory_bytes(pipeline.device))
        rows["adapter"] = str(self.folder.adapter)
        if self.folder.plot.exists():
            rows["loss curve"] = str(self.folder.plot)
        self.console.heading("done")
        self.console.facts(rows)
        self.console.line()
        question = "What does `len(obj)` do?"
        if self.questions:
            question = self.questions[0].messages[-2]["content"]
        quoted = question.replace("'", "'\\''")
        self.console.line(
            f"next: entrenar generate --adapter {self.folder.adapter} --prompt '{quoted}'"
        )


def _what_became(corpus: Corpus, encoded: EncodedCorpus) -> str:
    """Return how many samples were trained on, and how many were cut or left out and why."""
    parts = [f"{count(len(encoded.examples))} trained on"]
    parts += [
        f"{count(number)} {what}"
        for number, what in (
            (encoded.truncated, "of them cut"),
            (len(encoded.left_out), "too long and skipped"),
            (len(encoded.skipped), "cut to nothing and skipped"),
            (len(corpus.empty_lines), "empty and skipped"),
        )
        if number
    ]
    return ", ".join(parts)


def _pieces(example: Any, tokenizer: Any) -> list[tuple[str, bool]]:
    """Split a sample into runs of tokens that carry loss and runs that do not, as text."""
    runs: list[tuple[list[int], bool]] = []
    for token, kept in zip(example.ids.tolist(), example.is_response.tolist(), strict=True):
        if not runs or runs[-1][1] != kept:
            runs.append(([], kept))
        runs[-1][0].append(token)
    return [(tokenizer.decode(ids, skip_special_tokens=False), kept) for ids, kept in runs]
