"""Compile @triton.jit functions for an NVIDIA target and execute the PTX on this CPU (ptxemu). numpy + gcc + triton only.

run_compiled(jit_fn, signature, constexprs, grid, args, num_warps=4, num_stages=3, target='sm_80', ...)
install_driver(target='sm_80')     then kernel[grid](cpu_tensor, ...) compiles for that target and runs here
"""

from __future__ import annotations
import dataclasses, os, re, sys, time
import numpy as np
from entrenar.emulator import ptxemu
from entrenar.emulator.ptxemu import PTXError as EmuError

_DT = {
    "float32": "fp32",
    "float64": "fp64",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "bool": "i1",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}


def is_array(a):
    return isinstance(a, np.ndarray) or hasattr(a, "untyped_storage")


def storage(a):
    """(root pointer, root bytes, pointer of the view)"""
    if hasattr(a, "untyped_storage"):
        if a.device.type != "cpu":
            raise EmuError("torch tensor must be on the CPU")
        s = a.untyped_storage()
        return s.data_ptr(), s.nbytes(), a.data_ptr()
    r = a
    while isinstance(r.base, np.ndarray):
        r = r.base
    from numpy.lib.array_utils import byte_bounds

    lo, hi = byte_bounds(r)
    return lo, hi - lo, a.ctypes.data


def infer_type(v):
    if is_array(v):
        return "*" + _DT[str(v.dtype).replace("torch.", "")]
    if isinstance(v, (bool, np.bool_)):
        return "i1"
    if isinstance(v, (int, np.integer)):
        return "i32" if -(2**31) <= v < 2**31 else ("i64" if v < 2**63 else "u64")
    if isinstance(v, (float, np.floating)):
        return "fp32"
    raise EmuError(f"cannot infer a Triton type for {type(v)}")


def bind(jit_fn, signature, constexprs, args, attrs, specialize):
    """-> (signature, constexprs, attrs, names of the run-time parameters, their values by name), specialised as Triton's launcher does"""
    names = list(jit_fn.arg_names)
    constexprs = dict(constexprs or {})
    free = [
        n
        for n in names
        if n not in constexprs and not (signature and signature.get(n) == "constexpr")
    ]
    if not isinstance(args, dict):
        if len(args) != len(free):
            raise EmuError(f"{len(args)} arguments for parameters {free}")
        args = dict(zip(free, args))
    sig = {}
    for n in names:
        if n in constexprs:
            sig[n] = "constexpr"
            continue
        v = args.get(n)
        if v is None:
            constexprs[n] = None
            sig[n] = "constexpr"
            continue
        t = signature[n] if signature and n in signature else infer_type(v)
        if specialize and attrs is None and t in ("i32", "i64") and int(v) == 1:
            constexprs[n] = 1
            t = "constexpr"
        sig[n] = t
    if attrs is None:
        attrs = {}
        if specialize:
            for i, n in enumerate(names):
                v, t = args.get(n), sig[n]
                if t == "constexpr":
                    continue
                if (t.startswith("*") and is_array(v) and storage(v)[2] % 16 == 0) or (
                    t in ("i32", "i64", "u32", "u64") and int(v) % 16 == 0
                ):
                    attrs[(i,)] = [["tt.divisibility", 16]]
    return sig, constexprs, attrs, [n for n in names if sig[n] != "constexpr"], args


@dataclasses.dataclass
class RunInfo:
    compile_s: float
    load_s: float
    run_s: float
    instructions: int
    barriers: int
    workgroups: int
    warnings: list
    asm: object = None
    metadata: object = None
    program: object = None
    reports: list = dataclasses.field(default_factory=list)
    counters: dict = None
    per_instruction: list = None

    def __str__(self):
        return f"compile {self.compile_s:.2f}s, emulate {self.run_s:.3f}s ({self.instructions} warp-instructions, {self.instructions / max(self.run_s, 1e-9) / 1e6:.2f} M/s, {self.workgroups} blocks, {self.barriers} warp-barriers)"


def compile_for(jit_fn, signature, constexprs, attrs=None, target="sm_80", **options):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    return triton.compile(
        ASTSource(jit_fn, signature, constexprs=constexprs, attrs=attrs or {}),
        target=GPUTarget("cuda", int(target[3:]), 32),
        options=options,
    )


def check_options():
    return {
        k: True for k in os.environ.get("PTXEMU_CHECK", "").split(",") if k
    }  # e.g. PTXEMU_CHECK=racecheck,initcheck


_programs: dict = {}


def program(hash_, ptx, name):
    if hash_ not in _programs:
        _programs[hash_] = ptxemu.Program(ptx, name)
    return _programs[hash_]


def run_compiled(
    jit_fn,
    signature,
    constexprs,
    grid,
    args,
    num_warps=4,
    num_stages=3,
    *,
    target="sm_80",
    attrs=None,
    specialize=True,
    options=None,
    **run,
):
    """run: guard, poison, wave_order ('forward'|'reverse'|'random'), limit, seed, late_async (cp.async copies happen at the wait, not at once)"""
    sig, cx, attrs, live, args = bind(jit_fn, signature, constexprs, args, attrs, specialize)
    t0 = time.perf_counter()
    k = compile_for(
        jit_fn,
        sig,
        cx,
        attrs,
        target,
        num_warps=num_warps,
        num_stages=num_stages,
        **(options or {}),
    )
    t1 = time.perf_counter()
    p = program(k.metadata.hash, k.asm["ptx"], k.metadata.name)
    g = grid({**cx, **args}) if callable(grid) else grid
    g = (g,) if isinstance(g, int) else tuple(g)
    gs, keep = _scratch(k.metadata, int(np.prod(g)))
    vals, types = [args[n] for n in live], [sig[n] for n in live]
    extra = len(p.params) - len(vals)
    run = {**check_options(), **run}
    run["names"] = live + ["scratch"] * extra
    run["uninit"] = [args[a] if isinstance(a, str) else a for a in run.get("uninit", ())]
    r = ptxemu.execute(
        p,
        g,
        num_warps * 32,
        k.metadata.shared,
        vals + ([gs] + [None] * (extra - 1) if extra else []),
        types + ["*i8"] * extra,
        storage,
        **run,
    )
    return RunInfo(compile_s=t1 - t0, asm=k.asm, metadata=k.metadata, program=p, **r)


class _Utils:
    def __init__(self, d):
        self.d = d

    def get_device_properties(self, device):
        return {
            "max_shared_mem": {75: 65536, 80: 166912, 86: 101376, 89: 101376}.get(
                int(self.d.target[3:]), 232448
            ),
            "max_num_regs": 65536,
            "multiprocessor_count": 108,
            "warpSize": 32,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 5120,
            "max_threads_per_sm": 2048,
        }

    def load_binary(self, name, kernel, shared, device):
        return object(), (name, kernel), 0, 0, 1024

    def unload_module(self, m):
        pass


@dataclasses.dataclass
class TMAArg:
    base: object
    shape: list
    strides: list
    meta: dict
    nan: bool


def _tensordesc(arg, dtype, meta):
    """a host tensor descriptor as kernel parameters -> (values, types)"""
    n = len(arg.shape)
    tail = [*arg.shape, *arg.strides], ["i32"] * n + ["i64"] * n
    tf32 = getattr(arg, "round_f32_to_tf32", None)
    if meta is None:
        return [
            arg.base,
            *arg.shape,
            *arg.strides,
            arg.padding == "nan",
            *([] if tf32 is None else [tf32]),
            *tail[0],
        ], ["*" + dtype] + ["i64"] * 2 * n + ["i1"] * (1 if tf32 is None else 2) + tail[1]
    if meta.get("is_im2col") or meta["fp4_padded"] or tf32:
        raise EmuError("this form of TMA descriptor is not supported")
    return [
        TMAArg(arg.base, list(arg.shape), list(arg.strides), meta, arg.padding == "nan"),
        *tail[0],
    ], ["nvTmaDesc"] + tail[1]


def _scratch(md, blocks):
    """global scratch buffer (aligned) -> (pointer or None, keepalive)"""
    if md.num_ctas != 1 or md.profile_scratch_size:
        raise EmuError("clusters and profile scratch are not supported")
    n = md.global_scratch_size * blocks
    if not n:
        return None, None
    b = np.full(n + 4096, 0xA5, np.uint8)
    al = max(128, md.global_scratch_align)
    return (b.ctypes.data + al - 1) // al * al, b


class _Launcher:
    def __init__(self, src, metadata):
        self.metadata, self.src = metadata, src

    def __call__(
        self, gx, gy, gz, stream, function, kernel_metadata, launch_metadata, enter, exit, *args
    ):
        vals, types, names = [], [], []
        meta = list(getattr(self.metadata, "tensordesc_meta", None) or [])

        def walk(v, t, nm):
            if isinstance(t, (tuple, list)):
                for a, b in zip(v, t):
                    walk(a, b, nm)
            elif t.startswith("tensordesc"):
                vs, ts = _tensordesc(
                    v, re.match(r"\w+<([^[>]*)\[", t)[1], meta.pop(0) if meta else None
                )
                for a, b in zip(vs, ts):
                    walk(a, b, nm)
            elif t != "constexpr":
                vals.append(v)
                types.append("*i8" if t.startswith("*") else t)
                names.append(str(nm))

        assert len(args) == len(self.src.signature), (len(args), self.src.signature)
        for v, (nm, t) in zip(args, self.src.signature.items()):
            walk(v, t, nm)
        d, md = _ACTIVE[0], self.metadata
        gs, keep = _scratch(md, gx * gy * gz)
        if md.hash not in _programs:
            _programs[md.hash] = ptxemu.Program(d.ptx_of(md), md.name)
        p = _programs[md.hash]
        extra = len(p.params) - len(vals)
        opts = dict(d.opts)
        opts["names"] = names + ["scratch"] * extra
        if opts.get("uninit"):
            roots = {storage(v)[0] for v in vals if is_array(v)}
            opts["uninit"] = [a for a in opts["uninit"] if storage(a)[0] in roots]
        r = ptxemu.execute(
            p,
            (gx, gy, gz),
            md.num_warps * 32,
            md.shared,
            vals + ([gs] + [None] * (extra - 1) if extra else []),
            types + ["*i8"] * extra,
            storage,
            **opts,
        )
        d.last = RunInfo(compile_s=0, metadata=md, program=p, **r)
        d.history.append(d.last) if d.history is not None else None
        d.total_instructions += r["instructions"]
        d.launches += 1
        for w in r["warnings"]:
            print("EMU WARNING", md.name, w, file=sys.stderr)
        if d.strict and r["warnings"]:
            raise EmuError("; ".join(r["warnings"]))


_ACTIVE = [None]


def active_driver():
    """the driver install_driver() installed last, or None"""
    return _ACTIVE[0]


def uninstall_driver():
    """make the GPU's own driver Triton's again"""
    import triton

    _ACTIVE[0] = None
    triton.runtime.driver.reset_active()


def install_driver(target="sm_80", strict=True, **opts):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class EmuDriver(DriverBase):
        def __init__(self):
            self.utils, self.launcher_cls = _Utils(self), _Launcher

        @classmethod
        def is_active(cls):
            return True

        def map_python_to_cpp_type(self, ty):
            return ty

        def get_current_target(self):
            return GPUTarget("cuda", int(self.target[3:]), 32)

        def get_current_device(self):
            return self.target  # Triton keeps compiled kernels by device: apart from a GPU's, and from another target's

        def set_current_device(self, d):
            pass

        def get_current_stream(self, d=None):
            return 0

        def get_active_torch_device(self):
            import torch

            return torch.device("cpu")

        def get_device_interface(self):
            import torch

            return torch.cpu

        def get_benchmarker(self):
            def bench(fn, *, quantiles=None, **kw):
                n0 = self.total_instructions
                fn()
                t = float(self.total_instructions - n0)
                return [t] * len(quantiles) if quantiles else t

            return bench

        def get_empty_cache_for_benchmark(self):
            import torch

            return torch.empty(1)

        def clear_cache(self, c):
            pass

        def allocate_default_profile_scratch(self, *a):
            raise EmuError("profile scratch not supported")

        def ptx_of(self, md):
            raise EmuError("no PTX kept")

    d = EmuDriver.__new__(EmuDriver)
    d.target, d.opts, d.strict, d.last, d.launches, d.total_instructions = (
        target,
        {**check_options(), **opts},
        strict,
        None,
        0,
        0,
    )
    d.__init__()
    d.history = None  # set to [] to keep the RunInfo of every launch
    _ACTIVE[0] = d
    # keep the PTX text: the launcher is only given metadata
    from triton.compiler.compiler import CompiledKernel

    if not hasattr(CompiledKernel, "_emu_orig"):
        CompiledKernel._emu_orig = CompiledKernel._init_handles

        def init(self):
            if self.module is None and "ptx" in self.asm and self.metadata.target.backend == "cuda":
                program(self.metadata.hash, self.asm["ptx"], self.metadata.name)
            return CompiledKernel._emu_orig(self)

        CompiledKernel._init_handles = init
    triton.runtime.driver.set_active(d)
    return d
