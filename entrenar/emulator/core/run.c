// The interpreter: one warp of 32 lanes at a time, until every warp of a block waits or is done.
//
// Lanes that branch apart become pending groups; the group with the lowest instruction runs, and groups meet again
// at the same instruction. An instruction of the whole warp waits for the other groups first.
#include "types.h"
#include "faults.h"
#include "numbers.h"
#include "memory.h"
#include "async_copy.h"
#include "lanes.h"
#include "convert.h"
#include "matrix.h"
#include "opcodes.inc"
#include "lane_loops.h"
#include "tensor_map.h"
#include "arithmetic.inc"
#include "shadow.h"
#include "sectors.h"
#include "monitor.h"

static int switch_group(Warp *w) { // pick the unblocked pending group with the lowest pc; merges equal pcs
  int best = -1;
  for (u32 i = 0; i < w->npend; i++)
    if (!w->pend[i].blocked && (best < 0 || w->pend[i].pc < w->pend[best].pc)) best = i;
  if (best < 0) return 0;
  Grp g = w->pend[best];
  w->pend[best] = w->pend[--w->npend];
  w->pc = g.pc;
  w->mask = g.mask;
  return 1;
}
static void merge(Warp *w) {
  for (u32 i = 0; i < w->npend;) {
    if (w->pend[i].pc == w->pc) {
      w->mask |= w->pend[i].mask;
      w->pend[i] = w->pend[--w->npend];
    } else
      i++;
  }
}
static u32 lanes_of(Ctx *c, Warp *w) { // lanes the warp started with
  u32 n = c->nthreads - (u32)(w - c->warps) * 32;
  return n >= 32 ? FULL : (1u << n) - 1;
}
// Lanes that went apart meet before these; each opcode is a bit of the set.
static inline int of_whole_warp(u32 op) {
  const u64 set = 1ull << OP_BAR | 1ull << OP_SYNCWARP | 1ull << OP_SHFL | 1ull << OP_REDUX | 1ull << OP_MMA |
                  1ull << OP_LDMATRIX | 1ull << OP_STMATRIX | 1ull << OP_WGMMA | 1ull << OP_VOTE | 1ull << OP_ELECT;
  return op < NBASE && (set >> op & 1);
}
static int run_warp(Ctx *c, Warp *w) {
  u8 *R = w->R;
  Ins *prog = c->prog;
  for (;;) {
    if (w->npend) {
      merge(w);
      for (u32 i = 0; i < w->npend; i++)
        if (!w->pend[i].blocked && w->pend[i].pc < w->pc) {
          Grp g = {w->pc, w->mask, 0, 0};
          Grp h = w->pend[i];
          w->pend[i] = g;
          w->pc = h.pc;
          w->mask = h.mask;
          i = (u32)-1;
          merge(w);
        }
    }
    if (w->pc >= c->nprog) {
      c->err_pc = w->pc;
      return TRAP;
    }
    Ins *I = &prog[w->pc];
    c->err_pc = w->pc;
    if (++c->icount > c->limit) return LIMIT;
    u32 act = w->mask, m = act;
    if (I->pred != NOP_) {
      u32 p = *(u32 *)(R + I->pred);
      m &= I->pneg ? ~p : p;
    }
    if (w->npend && of_whole_warp(I->op)) { // wait for the others
      Grp g = {w->pc, w->mask, 1, 0};
      w->pend[w->npend++] = g;
      if (!switch_group(w)) return DIVERGENT;
      continue;
    }
    if (__builtin_expect(MN != 0, 0)) mon_ins(c, w, I, m);
    switch (I->op) {
    case OP_BRA:
      if (m) {
        if (m == act) {
          w->pc = I->k0;
          continue;
        }
        Grp g = {w->pc + 1, act & ~m, 0, 0};
        w->pend[w->npend++] = g;
        w->pc = I->k0;
        w->mask = m;
        continue;
      }
      break;
    case OP_RET:
      if (m) {
        w->alive &= ~m;
        act &= ~m;
        w->mask = act;
        if (!act) {
          if (w->npend) {
            for (u32 i = 0; i < w->npend; i++) w->pend[i].blocked = 0;
            switch_group(w);
            continue;
          }
          w->state = DONE;
          return OK;
        }
      }
      break;
    case OP_BAR:
      if (m != lanes_of(c, w)) return PARTIAL_BARRIER;
      c->barriers++;
      w->pc++;
      w->state = AT_BARRIER;
      return OK;
    case OP_SHFL: do_shfl(w, I, m, act); break;
    case OP_REDUX: do_redux(w, I, m); break;
    case OP_MMA:
      if (m != FULL) return DIVERGENT;
      do_mma(c, w, I);
      break;
    case OP_LDMATRIX:
      if (m != FULL) return DIVERGENT;
      do_ldmatrix(c, w, I);
      break;
    case OP_STMATRIX:
      if (m != FULL) return DIVERGENT;
      do_stmatrix(c, w, I);
      break;
    case OP_WGMMA:
      if (m != FULL) return DIVERGENT;
      do_wgmma(c, w, I);
      break;
    case OP_VOTE: {
      u32 p = *(u32 *)(R + I->a);
      if (I->k1) p = ~p;
      p &= m;
      u32 r = I->k0 == 0 ? (p == m) : I->k0 == 1 ? (p != 0) : p;
      if (I->k0 == 2) {
        LANES(((u32 *)(R + I->d))[l] = r)
      } else {
        u32 *q = (u32 *)(R + I->d);
        *q = (*q & ~m) | (r ? m : 0);
      }
    } break;
    case OP_ELECT: {
      u32 lead = m & -m;
      if (I->d != NOP_) {
        LANES(((u32 *)(R + I->d))[l] = __builtin_ctz(lead))
      }
      u32 *q = (u32 *)(R + I->x);
      *q = (*q & ~m) | lead;
    } break;
    case OP_SYNCWARP: break;
    case OP_LD: do_ld(c, w, I, m); break;
    case OP_ST:
      do_st(c, w, I, m);
      if (__builtin_expect(MN != 0, 0)) mon_st_post(c, w, I, m);
      break;
    case OP_ATOM: do_atom(c, w, I, m); break;
    case OP_CPASYNC: do_cp(c, w, I, m); break;
    case OP_CPCOMMIT:
      if (c->late_async) {
        if (w->ngrp == 64) return UNSUP;
        w->grp_end[w->ngrp++] = w->ncp;
      }
      break;
    case OP_CPWAIT: cp_wait(c, w, I->k0); break;
    case OP_CPWAITALL:
      if (c->late_async) {
        w->grp_end[w->ngrp++] = w->ncp;
        cp_wait(c, w, 0);
      }
      break;
    case OP_MBAR: do_mbar(c, w, I, m); break;
    case OP_TRYWAIT:
      if (m) {
        int ok = do_trywait(c, w, I, m);
        if (ok && MN) mon_acquire(c, w, I, m);
        if (!ok) {
          w->pc++;
          return YIELD;
        }
      }
      break;
    case OP_TMALD: do_tma(c, w, I, m, 1); break;
    case OP_TMAST: do_tma(c, w, I, m, 0); break;
    case OP_TMREP: do_tmrep(c, w, I, m); break;
    case OP_TMCP:
      for (int l = 0; l < 32; l++)
        if (m >> l & 1) {
          memcpy((u8 *)((u64 *)(R + I->b))[l], addr_of(c, w, 2, l, areg(I, R, l), 128, 1), 128);
          break;
        }
      break;
    case OP_CVT: do_cvt(w, I, m); break;
    case OP_NOP: break;
    case OP_TRAP:
      if (m) return TRAP;
      break;
    case OP_UNSUP:
      if (m) return UNSUP;
      break;
    case OP_PACK: {
      u32 *X = c->extra + I->x;
      int ew = I->k0;
      for (int l = 0; l < 32; l++)
        if (m >> l & 1) {
          u64 v = 0;
          for (int i = 0; i < I->n; i++)
            v |= (getreg(R, X[2 * i], X[2 * i + 1], l) & (ew == 64 ? ~0ull : (1ull << ew) - 1)) << (ew * i);
          setreg(R, I->d, I->k1, l, v);
        }
    } break;
    case OP_UNPACK: {
      u32 *X = c->extra + I->x;
      int ew = I->k0;
      for (int l = 0; l < 32; l++)
        if (m >> l & 1) {
          u64 v = getreg(R, I->a, I->k1, l);
          for (int i = 0; i < I->n; i++)
            if (X[2 * i] != NOP_) setreg(R, X[2 * i], X[2 * i + 1], l, v >> (ew * i));
        }
    } break;
    case OP_ACTIVEMASK: LANES(((u32 *)(R + I->d))[l] = m) break;
    default: OPF[I->op - NBASE](I, R, m);
    }
    w->pc++;
  }
}
static void init_wg(Ctx *c) {
  ntq = nyield = 0;
  u64 t = c->wg;
  u32 x = t % c->gx, y = (t / c->gx) % c->gy, z = t / ((u64)c->gx * c->gy);
  u32 xyz[3] = {x, y, z};
  if (c->do_poison)
    for (u64 i = 0; i < c->smem_alloc / 4; i++) ((u32 *)c->smem)[i] = c->poison;
  else
    memset(c->smem, 0, c->smem_alloc);
  for (u32 i = 0; i < c->nwarps; i++) {
    Warp *w = &c->warps[i];
    w->alive = lanes_of(c, w);
    w->mask = w->alive;
    w->pc = 0;
    w->state = RUNNING;
    w->npend = 0;
    w->ncp = w->ngrp = 0;
    for (int l = 0; l < 32; l++) {
      ((u32 *)(w->R + c->o_tid))[l] = i * 32 + l;
      ((u32 *)(w->R + c->o_laneid))[l] = l;
      ((u32 *)(w->R + c->o_warpid))[l] = i;
      for (int d = 0; d < 3; d++) ((u32 *)(w->R + c->o_ctaid[d]))[l] = xyz[d];
    }
  }
}
static u64 rnd(Ctx *c) {
  c->seed ^= c->seed << 13;
  c->seed ^= c->seed >> 7;
  c->seed ^= c->seed << 17;
  return c->seed;
}
static int pick(Ctx *c) {
  int n = c->nwarps;
  if (c->order == 0) {
    for (int i = 0; i < n; i++)
      if (!c->warps[i].state) return i;
  } else if (c->order == 1) {
    for (int i = n - 1; i >= 0; i--)
      if (!c->warps[i].state) return i;
  } else {
    int k = 0;
    for (int i = 0; i < n; i++) k += !c->warps[i].state;
    if (!k) return -1;
    int r = rnd(c) % k;
    for (int i = 0; i < n; i++)
      if (!c->warps[i].state && r-- == 0) return i;
  }
  return -1;
}
int run_grid(Ctx *c) {
  struct sigaction sa;
  memset(&sa, 0, sizeof sa);
  sa.sa_sigaction = handler;
  sa.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &sa, &old_segv);
  sigaction(SIGBUS, &sa, &old_bus);
  sigaction(SIGFPE, &sa, &old_fpe);
  int rc = OK;
  G = c;
  MN = 0;
  {
    int j = sigsetjmp(jb, 1);
    if (j) {
      c->fault = g_fault;
      rc = j - 1;
      goto out;
    }
  }
  g_on = 1;
  MN = c->mon;
  if (MN) mon_begin(c);
  for (; c->wg < c->wg_end; c->wg++) {
    init_wg(c);
    if (MN) mon_block(c);

    for (;;) {
      int i = pick(c);
      if (i >= 0 && nyield) {
        i = (c->cur + 1) % c->nwarps;
        while (c->warps[i].state) i = (i + 1) % c->nwarps;
      }
      if (i < 0) {
        u32 waiting = 0, last = 0;
        for (u32 k = 0; k < c->nwarps; k++)
          if (c->warps[k].state == AT_BARRIER) {
            c->warps[k].state = RUNNING;
            waiting++;
            last = k;
          }
        if (!waiting) break;
        if (waiting < c->nwarps) { // the others have returned
          c->cur = last;
          c->err_pc = c->warps[last].pc - 1;
          rc = PARTIAL_BARRIER;
          goto out;
        }
        if (MN) mon_bar(c);
        continue;
      }
      c->cur = i;
      rc = run_warp(c, &c->warps[i]);
      if (rc == YIELD) {
        if (++nyield > 100000) { // every warp has tried in vain, many times over
          rc = DEADLOCK;
          goto out;
        }
        rc = OK;
        continue;
      }
      nyield = 0;
      if (rc) goto out;
    }
    tma_flush(c);
  }
out:
  g_on = 0;
  if (MN) {
    mon_end();
    MN = 0;
  }
  sigaction(SIGSEGV, &old_segv, 0);
  sigaction(SIGBUS, &old_bus, 0);
  sigaction(SIGFPE, &old_fpe, 0);
  return rc;
}
int sz_ctx(void) { return sizeof(Ctx); }
int sz_ins(void) { return sizeof(Ins); }
int sz_warp(void) { return sizeof(Warp); }
void free_cp(Warp *w) {
  free(w->cp);
  w->cp = 0;
  w->cap = 0;
}
