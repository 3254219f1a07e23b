"""``TrainingRun``: the loop above the pipeline, and the folder it leaves behind.

Epochs or steps, a seeded shuffle, micro-batches and accumulation, evaluation before, between and
after, checkpoints from which a run continues to the bit, and the adapter, which appears once, by
rename, at the end.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from entrenar import __version__, runtime
from entrenar.errors import CheckpointError, ConfigError, DataError, EntrenarError, NumericsError
from entrenar.finetune.batching import Step, plan_steps, total_steps
from entrenar.finetune.best import BestAdapter
from entrenar.finetune.chat import Example
from entrenar.finetune.checkpoint import (
    Checkpoint,
    keep_last,
    latest_checkpoint,
    write_checkpoint,
)
from entrenar.finetune.drift import changes, fingerprint, model_fingerprint
from entrenar.finetune.environment import describe_environment
from entrenar.finetune.files import write_text
from entrenar.finetune.instruct_pipeline import InstructBatchResult, InstructPipeline
from entrenar.finetune.instruct_pipeline.results import perplexity
from entrenar.finetune.metrics import MetricsLog, read_metrics
from entrenar.finetune.plot import plot_loss
from entrenar.finetune.profile_plot import plot_profile
from entrenar.finetune.run_folder import RunFolder
from entrenar.finetune.schedule import LearningRate

__all__ = ["RunResult", "TrainingRun"]

_GIVE_UP_AFTER = 20  # steps in a row that are not finite
_DRAW_EVERY_S = 30.0  # a picture takes as long as some steps of a small model
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
        best_step: Step of the lowest held-out loss; None without held-out data.
        best_loss: That loss.
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
    best_step: int | None = None
    best_loss: float | None = None
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
        keep_checkpoints: Checkpoints that are kept, the newest; 0 keeps all.
        patience: Evaluations in a row without a lower held-out loss after which the run ends; the adapter
            is then that of the lowest. 0 never ends it early.
        allow_drift: Resume although settings or data differ, and list in what.
        skipped: Samples that truncation left without a response, for the metrics.
        on_row: Called with each row of metrics as it is written.
        on_notice: Called with each of the result's notices as it arises.

    Raises:
        DataError: There is nothing to train on.
        ConfigError: ``patience`` needs held-out data and ``eval_every``.
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
        keep_checkpoints: int = 3,
        patience: int = 0,
        allow_drift: bool = False,
        skipped: int = 0,
        on_row: Callable[[Mapping[str, Any]], None] = lambda row: None,
        on_notice: Callable[[str], None] = lambda notice: None,
    ) -> None:
        if not train:
            raise DataError("there are no samples to train on", "give at least one")
        if patience and not (heldout and eval_every):
            raise ConfigError(
                f"patience is {patience}, but nothing is evaluated while training",
                "hold samples out (--eval-data or --eval-fraction) and say --eval-every",
            )
        self.pipeline = pipeline
        self.config = pipeline.config
        self.train = train
        self.heldout = heldout
        self.folder = folder
        self.settings = dict(settings or {})
        self.save_every = save_every
        self.eval_every = eval_every
        self.keep_checkpoints = keep_checkpoints
        self.best = BestAdapter(folder.checkpoints, patience)
        self.allow_drift = allow_drift
        self._data = fingerprint(train)
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
        self._evaluated = 0  # the last step whose held-out loss is known
        self._undrawn = False
        self._drawn = -math.inf
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
        if self._is_due(self.result.steps) and self._is_unfinished:
            self._evaluate(self.result.steps, self._last_epoch())  # the stop came before it
        if not self._agree_to_stop():
            self._steps()
        if self._stopped and self._is_unfinished:
            self.result.interrupted = True
            if self.result.steps:
                self._save(self.result.steps)
        else:
            self._finish()
        self.result.seconds = time.perf_counter() - started
        return self.result

    @property
    def _is_unfinished(self) -> bool:
        return self.result.steps < self.total_steps and not self.best.is_exhausted

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
        drift = changes(self._identity(), found.state)
        if drift and not self.allow_drift:
            raise CheckpointError(
                f"{found.path} is of a run that differs: {'; '.join(drift)}",
                "resume with the same settings and data, say --allow-drift to go on all the same, or start "
                "a new run with --overwrite",
            )
        for change in drift:
            self._notice(f"continued although {change}")
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
        step = None if found is None else found.step
        self._log = MetricsLog(self.folder.metrics, step, self._evaluated)

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
        self._evaluated = found.state.get("evaluated", found.step)
        self.best.restore(found.state.get("best", self.best.state()))
        if self.ranks.leads:
            self.best.forget(but=self.best.step)
        self._notice(f"continued from {found.path} after step {found.step}")

    # steps

    def _steps(self) -> None:
        in_a_row = 0
        plan = plan_steps(self.lengths, self._plan, start=self.result.steps)
        while self._is_unfinished and not self._agree_to_stop():
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
            if self._is_due(done) and not last:
                self._evaluate(done, epoch)
            if self.save_every and done % self.save_every == 0:
                self._save(done)
                if time.monotonic() - self._drawn >= _DRAW_EVERY_S:
                    self._draw()

    def _is_due(self, step: int) -> bool:
        """Whether the held-out samples are to be evaluated after a step and were not yet."""
        return bool(self.eval_every) and step % self.eval_every == 0 and self._evaluated < step

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
        self._evaluated = step
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
        if step and self.best.see(step, outcome.avg_loss) and self.ranks.leads:
            self.best.write(self.pipeline.save_adapter)
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
            **self._identity(),
            "best": self.best.state(),
            "evaluated": self._evaluated,
            "eval_before": self.result.eval_before,
            "non_finite": self.result.non_finite,
            # Shuffling and dropout are functions of these two alone: no generator has a state.
            "random": {"seed": self.config.seed, "step": step},
        }
        write_checkpoint(self.folder.checkpoints, step, arena, state, self.pipeline.save_adapter)
        keep_last(self.folder.checkpoints, self.keep_checkpoints)
        self.best.forget(but=self.best.step)

    def _finish(self) -> None:
        done = self.result.steps
        if self.result.non_finite >= done:
            self._save(done)
            raise NumericsError(
                f"none of the {done} steps was finite, so nothing was learned",
                "lower --learning-rate, or use --dtype float32",
            )
        self._stop = False  # what is left is worth finishing
        if self.best.is_exhausted:
            self.result.eval_after = self._end_early()
        else:
            self.result.eval_after = self._evaluate(done, self._last_epoch())
            if self.ranks.leads:
                self.pipeline.save_adapter(self.folder.adapter)
        self.result.best_step, self.result.best_loss = self.best.step, self.best.loss
        before, best = self.result.eval_before, self.best.loss
        if before is not None and best is not None and best >= before:
            self._notice(
                f"no held-out loss was below the base model's: {best:.4f} at best, {before:.4f} before"
            )
        if not self.ranks.leads:
            return
        # the last step's lies in adapter/ already
        self.best.forget(but=None if self.best.step == done else self.best.step)
        self._draw()

    def _draw(self) -> None:
        """Draw ``loss.png`` and ``profile.png`` as they stand; what hinders that is said once."""
        if not self.ranks.leads:
            return
        self._drawn = time.monotonic()
        try:
            plot_loss(read_metrics(self.folder.metrics), self.folder.plot, self.folder.path.name)
            profiler = self.pipeline.profiler
            if profiler is not None and profiler.steps:
                profiler.write(self.folder.profile, self.folder.trace)
                plot_profile(profiler.trace(), self.folder.profile_plot, self.folder.path.name)
        except (EntrenarError, OSError) as error:
            if not self._undrawn:
                self._notice(f"the run's pictures were not drawn: {error}")
            self._undrawn = True

    def _end_early(self) -> float | None:
        """Give the run the best adapter, which the patience was spent on; return its loss."""
        best = self.best
        self._notice(
            f"stopped after step {self.result.steps}: the held-out loss was not below {best.loss:.4f}, that of "
            f"step {best.step}, in {best.without} evaluations; the adapter is that step's"
        )
        assert best.path is not None  # patience runs out after an evaluation at least
        self.pipeline.load_adapter(best.path)
        if self.ranks.leads:
            self.pipeline.save_adapter(self.folder.adapter)
        return best.loss

    def _last_epoch(self) -> float:
        if not self.ranks.leads:
            return 0.0
        rows = [row for row in read_metrics(self.folder.metrics) if "epoch" in row]
        return float(rows[-1]["epoch"]) if rows else 0.0

    def _identity(self) -> dict[str, Any]:
        """Return what a run that continues this one must share with it."""
        return {
            "config": self.config.to_dict(),
            "data": self._data,
            "samples": len(self.train),
            "model": model_fingerprint(self.pipeline.model.config),
            "total": self.total_steps,
            "ranks": self.ranks.world,
        }
