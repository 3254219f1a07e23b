"""The emulator as Triton's driver: ``kernel[grid](cpu_tensor, ...)`` compiles for a target and runs here."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from entrenar.emulator.binding import bind, is_array, storage
from entrenar.emulator.errors import EmulatorError
from entrenar.emulator.launch import Execution, execute
from entrenar.emulator.parameters import TensorMap
from entrenar.emulator.program import Program
from entrenar.emulator.targets import shared_memory_bytes

__all__ = [
    "Driver",
    "RunInfo",
    "active_driver",
    "install_driver",
    "run_compiled",
    "uninstall_driver",
]

EditPTX = Callable[[str], str]


@dataclasses.dataclass
class RunInfo(Execution):
    """An execution, with what was compiled for it.

    Attributes:
        metadata: Triton's, of the compiled kernel.
        program: The parsed PTX.
        compile_s: Seconds to compile; 0 where Triton's launcher did.
        asm: Triton's forms of the kernel, by name: ``ptx``, ``cubin`` and those before.
    """

    metadata: Any
    program: Program
    compile_s: float = 0.0
    asm: Any = None

    def __str__(self) -> str:
        rate = self.instructions / max(self.run_s, 1e-9) / 1e6
        return (
            f"compiled in {self.compile_s:.2f} s, emulated in {self.run_s:.3f} s "
            f"({self.instructions} warp instructions, {rate:.2f} million a second, "
            f"{self.workgroups} blocks, {self.barriers} barriers)"
        )


# Programs by the hash Triton gives the compiled kernel, and PTX that is still to be parsed.
programs: dict[str, Program] = {}


def program_of(metadata: Any, ptx: str, edit_ptx: EditPTX | None = None) -> Program:
    """Return the parsed PTX of a compiled kernel; one that is edited is parsed anew."""
    if edit_ptx is not None:
        edited = edit_ptx(ptx)
        if edited != ptx:
            return Program(edited, metadata.name)
    if metadata.hash not in programs:
        programs[metadata.hash] = Program(ptx, metadata.name)
    return programs[metadata.hash]


def environment_checks() -> dict[str, bool]:
    """Return the checks that ``ENTRENAR_EMULATOR_CHECKS=racecheck,initcheck`` turns on."""
    named = os.environ.get("ENTRENAR_EMULATOR_CHECKS", "")
    return {name: True for name in named.split(",") if name}


def run_compiled(
    kernel: Any,
    signature: Mapping[str, str] | None,
    constants: Mapping[str, Any] | None,
    grid: Any,
    arguments: Sequence[Any] | Mapping[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
    *,
    target: str = "sm_80",
    attrs: dict[tuple[int, ...], Any] | None = None,
    specialize: bool = True,
    options: Mapping[str, Any] | None = None,
    edit_ptx: EditPTX | None = None,
    **run: Any,
) -> RunInfo:
    """Compile one kernel for a target and execute it.

    Args:
        kernel: A ``@triton.jit`` function.
        signature: Triton's type of each parameter; None infers them.
        constants: Values of constexpr parameters.
        grid: A tuple, a number, or a function of the arguments by name.
        arguments: ndarrays, torch storage on the CPU and numbers, in order or by name.
        num_warps: Warps of a block.
        num_stages: Stages of a pipelined loop.
        options: Further options of Triton.
        target: Such as ``"sm_90"``.
        attrs: Divisibility of parameters; None infers it.
        specialize: Whether to specialise as Triton's launcher does.
        edit_ptx: Changes the PTX before it is parsed.
        **run: Options of :func:`entrenar.emulator.execute`; ``uninit`` also takes names.

    Raises:
        EmulatorError: See :func:`entrenar.emulator.execute`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    bound = bind(kernel, signature, constants, arguments, attrs, specialize)
    started = time.perf_counter()
    compiled = triton.compile(
        ASTSource(kernel, bound.signature, constexprs=bound.constants, attrs=bound.attributes),
        target=GPUTarget("cuda", int(target.removeprefix("sm_")), 32),
        options={"num_warps": num_warps, "num_stages": num_stages, **(options or {})},
    )
    compile_s = time.perf_counter() - started
    program = program_of(compiled.metadata, compiled.asm["ptx"], edit_ptx)
    blocks = grid({**bound.constants, **bound.values}) if callable(grid) else grid
    blocks = (blocks,) if isinstance(blocks, int) else tuple(blocks)
    run = {**environment_checks(), **run}
    named = [bound.values[a] if isinstance(a, str) else a for a in run.get("uninit", ())]
    done = _run(
        compiled.metadata, program, blocks, list(bound.values.values()),
        [bound.signature[name] for name in bound.values], list(bound.values), {**run, "uninit": named},
    )  # fmt: skip
    return dataclasses.replace(done, compile_s=compile_s, asm=compiled.asm)


def _run(
    metadata: Any,
    program: Program,
    grid: tuple[int, ...],
    values: list[Any],
    types: list[str],
    names: list[str],
    options: Mapping[str, Any],
) -> RunInfo:
    """Execute with the scratch memory that the compiled kernel asks for, as further parameters."""
    scratch, keep = _scratch(metadata, int(np.prod(grid)))
    extra = len(program.declared.parameters) - len(values)
    if extra:
        values = [*values, scratch, *[None] * (extra - 1)]
    done = execute(
        program, grid, metadata.num_warps * 32, metadata.shared, values, [*types, *["*i8"] * extra],
        storage, names=[*names, *["scratch"] * extra], **options,
    )  # fmt: skip
    del keep
    return RunInfo(**vars(done), metadata=metadata, program=program)


def _scratch(metadata: Any, blocks: int) -> tuple[int | None, Any]:
    """Return the address of a kernel's scratch memory, and what keeps it alive."""
    if metadata.num_ctas != 1 or metadata.profile_scratch_size:
        raise EmulatorError(f"{metadata.name}: clusters and profile scratch are not supported")
    nbytes = metadata.global_scratch_size * blocks
    if not nbytes:
        return None, None
    memory = np.full(nbytes + 4096, 0xA5, np.uint8)
    alignment = max(128, metadata.global_scratch_align)
    return -(-memory.ctypes.data // alignment) * alignment, memory


def _tensor_descriptor(value: Any, dtype: str, meta: Any) -> tuple[list[Any], list[str]]:
    """Return a host tensor descriptor as kernel parameters: values and types."""
    rank = len(value.shape)
    shape, strides = list(value.shape), list(value.strides)
    lengths = ["i32"] * rank + ["i64"] * rank
    round_tf32 = getattr(value, "round_f32_to_tf32", None)
    nan = value.padding == "nan"
    if meta is None:  # a target without TMA: pointer, shape and strides
        flags = [nan] if round_tf32 is None else [nan, round_tf32]
        values = [value.base, *shape, *strides, *flags, *shape, *strides]
        return values, ["*" + dtype, *["i64"] * 2 * rank, *["i1"] * len(flags), *lengths]
    if meta.get("is_im2col") or meta["fp4_padded"] or round_tf32:
        raise EmulatorError("this form of a tensor descriptor is not supported")
    return [TensorMap(value.base, shape, strides, meta, nan), *shape, *strides], [
        "nvTmaDesc",
        *lengths,
    ]


class _Launcher:
    """What Triton calls to launch a compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.metadata, self.source = metadata, source

    def __call__(
        self, x: int, y: int, z: int, stream: Any, function: Any, kernel_metadata: Any,
        launch_metadata: Any, enter: Any, leave: Any, *arguments: Any,
    ) -> None:  # fmt: skip
        driver = active_driver()
        if driver is None:
            raise EmulatorError("no emulator is installed", "call install_driver(target)")
        if len(arguments) != len(self.source.signature):
            raise EmulatorError(
                f"{self.metadata.name}: {len(arguments)} arguments for "
                f"{len(self.source.signature)} parameters"
            )
        driver.run(self.metadata, (x, y, z), *self._flatten(arguments))

    def _flatten(self, arguments: Sequence[Any]) -> tuple[list[Any], list[str], list[str]]:
        """Return values, types and names with tuples and descriptors taken apart."""
        values: list[Any] = []
        types: list[str] = []
        names: list[str] = []
        descriptors = list(getattr(self.metadata, "tensordesc_meta", None) or [])

        def add(value: Any, kind: Any, name: str) -> None:
            if isinstance(kind, tuple | list):
                for part, part_kind in zip(value, kind, strict=True):
                    add(part, part_kind, name)
            elif kind.startswith("tensordesc"):
                dtype = re.match(r"\w+<([^[>]*)\[", kind)[1]  # type: ignore[index]
                meta = descriptors.pop(0) if descriptors else None
                for part, part_kind in zip(*_tensor_descriptor(value, dtype, meta), strict=True):
                    add(part, part_kind, name)
            elif kind != "constexpr":
                values.append(value)
                types.append("*i8" if kind.startswith("*") else kind)
                names.append(name)

        for value, (name, kind) in zip(arguments, self.source.signature.items(), strict=True):
            add(value, kind, str(name))
        return values, types, names


class Driver:
    """The emulator, as Triton's driver interface wants it.

    Attributes:
        target: Such as ``"sm_80"``.
        opts: Options of every launch, see :func:`entrenar.emulator.execute`.
        strict: Whether a finding raises; otherwise it goes to stderr.
        edit_ptx: Changes PTX before it is parsed; None leaves it.
        last: The last launch.
        history: A list that every launch is appended to; None keeps none.
        total_instructions: Sum over launches.
    """

    def __init__(
        self, target: str, strict: bool, edit_ptx: EditPTX | None, opts: dict[str, Any]
    ) -> None:
        self.target, self.strict, self.edit_ptx, self.opts = target, strict, edit_ptx, opts
        self.last: RunInfo | None = None
        self.history: list[RunInfo] | None = None
        self.total_instructions = 0
        self.utils, self.launcher_cls = self, _Launcher

    def run(
        self,
        metadata: Any,
        grid: tuple[int, int, int],
        values: list[Any],
        types: list[str],
        names: list[str],
    ) -> None:
        """Execute one launch.

        Raises:
            EmulatorError: It failed, or a check found something and ``strict`` is set.
        """
        options = dict(self.opts)
        if options.get("uninit"):
            roots = {storage(value)[0] for value in values if is_array(value)}
            options["uninit"] = [a for a in options["uninit"] if storage(a)[0] in roots]
        asm = _COMPILED[metadata.hash]
        program = program_of(metadata, asm["ptx"], self.edit_ptx)
        done = _run(metadata, program, grid, values, types, names, options)
        done.asm = asm
        self.last = done
        if self.history is not None:
            self.history.append(done)
        self.total_instructions += done.instructions
        if done.warnings and self.strict:
            raise EmulatorError("; ".join(done.warnings))
        for warning in done.warnings:
            sys.stderr.write(f"emulator: {warning}\n")

    # Triton's interface: the driver, and (utils) what loads a binary.

    def get_device_properties(self, device: Any) -> dict[str, int]:
        """Return what Triton asks of a device before it launches there."""
        return {
            "max_shared_mem": shared_memory_bytes(self.target), "max_num_regs": 65536,
            "multiprocessor_count": 108, "warpSize": 32, "sm_clock_rate": 1, "mem_clock_rate": 1,
            "mem_bus_width": 5120, "max_threads_per_sm": 2048,
        }  # fmt: skip

    def load_binary(self, name: str, kernel: Any, shared: int, device: Any) -> tuple[Any, ...]:
        """Return a module, a function, registers, spilled bytes and most threads."""
        return object(), (name, kernel), 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        """Forget nothing: programs are kept by hash."""

    @classmethod
    def is_active(cls) -> bool:
        """Whether Triton may choose this driver."""
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        """Return the type itself; no C launcher is generated."""
        return kind

    def get_current_target(self) -> Any:
        """Return what Triton compiles for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", int(self.target[3:]), 32)

    def get_current_device(self) -> str:
        """Return the target: Triton keeps compiled kernels by device, apart from a GPU's."""
        return self.target

    def set_current_device(self, device: Any) -> None:
        """Stay: there is one device."""

    def get_current_stream(self, device: Any = None) -> int:
        """Return the one stream, on which work runs in order."""
        return 0

    def get_active_torch_device(self) -> Any:
        """Return where arguments lie."""
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Return torch's interface of that device."""
        import torch

        return torch.cpu

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a function that gives instructions in place of time."""

        def benchmark(function: Callable[[], Any], *, quantiles: Any = None, **_: Any) -> Any:
            before = self.total_instructions
            function()
            counted = float(self.total_instructions - before)
            return [counted] * len(quantiles) if quantiles else counted

        return benchmark

    def get_empty_cache_for_benchmark(self) -> Any:
        """Return memory to clear; there is no cache."""
        import torch

        return torch.empty(1)

    def clear_cache(self, cache: Any) -> None:
        """Clear nothing."""

    def allocate_default_profile_scratch(self, *_: Any) -> None:
        """Refuse kernels with profile scratch."""
        raise EmulatorError("profile scratch is not supported")


_ACTIVE: list[Driver] = []
_COMPILED: dict[str, Any] = {}  # Triton's forms of each kernel, by its hash


def active_driver() -> Driver | None:
    """Return the driver that :func:`install_driver` installed last, or None."""
    return _ACTIVE[-1] if _ACTIVE else None


def uninstall_driver() -> None:
    """Make the GPU's own driver Triton's again."""
    import triton

    _ACTIVE.clear()
    # reset_active() would look for a GPU now; like this Triton looks when it next needs one
    triton.runtime.driver._active = None


def install_driver(
    target: str = "sm_80", strict: bool = True, *, edit_ptx: EditPTX | None = None, **opts: Any
) -> Driver:
    """Make the emulator Triton's driver; ``kernel[grid](cpu_tensor, ...)`` then runs here.

    Args:
        target: What to compile for.
        strict: Whether a finding of a check raises; otherwise it is written to stderr.
        edit_ptx: Changes the PTX of every launch before it is parsed.
        **opts: Options of every launch, see :func:`entrenar.emulator.execute`.
    """
    import triton

    driver = Driver(target, strict, edit_ptx, {**environment_checks(), **opts})
    _ACTIVE[:] = [driver]
    _keep_ptx()
    triton.runtime.driver.set_active(driver)
    return driver


def _keep_ptx() -> None:
    """Have Triton's compiled kernels leave their PTX where launches, which get metadata alone, find it."""
    from triton.compiler.compiler import CompiledKernel

    if hasattr(CompiledKernel, "_entrenar_init_handles"):
        return
    CompiledKernel._entrenar_init_handles = CompiledKernel._init_handles

    def init_handles(kernel: Any) -> Any:
        if kernel.module is None and "ptx" in kernel.asm:
            _COMPILED[kernel.metadata.hash] = kernel.asm
        return CompiledKernel._entrenar_init_handles(kernel)

    CompiledKernel._init_handles = init_handles
