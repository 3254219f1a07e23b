"""What training and evaluation return."""

from __future__ import annotations

import dataclasses
import math

__all__ = ["InstructBatchResult", "InstructStepResult", "perplexity"]


def perplexity(loss: float) -> float:
    """Return exp(loss); infinity where that overflows."""
    return math.exp(loss) if loss < 700.0 else (math.nan if math.isnan(loss) else math.inf)


@dataclasses.dataclass(frozen=True)
class InstructStepResult:
    """One optimiser step on one pair.

    Attributes:
        loss: Mean negative log-likelihood of the response tokens, in nats, as it came out: NaN or
            infinity on a step that is not finite, which changed no parameter. 0 without tokens.
        num_response_tokens: Tokens that carried loss; 0 where truncation left none and the step
            was skipped.
        perplexity: exp(loss).
    """

    loss: float
    num_response_tokens: int
    perplexity: float


@dataclasses.dataclass(frozen=True)
class InstructBatchResult:
    """One optimiser step on many pairs, or an evaluation.

    Attributes:
        avg_loss: Summed loss of all response tokens over their count.
        total_response_tokens: Tokens that carried loss.
        perplexity: exp(avg_loss).
        grad_norm: Global gradient norm before clipping; 0 in an evaluation.
        skipped: Pairs left out because truncation left them no response token.
        total_tokens: Tokens that went through the model.
        non_finite: Whether the loss or the gradient was not finite, so that nothing was updated.
    """

    avg_loss: float
    total_response_tokens: int
    perplexity: float
    grad_norm: float
    skipped: int = 0
    total_tokens: int = 0
    non_finite: bool = False
