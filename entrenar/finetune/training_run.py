"""``TrainingRun``: the loop above the pipeline, and the folder it leaves behind.

Epochs or steps, a seeded shuffle, micro-batches and accumulation, evaluation before, between and
after, checkpoints from which a run continues to the bit, and the adapter, which appears once, by
rename, at the end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from entrenar import __version__, runtime
from entrenar.errors import CheckpointError, DataError, EntrenarError, NumericsError
from entrenar.finetune.batching import Step, plan_steps, total_steps
from entrenar.finetune.chat import Example
from entrenar.finetune.checkpoint import Checkpoint, latest_checkpoint, write_checkpoint
from entrenar.finetune.environment import describe_environment
from entrenar.finetune.files import write_text
from entrenar.finetune.instruct_pipeline import InstructBatchResult, InstructPipeline
from entrenar.finetune.instruct_pipeline.results import perplexity
from entrenar.finetune.metrics import MetricsLog, read_metrics
from entrenar.finetune.plot import plot_loss
from entrenar.finetune.run_folder import RunFolder
from entrenar.finetune.schedule import LearningRate

__all__ = ["RunResult", "TrainingRun"]

_MAY_DIFFER = ("device", "checkpointing", "profile_interval")
_GIVE_UP_AFTER = 20  # steps in a row that are not finite
_ARENA = ("params", "m", "v", "step")


@dataclasses.dataclass
class RunResult:
    """What a run did.

    Attributes:
        steps: Completed steps, those of the run it continued included.
        total_steps: Steps the run was to take.
        eval_before: Held-out loss before the first step; None without held-out data.
        eval_after: Held-out loss after the last step.
        seconds: Wall time of this process's share.
        tokens: Tokens this process trained on.
        non_finite: Steps that changed nothing because they were not finite.
        interrupted: Whether it was stopped early; ``--resume`` continues it.
        notices: What went differently from what was asked.
    """

    steps: int = 0
    total_steps: int = 0
    eval_before: float | None = None
    eval_after: float | None = None
    seconds: float = 0.0
    tokens: int = 0
    non_finite: int = 0
    interrupted: bool = False
    notices: list[str] = dataclasses.field(default_factory=list)


class TrainingRun:
    """One fine-tuning run.

    Args:
        pipeline: Model, adapters and settings.
        train: Training samples, cut to ``max_seq_len``, each with a response token.
        heldout: Samples for evaluation; may be empty.
        folder: Where the run writes.
        settings: What the command line adds to ``config.toml``.
        save_every: Steps between checkpoints; 0 writes none unless the run is stopped.
        eval_every: Steps between evaluations; 0 evaluates before and after only.
        skipped: Samples that truncation left without a response, for the metrics.
        on_row: Called with each row of metrics as it is written.
        on_notice: Called with each of the result's notices as it arises.

    Raises:
        DataError: There is nothing to train on.
    """

    def __init__(
        self,
        pipeline: InstructPipeline,
        train: Sequence[Example],
        heldout: Sequence[Example] = (),
        *,
        folder: RunFolder,
        settings: Mapping[str, Any] | None = None,
        save_every: int = 0,
        eval_every: int = 0,
        skipped: int = 0,
        on_row: Callable[[Mapping[str, Any]], None] = lambda row: None,
        on_notice: Callable[[str], None] = lambda notice: None,
    ) -> None:
        if not train:
            raise DataError("there are no samples to train on", "give at least one")
        self.pipeline = pipeline
        self.config = pipeline.config
        self.train = train
        self.heldout = heldout
        self.folder = folder
        self.settings = dict(settings or {})
        self.save_every = save_every
        self.eval_every = eval_every
        self.skipped = skipped
        self.on_row = on_row
        self.on_notice = on_notice
        self.lengths = [len(example) for example in train]
        self.ranks = pipeline.ranks
        # As one rank would with that many times the batch: a step's micro-batches are shared out.
        self._plan = self.config.replace(
            grad_accum_steps=self.config.grad_accum_steps * self.ranks.world
        )
        self.total_steps = total_steps(self.lengths, self._plan)
        self.schedule = LearningRate.from_config(self.config, self.total_steps)
        self.result = RunResult(total_steps=self.total_steps)
        self._stop = self._stopped = False
        self._log: MetricsLog | None = None

    def stop(self) -> None:
        """Ask the run to end after the step at hand, saving a checkpoint."""
        self._stop = True

    def run(self, resume: bool = False) -> RunResult:
        """Train until the last step, or until stopped.

        Args:
            resume: Continue from the folder's last complete checkpoint; start over where it has
                none, and say so in the result's notices.

        Raises:
            CheckpointError: The checkpoint belongs to other settings or other data, or cannot be
                written.
            NumericsError: No step was finite, or too many in a row were not.
        """
        started = time.perf_counter()
        found = self._resume_point() if resume else None
        self._begin(found)
        if found is None:
            self.result.eval_before = self._evaluate(0, 0.0)
        if not self._agree_to_stop():
            self._steps()
        if self._stopped and self.result.steps < self.total_steps:
            self.result.interrupted = True
            if self.result.steps:
                self._save(self.result.steps)
        else:
            self._finish()
        self.result.seconds = time.perf_counter() - started
        return self.result

    def _agree_to_stop(self) -> bool:
        """Whether any rank was asked to stop; all ranks ask at the same places."""
        self._stopped = self.ranks.sums([float(self._stop)], self.pipeline.device)[0] > 0
        return self._stopped

    def _notice(self, text: str) -> None:
        self.result.notices.append(text)
        self.on_notice(text)

    # beginning

    def _resume_point(self) -> Checkpoint | None:
        found, passed = latest_checkpoint(self.folder.checkpoints)
        self._check_alike(found)
        for name in passed:
            self._notice(f"the checkpoint {name} is incomplete and was passed over")
        if found is None:
            self._notice(
                f"{self.folder.checkpoints} holds no complete checkpoint: the run starts over"
            )
            kept = self.folder.set_aside() if passed and self.ranks.leads else None
            if kept is not None:
                self._notice(f"the damaged checkpoints and the metrics were kept in {kept}")
            return None
        mine, theirs = self.config.to_dict(), found.state["config"]
        changed = [
            f"{name} was {theirs.get(name)!r}, now {value!r}"
            for name, value in mine.items()
            if theirs.get(name) != value and name not in _MAY_DIFFER
        ]
        if changed:
            raise CheckpointError(
                f"{found.path} is of a run with other settings: {'; '.join(changed)}",
                "resume with the same settings, or start a new run with --overwrite",
            )
        if found.state.get("ranks", 1) != self.ranks.world:
            raise CheckpointError(
                f"{found.path} is of a run with {found.state.get('ranks', 1)} ranks, this one has "
                f"{self.ranks.world}",
                "resume with as many processes, or start a new run with --overwrite",
            )
        if found.state["data"] != self._fingerprint() or found.state["total"] != self.total_steps:
            raise CheckpointError(
                f"{found.path} is of a run on other data",
                "resume with the same data file, or start a new run with --overwrite",
            )
        return found

    def _check_alike(self, found: Checkpoint | None) -> None:
        """Refuse to go on where ranks found different checkpoints, as on disks of their own."""
        step = float(found.step if found is not None else -1)
        if self.ranks.sums([step], self.pipeline.device)[0] != step * self.ranks.world:
            raise CheckpointError(
                f"rank {self.ranks.rank} found {found.path if found else 'no checkpoint'} in "
                f"{self.folder.checkpoints}, others something else",
                "give all ranks one folder on a disk they share",
            )

    def _begin(self, found: Checkpoint | None) -> None:
        if found is not None:
            self._restore(found)
        if not self.ranks.leads:
            return
        if found is None:
            self.folder.clear()
        self.folder.begin(self.config, self.settings)
        environment = describe_environment(self.pipeline.device)
        write_text(self.folder.environment, json.dumps(environment, indent=2) + "\n")
        self._log = MetricsLog(self.folder.metrics, None if found is None else found.step)

    def _restore(self, found: Checkpoint) -> None:
        for name in _ARENA:
            target = getattr(self.pipeline.adapters, name)
            source = torch.from_numpy(found.arrays[name])
            if target.shape != source.shape or target.dtype != source.dtype:
                raise CheckpointError(
                    f"{found.path}: {name} is {source.dtype} {tuple(source.shape)}, wanted "
                    f"{target.dtype} {tuple(target.shape)}",
                    "it belongs to other adapters",
                )
            target.copy_(source)
        self.pipeline.steps = found.step
        self.pipeline.non_finite_steps = found.state["non_finite"]
        self.result.steps = found.step
        self.result.eval_before = found.state["eval_before"]
        self.result.non_finite = found.state["non_finite"]
        self._notice(f"continued from {found.path} after step {found.step}")

    # steps

    def _steps(self) -> None:
        in_a_row = 0
        plan = plan_steps(self.lengths, self._plan, start=self.result.steps)
        while self.result.steps < self.total_steps and not self._agree_to_stop():
            epoch, step = next(plan)
            outcome = self._step(epoch, step)
            in_a_row = in_a_row + 1 if outcome.non_finite else 0
            done = self.result.steps
            if in_a_row == _GIVE_UP_AFTER:
                self._save(done)
                raise NumericsError(
                    f"the last {in_a_row} steps up to step {done} were not finite (loss "
                    f"{outcome.avg_loss}, gradient norm {outcome.grad_norm}); no parameter was changed "
                    "by them",
                    "lower --learning-rate, or use --dtype float32",
                )
            last = done == self.total_steps
            if self.eval_every and done % self.eval_every == 0 and not last:
                self._evaluate(done, epoch)
            if self.save_every and done % self.save_every == 0:
                self._save(done)

    def _step(self, epoch: float, step: Step) -> InstructBatchResult:
        started = time.perf_counter()
        rate = self.schedule.at(self.result.steps)
        batches = [[self.train[i] for i in batch] for batch in step]
        outcome = self.pipeline.train_examples(batches, rate)
        seconds = time.perf_counter() - started
        self.result.steps += 1
        self.result.tokens += outcome.total_tokens
        self.result.non_finite = self.pipeline.non_finite_steps
        self._write(
            step=self.result.steps,
            epoch=round(epoch, 6),
            loss=outcome.avg_loss,
            perplexity=outcome.perplexity,
            learning_rate=rate,
            grad_norm=outcome.grad_norm,
            tokens=outcome.total_tokens,
            response_tokens=outcome.total_response_tokens,
            tokens_per_s=round(outcome.total_tokens / seconds, 3),
            step_time_s=round(seconds, 6),
            peak_memory_bytes=runtime.peak_memory_bytes(self.pipeline.device),
            skipped=self.skipped,
            non_finite=self.result.non_finite,
        )
        return outcome

    def _evaluate(self, step: int, epoch: float) -> float | None:
        if not self.heldout:
            return None
        mine = self.heldout[self.ranks.rank :: self.ranks.world]
        outcome = self.pipeline.evaluate_examples(mine, should_stop=lambda: self._stop)
        tokens = outcome.total_response_tokens
        summed, counted = self.ranks.sums(
            [outcome.avg_loss * tokens, float(tokens)], self.pipeline.device
        )
        if self._agree_to_stop() and step < self.total_steps:
            return None  # of some of the samples only
        if self.ranks.world > 1:
            loss = summed / counted if counted else 0.0
            outcome = dataclasses.replace(outcome, avg_loss=loss, perplexity=perplexity(loss))
        self._write(
            step=step,
            epoch=round(epoch, 6),
            eval_loss=outcome.avg_loss,
            perplexity=outcome.perplexity,
            peak_memory_bytes=runtime.peak_memory_bytes(self.pipeline.device),
        )
        return outcome.avg_loss

    def _write(self, **row: Any) -> None:
        if not self.ranks.leads:
            return
        assert self._log is not None  # opened by _begin
        self.on_row(self._log.append(row))

    # ending

    def _save(self, step: int) -> None:
        if not self.ranks.leads:
            return
        arena = {
            name: np.array(getattr(self.pipeline.adapters, name).to("cpu").numpy())
            for name in _ARENA
        }
        state = {
            "entrenar": __version__,
            "config": self.config.to_dict(),
            "data": self._fingerprint(),
            "total": self.total_steps,
            "ranks": self.ranks.world,
            "eval_before": self.result.eval_before,
            "non_finite": self.result.non_finite,
            # Shuffling and dropout are functions of these two alone: no generator has a state.
            "random": {"seed": self.config.seed, "step": step},
        }
        write_checkpoint(self.folder.checkpoints, step, arena, state, self.pipeline.save_adapter)

    def _finish(self) -> None:
        done = self.result.steps
        if self.result.non_finite >= done:
            self._save(done)
            raise NumericsError(
                f"none of the {done} steps was finite, so nothing was learned",
                "lower --learning-rate, or use --dtype float32",
            )
        self._stop = False  # what is left is worth finishing
        epoch = self._last_epoch()
        self.result.eval_after = self._evaluate(done, epoch)
        if not self.ranks.leads:
            return
        self.pipeline.save_adapter(self.folder.adapter)
        try:
            plot_loss(read_metrics(self.folder.metrics), self.folder.plot, self.folder.path.name)
        except EntrenarError as error:
            self._notice(f"loss.png was not drawn: {error}")

    def _last_epoch(self) -> float:
        if not self.ranks.leads:
            return 0.0
        rows = [row for row in read_metrics(self.folder.metrics) if "epoch" in row]
        return float(rows[-1]["epoch"]) if rows else 0.0

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for example in self.train:
            digest.update(len(example).to_bytes(8, "little"))
            digest.update(example.ids.tobytes())
            digest.update(example.is_response.tobytes())
        return digest.hexdigest()
