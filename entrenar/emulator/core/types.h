// Types shared by the interpreter and, field by field, by entrenar/emulator/layout.py.
//
// A program is an array of Ins. Registers are byte offsets into a warp's register file R, where the 32 lanes of
// a register lie side by side; a predicate is one 32-bit word, a bit a lane. NOP_ stands for "no register".
#define _GNU_SOURCE
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef uint8_t u8;
typedef int8_t s8;
typedef uint16_t u16;
typedef int16_t s16;
typedef uint32_t u32;
typedef int32_t s32;
typedef uint64_t u64;
typedef int64_t s64;
typedef float f32;
typedef double f64;
typedef _Float16 f16;
#define FULL 0xffffffffu
#define NOP_ 0xffffffffu
#define SHWIN (1ull << 60)
#define LOCWIN (1ull << 61)

typedef struct { // one instruction
  u16 op;
  u8 pneg, n;              // whether the guard predicate is negated; a count, of registers say
  u32 pred, d, a, b, c, x; // registers: guard, destination, sources; x: an offset into extra, or a register
  s64 imm;                 // address offset
  u32 k0, k1, k2, line;    // modifiers, packed by entrenar/emulator/lowering; line of the PTX text
} Ins;

typedef struct { // lanes of a warp that went another way
  u32 pc, mask, blocked, pad; // blocked: they wait at an instruction of the whole warp
} Grp;

typedef struct { // one lane's cp.async that has not happened yet
  u64 dst;
  u64 src;
  u32 size, srcsize;
  u32 lane, pad;
} Cp;

enum { RUNNING, AT_BARRIER, DONE }; // Warp.state

typedef struct {
  u8 *R;     // register file
  u8 *local; // local memory
  u32 pc, mask, alive, state, npend, ncp, ngrp, cap;
  Grp pend[40];
  Cp *cp;
  u32 grp_end[64]; // committed groups: where each ends in cp
} Warp;

typedef struct { // one launch
  Ins *prog;
  u32 *extra;
  Warp *warps;
  u8 *smem;
  u64 smem_n, local_n;
  u32 nprog, nwarps, nthreads, gx, gy, gz;
  u32 o_tid, o_ctaid[3], o_laneid, o_warpid;
  u32 order, late_async, poison, do_poison; // order of warps: 0 forward, 1 reverse, 2 random
  u64 wg, wg_end, icount, limit, seed, barriers;
  u64 fault;
  u32 err_pc;
  s32 cur;
  u64 smem_alloc;
  struct Mon_ *mon; // counters and checks; null where none is on
} Ctx;

// What a run ends with; entrenar/emulator/launch.py puts each into words.
enum {
  OK = 0,
  FAULT = 1,
  LIMIT = 2,
  UNSUP = 3,
  SMEM_OOB = 4,
  DIVERGENT = 5,
  TRAP = 6,
  DEADLOCK = 7,
  MISALIGNED = 8,
  PARTIAL_BARRIER = 9,
  YIELD = 100
};
