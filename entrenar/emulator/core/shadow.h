// What is known of each byte of shared memory, and of the order of warps: happens-before with vector clocks.
//
// An agent is a warp, its cp.async copies, its wgmma reads, its bulk stores, or an mbarrier's bulk loads. bar.sync
// joins the clocks of all warps; an mbarrier arrival releases and a successful wait acquires; a wait for a group
// orders the agent's accesses before what the warp does next. Two accesses that no order connects, at least one of
// them a write, are a race in every run, whatever order the warps took.
enum { MF_CNT = 1, MF_RACE = 2, MF_INIT = 4, MF_GRACE = 8 };
enum { K_WAW = 1, K_RAW, K_WAR, K_LANES, K_UNINIT, K_GUNINIT, K_GWW, K_GWR, K_GRW, K_GLANES, K_GWA, K_BOUNDS };
typedef struct {
  u64 cnt, lanes, req, bytes, sect, ideal, wave, wideal;
} IM; // per instruction
typedef struct {
  u64 lo, n;
  u32 *ld, *st, *valid, *gr;
  u64 rld, rst;
  u64 mlo, mn;
  u32 *bld, *bst, *gld, *gst;
  u64 pld, pst;
} MReg; // one argument: where it lies; ld/st/valid: one bit a byte, a word a sector; gr: 6 words a granule;
        // rld/rst: bytes, distinct within each request; mlo, mn: its mapping, guard pages and all; bld/bst: ld/st
        // of one block, which gld/gst name; pld/pst: bytes, distinct within each block
typedef struct {
  u32 kind, pc1, pc2, ag1, ag2, reg;
  u64 n, addr, block, block2;
} Rep;
typedef struct Mon_ {
  u32 flags, sgran, ggran, nreg;
  IM *im;
  MReg *reg;
  Rep *rep;
  u32 nrep, maxrep;
  u64 blockbars;
} Mon;
// shared-memory shadow, one a granule (1, 2 or 4 bytes: the narrowest shared access in the program)
typedef struct {
  u32 gen, wclk, wpc, seq;
  u16 wag;
  u8 wat, wr;
  u32 rmask[3], wm;
} Sh; // wm: other warps that stored the same value, unordered (replicated layouts do that; no race)
typedef struct {
  u32 addr, done;
} MbS;
#define MAXMB 128
static __thread Sh *SHD;
static __thread u32 *WCL, *RCL, *RPC, *VCL, *MBL;
static __thread u32 GEN, NW, NAG, NR, NMB;
static __thread MbS mbs[MAXMB];
static __thread u64 MSEQ;
static __thread MReg *LASTR;
static __thread u32 cpg[64], wgg[64], blg[64];
#define VC(w) (VCL + (u64)(w) * NAG)
static void rept(Ctx *c, u32 kind, u32 pc1, u32 ag1, u32 pc2, u32 ag2, u32 reg, u64 addr, u64 block2) {
  for (u32 i = 0; i < MN->nrep; i++) {
    Rep *r = &MN->rep[i];
    if (r->kind == kind && r->pc1 == pc1 && r->pc2 == pc2) {
      r->n++;
      return;
    }
  }
  if (MN->nrep < MN->maxrep) {
    Rep r = {kind, pc1, pc2, ag1, ag2, reg, 1, addr, c->wg, block2};
    MN->rep[MN->nrep++] = r;
  }
}
static void mon_begin(Ctx *c) {
  NW = c->nwarps;
  NAG = 4 * NW + MAXMB;
  NR = 3 * NW;
  GEN = 0;
  MSEQ = 0;
  LASTR = 0;
  SHD = 0;
  WCL = RCL = RPC = VCL = MBL = 0;
  if (MN->flags & (MF_RACE | MF_INIT)) {
    u64 g = c->smem_n / MN->sgran + 8;
    SHD = calloc(g, sizeof(Sh));
    if (MN->flags & MF_RACE) {
      RCL = calloc(g * NR, 4);
      WCL = calloc(g * NW, 4);
      RPC = calloc(g * NR, 4);
    }
    VCL = calloc((u64)NW * NAG, 4);
    MBL = calloc(2ull * MAXMB * NAG, 4);
  }
}
static void mon_end(void) {
  free(SHD);
  free(WCL);
  free(RCL);
  free(RPC);
  free(VCL);
  free(MBL);
  SHD = 0;
  WCL = RCL = RPC = VCL = MBL = 0;
}
static void mon_block(Ctx *c) {
  GEN++;
  NMB = 0;
  memset(cpg, 0, sizeof cpg);
  memset(wgg, 0, sizeof wgg);
  memset(blg, 0, sizeof blg);
  if (VCL) {
    memset(VCL, 0, 4ull * NW * NAG);
    memset(MBL, 0, 8ull * MAXMB * NAG);
    for (u32 w = 0; w < NW; w++) VC(w)[w] = 1;
  }
}
static void mon_bar(Ctx *c) {
  MN->blockbars++;
  if (!VCL) return;
  u32 *j = VC(0);
  for (u32 w = 1; w < NW; w++) {
    u32 *v = VC(w);
    for (u32 k = 0; k < NAG; k++)
      if (v[k] > j[k]) j[k] = v[k];
  }
  for (u32 w = 1; w < NW; w++) memcpy(VC(w), j, 4ull * NAG);
  for (u32 w = 0; w < NW; w++) VC(w)[w]++;
}
static inline Sh *shadow(u32 g) {
  Sh *s = &SHD[g];
  if (s->gen != GEN) {
    memset(s, 0, sizeof *s);
    s->gen = GEN;
  }
  return s;
}
static inline u32 ragent(int rk, u32 w) { return rk == 0 ? w : (rk + 1) * NW + w; }
// reads: rk 0 by the warp itself, 1 by its wgmma, 2 by its bulk store
static void sh_read(Ctx *c, u32 w, int rk, u64 a, u32 n, u32 pc) {
  if (!SHD || a + n > c->smem_n || !n) return;
  u32 gr = MN->sgran;
  u32 *v = VC(w);
  u32 clk = rk == 0 ? v[w] : rk == 1 ? wgg[w] + 1 : blg[w] + 1;
  for (u32 g = a / gr; g <= (a + n - 1) / gr; g++) {
    Sh *s = shadow(g);
    if (!s->wr) {
      if (MN->flags & MF_INIT) rept(c, K_UNINIT, pc, w, pc, w, 0, (u64)g * gr, c->wg);
    }
    if (RCL) {
      if (s->wat)
        for (u32 q = s->wm; q; q &= q - 1) {
          u32 x = __builtin_ctz(q);
          if (v[x] < WCL[(u64)g * NW + x]) {
            rept(c, K_RAW, s->wpc, x, pc, ragent(rk, w), 0, (u64)g * gr, c->wg);
            break;
          }
        }
      if (s->wr && v[s->wag] < s->wclk) {
        int ok = 0;
        if (!s->wat)
          for (u32 q = s->wm; q; q &= q - 1) {
            u32 x = __builtin_ctz(q);
            if (v[x] >= WCL[(u64)g * NW + x]) ok = 1;
          }
        if (!ok) rept(c, K_RAW, s->wpc, s->wag, pc, ragent(rk, w), 0, (u64)g * gr, c->wg);
      }
      u64 k = (u64)g * NR + rk * NW + w;
      RCL[k] = clk;
      RPC[k] = pc;
      s->rmask[rk] |= 1u << w;
    }
  }
}
static void sh_write(Ctx *c, u32 w, u32 wag, u32 clk, u64 a, u32 n, u32 pc, int at, const u8 *val) {
  if (!SHD || a + n > c->smem_n || !n) return;
  u32 gr = MN->sgran;
  u32 *v = VC(w);
  for (u32 g = a / gr; g <= (a + n - 1) / gr; g++) {
    Sh *s = shadow(g);
    if (RCL) {
      int same = val && s->wr && s->wag < NW && !s->wat &&
                 !memcmp(c->smem + (u64)g * gr, val + ((u64)g * gr - a), gr);
      if (s->wr && !(at && s->wat) && !(s->wpc == pc && s->wag == wag && s->seq == (u32)MSEQ) && !same) {
        u32 g1 = s->wag;
        if (v[s->wag] < s->wclk) rept(c, K_WAW, s->wpc, s->wag, pc, wag, 0, (u64)g * gr, c->wg);
        for (u32 q = s->wm; q; q &= q - 1) {
          u32 x = __builtin_ctz(q);
          if (v[x] < WCL[(u64)g * NW + x] && x != g1)
            rept(c, K_WAW, s->wpc, x, pc, wag, 0, (u64)g * gr, c->wg);
        }
      }
      if (same && v[s->wag] < s->wclk) {
        s->wm |= 1u << s->wag;
        WCL[(u64)g * NW + s->wag] = s->wclk;
      } else if (at && s->wr && s->wat && s->wag < NW) {
        if (s->wag != w && v[s->wag] < s->wclk) {
          s->wm |= 1u << s->wag;
          WCL[(u64)g * NW + s->wag] = s->wclk;
        }
        s->wm &= ~(1u << w);
      } else
        s->wm = 0;
      for (int rk = 0; rk < 3; rk++)
        for (u32 q = s->rmask[rk]; q; q &= q - 1) {
          u32 r = __builtin_ctz(q), ag = ragent(rk, r);
          u64 k = (u64)g * NR + rk * NW + r;
          if (RCL[k] > v[ag] && !same) rept(c, K_WAR, RPC[k], ag, pc, wag, 0, (u64)g * gr, c->wg);
        }
      if (!same) s->rmask[0] = s->rmask[1] = s->rmask[2] = 0;
    } else if (at && !s->wr && (MN->flags & MF_INIT))
      ;
    s->wclk = clk;
    s->wpc = pc;
    s->seq = (u32)MSEQ;
    s->wag = wag;
    s->wat = at;
    s->wr = 1;
  }
}
// mbarriers: L = clock released by the arrivals of the phase under way, then (second half of MBL) of the
// completed ones
static int mb_slot(u32 a) {
  for (u32 i = 0; i < NMB; i++)
    if (mbs[i].addr == a) return i;
  if (NMB == MAXMB) bad(UNSUP, a);
  mbs[NMB].addr = a;
  mbs[NMB].done = 0;
  return NMB++;
}
static void joinv(u32 *d, u32 *s) {
  for (u32 k = 0; k < NAG; k++)
    if (s[k] > d[k]) d[k] = s[k];
}
static void mon_phase(u32 a) {
  if (!VCL) return;
  int i = mb_slot(a);
  mbs[i].done++;
  joinv(MBL + (u64)(MAXMB + i) * NAG, MBL + (u64)i * NAG);
}
static void mon_acquire(Ctx *c, Warp *w, Ins *I, u32 m) {
  if (!VCL) return;
  u32 wi = w - c->warps;
  for (int l = 0; l < 32; l++)
    if (m >> l & 1) {
      u64 a = areg(I, w->R, l);
      if (a >= SHWIN) a -= SHWIN;
      int i = mb_slot(a);
      joinv(VC(wi), MBL + (u64)(MAXMB + i) * NAG);
      VC(wi)[4 * NW + i] = mbs[i].done;
    }
}
