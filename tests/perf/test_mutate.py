"""Planted faults in PTX: where they are placed, and that every deleted barrier of a softmax is noticed."""

from __future__ import annotations

import shutil

import pytest

from perf import mutate
from perf.mutants import mutants

PTX = """.version 8.0
.file 1 "/some/where/kernel.py"
$body:
\t.loc\t1 7 9
\t// begin inline asm
\t@%p1 ld.global.b32 { %r1 }, [ %rd1 + 0 ];
\t// end inline asm
\tsetp.lt.s32 %p2, %r1, %r2;
\tsetp.neu.f32 %p3, %f1, %f2;
\tcp.async.cg.shared.global [ %r3 + 0 ], [ %rd2 + 0 ], 0x10, %r4;
\t.loc\t1 0 9
\tcp.async.wait_group 1;
\tbar.sync \t0;
\tbar.warp.sync 0xffffffff;
{
\t.reg .pred complete;
waitLoop:
\tmbarrier.try_wait.parity.shared.b64 complete, [%r5], %r6;
\t@!complete bra.uni waitLoop;
}
\twgmma.wait_group.sync.aligned 0;
\tcp.async.bulk.wait_group.read 0;
\tst.global.b32 [ %rd1 + 0 ], { %r1 };
"""


def test_mutants_change_one_place_each_and_keep_line_numbers() -> None:
    found = mutants(PTX)
    assert [(m.kind, m.line) for m in found] == [
        ("barrier", 13), ("wait", 12), ("wait", 18), ("wait", 21), ("wait", 22),
        ("compare", 8), ("compare", 9), ("mask", 6), ("mask", 10),
    ]  # fmt: skip
    for mutant in found:
        assert mutant.source == "kernel.py:7"
        changed = [
            i
            for i, (old, new) in enumerate(
                zip(PTX.splitlines(), mutant.ptx.splitlines(), strict=True), 1
            )
            if old != new
        ]
        assert changed[0] == mutant.line
        assert len(changed) == 1 + ("mbarrier" in mutant.instruction)
    texts = {m.line: m.ptx.splitlines()[m.line - 1].strip() for m in found}
    assert texts[13] == texts[12] == texts[18] == ""
    assert texts[8] == "setp.le.s32 %p2, %r1, %r2;"
    assert texts[9] == "setp.equ.f32 %p3, %f1, %f2;"
    assert texts[6] == "ld.global.b32 { %r1 }, [ %rd1 + 0 ];"
    assert texts[10].endswith("0x10, 0x10;")


def test_a_limit_takes_places_evenly() -> None:
    ptx = "\n".join(f"\tbar.sync {i};" for i in range(10))
    assert [m.line for m in mutants(ptx, ("barrier",), 4)] == [1, 3, 6, 8]


def test_a_summary_counts_and_names_survivors() -> None:
    row = {
        "kernel": "k", "dtype": "float32", "op": "o", "target": "sm_80", "line": 3, "source": "k.py:1",
        "instruction": "bar.sync 0;", "idle": False,
    }  # fmt: skip
    rows = [
        {**row, "kind": "barrier", "noticed": "race", "changed": 2},
        {**row, "kind": "barrier", "noticed": "", "changed": 0},
        {**row, "kind": "wait", "noticed": "", "changed": 1},
        {**row, "kind": "mask", "noticed": "", "changed": None, "idle": True},
        {**row, "kind": "mask", "noticed": "stopped: memory fault", "changed": None},
    ]
    told = mutate.summary(rows)
    assert told["kinds"]["barrier"]["share"] == 0.5
    assert told["kinds"]["mask"] == {
        "mutants": 2, "idle": 1, "noticed": 1, "by": {"stopped": 1}, "share": 1.0
    }  # fmt: skip
    assert told["changed_and_not_noticed"] == 1
    assert [line.split(":")[1].split(",")[0].strip() for line in told["survivors"]] == [
        "barrier",
        "wait",
    ]


def test_every_deleted_barrier_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("the emulator needs a C compiler")
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")
    monkeypatch.setenv("ENTRENAR_PTX_TARGET", "sm_80")
    (place,) = (p for p in mutate.plan("sm_80") if p[3] == "_softmax_rows_kernel")
    rows = mutate.try_all(place, "sm_80", ("barrier", "wait"))
    assert rows
    assert all(row["noticed"] and row["changed"] for row in rows), rows
