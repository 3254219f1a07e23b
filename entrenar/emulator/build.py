"""Compile the C core once, into the user's cache, and load it.

The library is named by a digest of its source, the compiler's flags and the machine's processor, so that
a change of any of them compiles anew and processes share what is there. ``ENTRENAR_EMULATOR_CACHE`` names
another folder, ``CC`` another compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from entrenar.emulator.errors import EmulatorError
from entrenar.emulator.layout import Instruction, Launch, Warp
from entrenar.emulator.operations import BUILT_IN, OPCODES, OPERATIONS

__all__ = ["cache_folder", "core"]

_SOURCES = Path(__file__).parent / "core"
# -ffp-contract=off: a multiplication and an addition are fused where PTX says fma and nowhere else.
_FLAGS = (
    "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv",
    "-fno-strict-aliasing", "-shared", "-fPIC",
)  # fmt: skip


def cache_folder() -> Path:
    """Return where the compiled core is kept."""
    named = os.environ.get("ENTRENAR_EMULATOR_CACHE")
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "entrenar" / "emulator"


@functools.cache
def core() -> ctypes.CDLL:
    """Return the core, compiled on first use (some ten seconds).

    Raises:
        EmulatorError: There is no C compiler, or it refused the core.
    """
    sources = _generated() | {p.name: p.read_text() for p in sorted(_SOURCES.glob("*.[ch]"))}
    identity = "\0".join([*(f"{n}\0{t}" for n, t in sources.items()), *_FLAGS, _processor()])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    library = cache_folder() / f"core_{digest}.so"
    if not library.exists():
        _compile(sources, library)
    loaded = ctypes.CDLL(str(library))
    sizes = (loaded.sz_ctx(), loaded.sz_ins(), loaded.sz_warp())
    wanted = tuple(ctypes.sizeof(kind) for kind in (Launch, Instruction, Warp))
    if sizes != wanted:
        raise EmulatorError(
            f"the emulator's core has structures of {sizes} bytes, wanted {wanted}",
            f"delete {library}",
        )
    loaded.free_cp.argtypes = [ctypes.c_void_p]
    return loaded


def _generated() -> dict[str, str]:
    """Return the sources made from the tables of operations."""
    opcodes = ", ".join(f"OP_{name}={OPCODES[name]}" for name in BUILT_IN)
    functions = [
        f"static void f_{OPCODES[name]}(Ins*I,u8*R,u32 m){{ u32 pres; (void)pres; {op.body} }}"
        for name, op in OPERATIONS.items()
    ]
    table = ",".join(f"f_{OPCODES[name]}" for name in OPERATIONS)
    return {
        "opcodes.inc": f"enum {{ {opcodes}, NBASE={len(BUILT_IN)} }};\n",
        "arithmetic.inc": "\n".join(
            [
                *functions,
                "typedef void (*opf)(Ins*,u8*,u32);",
                f"static const opf OPF[]={{{table}}};\n",
            ]
        ),
    }


def _processor() -> str:
    """Return what -march=native depends on."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.machine() + platform.processor()
    return first.split("flags")[-1].split("\n")[0]


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CC", ""))
    if named and shutil.which(named[0]):
        return named
    for name in ("gcc", "cc"):
        if shutil.which(name):
            return [name]
    raise EmulatorError(
        "the emulator needs a C compiler and found neither gcc nor cc",
        "install gcc, or name a compiler in CC",
    )


def _compile(sources: dict[str, str], library: Path) -> None:
    """Compile into a temporary name beside ``library``, then rename: others may be doing the same."""
    compiler = _compiler()
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        for name, text in sources.items():
            (Path(folder) / name).write_text(text)
        made = Path(folder) / library.name
        command = [*compiler, *_FLAGS, "-I", folder, f"{folder}/run.c", "-o", str(made), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise EmulatorError(
                f"{compiler[0]} could not compile the emulator's core: {done.stderr[-800:]}",
                "gcc 12 or newer compiles it; name another compiler in CC",
            )
        made.replace(library)
