"""Several processes that train one set of adapters, each on its share of every step's samples.

``torchrun --nproc-per-node N -m entrenar train …`` starts them. Every rank plans the same steps from the
same data and seed and takes every N-th micro-batch; the flat gradient of all of them is added up in one
all-reduce on the training stream, after which all take the same optimiser step. Only rank 0 writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from entrenar import runtime
from entrenar.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    import torch

    from entrenar.autograd import Stream

__all__ = ["TIMEOUT_S", "Ranks"]

TIMEOUT_S = 600.0  # an evaluation or the first compilation on another rank may take minutes


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Which of how many processes this one is.

    Attributes:
        rank: Its number.
        world: How many there are.
        local: Its number among those of this machine, which is the number of its GPU.
    """

    rank: int = 0
    world: int = 1
    local: int = 0

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` as torchrun sets them; one rank without.

        Raises:
            ConfigError: They are not numbers, or do not fit together.
        """
        given = {n: os.environ.get(n) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        if not given["RANK"] or not given["WORLD_SIZE"]:
            return cls()
        try:
            rank, world = int(given["RANK"]), int(given["WORLD_SIZE"])
            local = int(given["LOCAL_RANK"] or rank)
        except ValueError:
            rank, world, local = -1, 0, 0
        if not 0 <= rank < world or local < 0:
            shown = ", ".join(f"{name}={value}" for name, value in given.items())
            raise ConfigError(
                f"the environment names no rank: {shown}", "start it with torchrun, or unset them"
            )
        return cls(rank, world, local)

    @property
    def leads(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def device(self, setting: str) -> str:
        """Return the device setting of this rank: a GPU each where GPUs are asked for or found."""
        if self.world == 1 or not (
            setting == "cuda" or (setting == "auto" and runtime.cuda_available())
        ):
            return setting
        return f"cuda:{self.local}"

    @contextlib.contextmanager
    def joined(self, device: str, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
        """Connect to the other ranks for the block.

        Args:
            device: Where gradients lie: ``"cuda:N"`` takes NCCL, ``"cpu"`` gloo.
            timeout_s: How long to wait for a rank that does not answer.

        Raises:
            DeviceError: Not all ranks have come, or the connection fails.
        """
        if self.world == 1:
            yield
            return
        import torch
        import torch.distributed as dist

        with self._together("the ranks did not all come"):
            if device.startswith("cuda"):
                torch.cuda.set_device(torch.device(device))
            dist.init_process_group(
                "nccl" if device.startswith("cuda") else "gloo",
                rank=self.rank,
                world_size=self.world,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
        try:
            yield
        finally:
            dist.destroy_process_group()

    def add(self, flat: torch.Tensor, stream: Stream) -> None:
        """Replace ``flat`` by its sum over all ranks, on ``stream``; every rank gets the same bits.

        Raises:
            DeviceError: A rank has ended or does not answer.
        """
        if self.world == 1:
            return
        import torch.distributed as dist

        from entrenar.optable import storage

        storage.before([flat], [flat], stream)
        if runtime.has_listeners():
            where = "cuda" if flat.is_cuda else "numpy"
            runtime.announce(runtime.LaunchRecord("all_reduce", stream, (flat,), (flat,), where))
        with stream.entered(), self._together("a rank has ended or does not answer"):
            dist.all_reduce(flat)
        storage.after([flat], [], stream)

    def sums(self, values: Sequence[float], device: str = "cpu") -> list[float]:
        """Return the sum of each value over all ranks, in float64.

        Raises:
            DeviceError: A rank has ended or does not answer.
        """
        if self.world == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        shared = torch.tensor(list(values), dtype=torch.float64, device=device)
        with self._together("a rank has ended or does not answer"):
            dist.all_reduce(shared)
            return [float(value) for value in shared.tolist()]

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # DistBackendError is one too
            first = str(error).strip().partition("\n")[0]
            raise DeviceError(
                f"rank {self.rank} of {self.world} cannot go on: {what} ({first})",
                "the rank that failed first says why; start all of them again, with --resume to "
                "go on from the last checkpoint",
            ) from error
