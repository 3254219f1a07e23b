"""Counters and checks of the emulator against known answers, on hand-written PTX."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
if not (shutil.which("gcc") or shutil.which("cc")):
    pytest.skip("the emulator needs a C compiler", allow_module_level=True)

from entrenar import emulator

FRAME = """.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 sm[];
.visible .entry k({parameters})
.reqntid {threads}
{{
.reg .pred %p<8>; .reg .b32 %r<40>; .reg .b64 %rd<20>;
mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, sm; and.b32 %r3, %r0, 31; shr.u32 %r4, %r0, 5;
{loads}
{body}
ret;
}}
"""
# own word in %r5, the word of the same lane in the other warp in %r6
WORDS = (
    "shl.b32 %r5, %r0, 2; add.u32 %r5, %r2, %r5; xor.b32 %r6, %r0, 32; shl.b32 %r6, %r6, 2; "
    "add.u32 %r6, %r2, %r6;"
)
READ_AFTER_WRITE, WRITE_AFTER_READ, WRITE_WRITE, LANES = (emulator.KIND[k] for k in (2, 3, 1, 4))


def run(
    body: str,
    threads: int = 32,
    grid: tuple[int, ...] = (1,),
    arrays: Sequence[Any] = (),
    **options: Any,
) -> emulator.Execution:
    ptx = FRAME.format(
        parameters=", ".join(f".param .u64 p{i}" for i in range(max(1, len(arrays)))),
        loads=" ".join(
            f"ld.param.u64 %rd{i}, [p{i}]; cvta.to.global.u64 %rd{i}, %rd{i};"
            for i in range(len(arrays))
        ),
        threads=threads,
        body=body,
    )
    given = list(arrays) or [None]
    program = emulator.Program(ptx, "k")
    types = ["*i8"] * len(given)
    return emulator.execute(program, grid, threads, 4096, given, types, emulator.storage, **options)


def kinds(result: emulator.Execution) -> list[str]:
    return sorted({report.kind for report in result.reports})


def words(n: int = 4096) -> np.ndarray:
    return np.zeros(n, np.int32)


@pytest.mark.parametrize("operation", ["ld", "st"])
@pytest.mark.parametrize(
    ("stride", "offset", "kind", "size", "lanes", "wanted"),
    [
        (1, 0, "u32", 4, 32, (1, 128, 4, 4)),
        (1, 4, "u32", 4, 32, (1, 128, 5, 4)),
        (2, 0, "u32", 4, 32, (1, 128, 8, 4)),
        (8, 0, "u32", 4, 32, (1, 128, 32, 4)),
        (0, 0, "u32", 4, 32, (1, 128, 1, 1)),
        (1, 0, "v4.u32", 16, 32, (1, 512, 16, 16)),
        (1, 0, "u8", 1, 32, (1, 32, 1, 1)),
        (1, 0, "u32", 4, 5, (1, 20, 1, 1)),
        (1, 0, "u32", 4, 0, (0, 0, 0, 0)),
    ],
)
def test_global_sectors(
    operation: str, stride: int, offset: int, kind: str, size: int, lanes: int, wanted: Any
) -> None:
    """Requests, bytes, sectors and the fewest sectors of one access by a warp."""
    value = "{%r10,%r11,%r12,%r13}" if kind.startswith("v4") else "%r10"
    access = f"{value}, [%rd3]" if operation == "ld" else f"[%rd3], {value}"
    body = "mov.u32 %r10, 1; mov.u32 %r11, 1; mov.u32 %r12, 1; mov.u32 %r13, 1;"
    body += f"mul.lo.u32 %r5, %r3, {stride * size}; add.u32 %r5, %r5, {offset};"
    body += "cvt.u64.u32 %rd3, %r5; add.u64 %rd3, %rd0, %rd3;"
    body += f"setp.lt.u32 %p0, %r3, {lanes}; @%p0 {operation}.global.{kind} {access};"
    counted = run(body, arrays=[words()], counters=True).counters["global_memory"]
    got = counted["load" if operation == "ld" else "store"]
    assert (got["requests"], got["bytes"], got["sectors"], got["ideal_sectors"]) == wanted


def test_distinct_bytes() -> None:
    body = (
        "mul.wide.u32 %rd3, %r3, 4; add.u64 %rd3, %rd0, %rd3; ld.global.u32 %r10, [%rd3];"
        "ld.global.u32 %r10, [%rd3]; st.global.u32 [%rd3+128], %r10;"
    )
    counted = run(body, arrays=[words(64)], counters=True).counters
    distinct = counted["distinct"]
    assert (distinct["loaded"], distinct["stored"]) == (128, 128)
    (buffer,) = distinct["buffers"].values()
    assert (buffer["requested_loaded"], buffer["requested_stored"]) == (256, 128)
    assert counted["access_bits"]["load"] == {32: 2}
    assert counted["by_class"]["global memory"] == 3


@pytest.mark.parametrize(
    ("stride", "kind", "size", "wanted"),
    [
        (1, "u32", 4, (1, 0)),
        (2, "u32", 4, (2, 1)),
        (4, "u32", 4, (4, 3)),
        (3, "u32", 4, (1, 0)),
        (0, "u32", 4, (1, 0)),
        (16, "u32", 4, (16, 15)),
        (1, "v2.u32", 8, (2, 0)),
        (2, "v2.u32", 8, (4, 2)),
        (1, "v4.u32", 16, (4, 0)),
        (2, "v4.u32", 16, (8, 4)),
        (1, "u8", 1, (1, 0)),
    ],
)
def test_shared_wavefronts(stride: int, kind: str, size: int, wanted: tuple[int, int]) -> None:
    """Wavefronts of one shared load by a warp, and how many of them are bank conflicts."""
    value = {"v2": "{%r10,%r11}", "v4": "{%r10,%r11,%r12,%r13}"}.get(kind[:2], "%r10")
    body = f"mul.lo.u32 %r5, %r3, {stride * size}; add.u32 %r5, %r2, %r5;"
    counted = run(body + f"ld.shared.{kind} {value}, [%r5];", counters=True).counters
    got = counted["shared_memory"]["load"]
    assert (got["wavefronts"], got["excess"]) == wanted


def test_classes_flops_and_barriers() -> None:
    body = (
        "mov.b32 %r20, 0f3F800000; setp.lt.u32 %p0, %r3, 8; @%p0 add.f32 %r21, %r20, %r20;"
        "fma.rn.f32 %r21, %r20, %r20, %r20; ex2.approx.f32 %r21, %r20; cvt.rzi.s32.f32 %r23, %r20;"
        "bar.sync 0; shfl.sync.bfly.b32 %r22, %r20, 1, 31, -1;"
    )
    counted = run(body, threads=64, counters=True).counters
    classes = {k: n for k, n in counted["by_class"].items() if n and k not in ("control", "other")}
    assert classes == {
        "integer": 6, "fp32": 4, "conversion": 2, "special function": 2, "shuffle": 2, "barrier": 2,
    }  # fmt: skip
    assert counted["fp32_flops"] == 2 * (8 + 64)
    assert (counted["block_barriers"], counted["warp_barriers"]) == (1, 2)


COPY = (
    "mul.wide.u32 %rd3, %r0, 4; add.u64 %rd3, %rd0, %rd3;"
    "cp.async.ca.shared.global [%r5], [%rd3], 4; cp.async.commit_group;"
)
FIRST = "mov.u32 %r7, 0; setp.eq.u32 %p0, %r0, 0; @%p0 st.shared.u32 [%r2], %r7; bar.sync 0;"
ATOMIC = FIRST + "atom.shared.add.u32 %r8, [%r2], %r0;"
STORE, LOAD, BARRIER = "st.shared.u32 [%r5], %r0;", "ld.shared.u32 %r7, [%r6];", "bar.sync 0;"
FIVE = "mov.u32 %r7, 5; st.shared.u32 [%r2], %r7;"
RACES = {
    "store, barrier, load": (STORE + BARRIER + LOAD, []),
    "store, load": (STORE + LOAD, [READ_AFTER_WRITE, WRITE_AFTER_READ]),
    "load, then another store": (
        STORE + BARRIER + LOAD + "add.u32 %r8, %r0, 1000; st.shared.u32 [%r5], %r8;",
        [READ_AFTER_WRITE, WRITE_AFTER_READ],
    ),
    "warps store different values": ("st.shared.u32 [%r2], %r4;", [WRITE_WRITE]),
    "warps store one value": (FIVE + BARRIER + "ld.shared.u32 %r8, [%r2];", []),
    "bytes of one word": ("add.u32 %r7, %r2, %r4; st.shared.u8 [%r7], %r4; bar.sync 0;", []),
    "atomics": (ATOMIC + BARRIER + "ld.shared.u32 %r9, [%r2];", []),
    "atomic, plain load": (
        ATOMIC + "ld.shared.u32 %r9, [%r2];", [READ_AFTER_WRITE, WRITE_AFTER_READ],
    ),
    "copy, wait, barrier": (COPY + "cp.async.wait_group 0;" + BARRIER + LOAD, []),
    "copy, barrier": (COPY + BARRIER + LOAD, [READ_AFTER_WRITE]),
    "copy, wait": (COPY + "cp.async.wait_group 0;" + LOAD, [READ_AFTER_WRITE, WRITE_AFTER_READ]),
    "copy, own word": (COPY + "ld.shared.u32 %r7, [%r5];", [READ_AFTER_WRITE]),
    "copy, one group left": (
        COPY + "cp.async.wait_group 1;" + BARRIER + LOAD, [READ_AFTER_WRITE],
    ),
}  # fmt: skip


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("name", RACES)
def test_races_in_shared_memory(name: str, order: str) -> None:
    """Found whatever order the warps ran in, since happens-before decides and not the order."""
    body, wanted = RACES[name]
    result = run(WORDS + body, threads=64, arrays=[words()], racecheck=True, wave_order=order)
    assert kinds(result) == sorted(wanted)


def test_lanes_of_one_store_disagree() -> None:
    assert kinds(run("st.shared.u32 [%r2], %r3;", racecheck=True)) == [LANES]


@pytest.mark.parametrize(
    ("body", "grid", "wanted"),
    [
        (LOAD, (1,), [emulator.KIND[5]]),
        (STORE + BARRIER + LOAD, (1,), []),
        (STORE + BARRIER + LOAD, (2,), []),
    ],
)
def test_shared_memory_never_written(body: str, grid: tuple[int], wanted: list[str]) -> None:
    assert kinds(run(WORDS + body, threads=64, grid=grid, initcheck=True)) == wanted


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("ld.global.u32 %r7, [%rd3];", [emulator.KIND[6]]),
        ("st.global.u32 [%rd3], %r0; ld.global.u32 %r7, [%rd3];", []),
        ("atom.global.add.u32 %r7, [%rd3], 1;", [emulator.KIND[6]]),
    ],
)
def test_output_read_before_it_is_stored(body: str, wanted: list[str]) -> None:
    out = words()
    address = "mul.wide.u32 %rd3, %r0, 4; add.u64 %rd3, %rd0, %rd3;"
    assert kinds(run(address + body, arrays=[out], uninit=[out])) == wanted


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("st.global.u32 [%rd4], %r0; ld.global.u32 %r7, [%rd4];", []),
        ("st.global.u32 [%rd3], %r1;", [7]),
        ("atom.global.add.u32 %r7, [%rd3], 1;", []),
        ("st.global.u32 [%rd4], %r0; ld.global.u32 %r7, [%rd3];", [8]),
        ("ld.global.u32 %r7, [%rd3+128]; st.global.u32 [%rd4], %r0;", [8, 9]),
        ("ld.global.u32 %r7, [%rd3];", []),
    ],
)
def test_races_between_blocks(body: str, wanted: list[int]) -> None:
    addresses = (
        "mul.wide.u32 %rd3, %r0, 4; add.u64 %rd3, %rd0, %rd3; shl.b32 %r5, %r1, 7;"
        "cvt.u64.u32 %rd4, %r5; add.u64 %rd4, %rd3, %rd4;"
    )
    result = run(addresses + body, arrays=[words()], grid=(3,), gracecheck=True)
    assert kinds(result) == sorted(emulator.KIND[k] for k in wanted)


def test_a_store_past_an_array_is_caught() -> None:
    out = words(32)
    body = "mul.wide.u32 %rd3, %r0, 4; add.u64 %rd3, %rd0, %rd3; st.global.u32 [%rd3+128], %r0;"
    with pytest.raises(emulator.EmulatorError) as caught:
        run(body, arrays=[out])
    for part in ("k: access outside of memory", "byte 128 of parameter 0", "128 bytes",
                 "program (0, 0, 0), warp 0", "PTX line", "st.global.u32"):  # fmt: skip
        assert part in str(caught.value)


@pytest.mark.parametrize("access", ["ld.global.u8 %r7, [%rd0+5];", "st.global.u8 [%rd0+5], %r0;"])
def test_an_access_short_of_the_guard_page_is_caught(access: str) -> None:
    """Arguments end 16 bytes aligned; between their last byte and the page the checks look."""
    out = np.zeros(5, np.uint8)
    (found,) = {r.kind for r in run(access, arrays=[out], racecheck=True).reports}
    assert found == emulator.KIND[12]


def test_a_store_beside_an_argument_is_seen_without_checks() -> None:
    out = np.zeros(5, np.uint8)
    (warning,) = run("st.global.u8 [%rd0+6], %r0;", arrays=[out]).warnings
    assert "parameter 0, an array of 5 bytes, was written past the end" in warning


@pytest.mark.parametrize(
    ("body", "threads"),
    [
        ("setp.lt.u32 %p0, %r0, 16; @%p0 bar.sync 0;", 64),
        ("setp.lt.u32 %p0, %r0, 16; @%p0 ret; bar.sync 0;", 64),
        ("setp.lt.u32 %p0, %r0, 32; @%p0 ret; bar.sync 0;", 64),
        ("setp.lt.u32 %p0, %r0, 16; @%p0 bra L; bar.sync 0; L: mov.u32 %r5, 1;", 32),
    ],
    ids=["predicated lanes", "lanes that returned", "a warp that returned", "a branch around it"],
)
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_a_barrier_that_a_part_reaches_is_caught(body: str, threads: int, order: str) -> None:
    with pytest.raises(emulator.EmulatorError, match=r"a barrier that a part .* `.*bar\.sync 0`"):
        run(body, threads=threads, wave_order=order)


def test_a_wait_that_nothing_ends_is_an_error() -> None:
    body = (
        "mbarrier.init.shared::cta.b64 [%r2], 1; "
        "W: mbarrier.try_wait.parity.shared.b64 %p0, [%r2], 0; @!%p0 bra W;"
    )
    with pytest.raises(emulator.EmulatorError, match=r"every warp waits, for ever.*try_wait"):
        run(body)


def test_a_loop_without_end_is_an_error() -> None:
    with pytest.raises(emulator.EmulatorError, match="more than 10000 instructions"):
        run("L: bra L;", limit=10_000)


@pytest.mark.parametrize(
    "access",
    [
        "ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd0+4];",
        "st.global.v2.u32 [%rd0+4], {%r5, %r6};",
        "add.u32 %r5, %r2, 4; st.shared.v2.u32 [%r5], {%r0, %r0};",
        "ld.shared.u32 %r5, [%r2+2];",
        "cp.async.ca.shared.global [%r2], [%rd0+4], 8;",
        "cp.async.ca.shared.global [%r2+4], [%rd0], 8; cp.async.wait_all;",
    ],
)
def test_a_misaligned_access_is_caught(access: str) -> None:
    with pytest.raises(emulator.EmulatorError, match=r"k: misaligned address.*warp 0: PTX line"):
        run(access, arrays=[words()])


@pytest.mark.parametrize(
    "access", ["ld.shared.u32 %r5, [%r2+4096];", "st.shared.u32 [%r2+4096], %r0;"]
)
def test_shared_memory_ends(access: str) -> None:
    with pytest.raises(emulator.EmulatorError, match="shared or local access at byte 4096"):
        run(access)


def test_what_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(emulator.EmulatorError, match="frobnicate"):
        run("frobnicate.b32 %r5, %r6;")


@pytest.mark.parametrize(
    ("a", "b", "low", "high"), [(3, 5, 3, 5), (-3, 5, 0, 5), (-3, -5, 0, 0), (7, 7, 7, 7)]
)
def test_integer_minimum_and_maximum_clamped_at_zero(a: int, b: int, low: int, high: int) -> None:
    out = words(2)
    body = (
        f"mov.u32 %r5, {a & 0xFFFFFFFF}; mov.u32 %r6, {b & 0xFFFFFFFF}; min.relu.s32 %r7, %r5, %r6;"
        "max.relu.s32 %r8, %r5, %r6; st.global.u32 [%rd0], %r7; st.global.u32 [%rd0+4], %r8;"
    )
    run(body, arrays=[out])
    assert out.tolist() == [low, high]


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        # two bfloat16 to a word, the low half first: 1.0 is 0x3F80, -1.0 is 0xBF80, NaN is 0x7FC0
        (0x3F80_BF80, 0x0000_0000, [0, 1]),
        (0x3F80_3F80, 0x3F80_3F80, [1, 1]),
        (0x7FC0_3F80, 0x3F80_7FC0, [0, 0]),
        (0xBF80_3F80, 0x0000_8000, [1, 0]),
    ],
)
def test_packed_comparison(a: int, b: int, wanted: list[int]) -> None:
    out = words(2)
    body = (
        f"mov.u32 %r5, {a}; mov.u32 %r6, {b}; setp.ge.bf16x2 %p1|%p2, %r5, %r6;"
        "selp.b32 %r7, 1, 0, %p1; selp.b32 %r8, 1, 0, %p2;"
        "st.global.u32 [%rd0], %r7; st.global.u32 [%rd0+4], %r8;"
    )
    run(body, arrays=[out])
    assert out.tolist() == wanted
