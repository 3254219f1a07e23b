// Tensor maps, TMA copies and mbarriers. A map is 128 bytes in a format of our own, written by the launcher or by
// tensormap.replace.
typedef struct {
  u64 base;
  u32 gdim[5], box[5];
  u64 gstride[4];
  u32 rank1, swizzle, es, fill, elemtype, estride[5], pad[2];
} TMap;
_Static_assert(sizeof(TMap) == 128, "tensor map");
typedef struct {
  TMap t;
  u32 dst, mbar;
  s32 c[5];
  u32 pad;
} TmaQ;
static __thread TmaQ tq[256];
static __thread u32 ntq, nyield;
struct Mon_;
static __thread struct Mon_ *MN;
static void mon_phase(u32 addr);
// mbarrier word: phase | pending<<1 (15) | count<<16 (15) ; high half: transaction bytes outstanding
static void mb_check(u64 *p) {
  u32 lo = (u32)*p;
  s32 tx = (s32)(*p >> 32);
  if (((lo >> 1) & 0x7fff) == 0 && tx == 0) {
    u32 cnt = (lo >> 16) & 0x7fff;
    lo = ((lo & 1) ^ 1) | (cnt << 1) | (cnt << 16);
    nyield = 0;
    if (MN) mon_phase((u32)((u8 *)p - G->smem));
  }
  *p = ((u64)(u32)tx << 32) | lo;
}
static void mb_tx(u64 *p, s32 d) { *p = ((u64)(u32)((s32)(*p >> 32) + d) << 32) | (u32)*p; }
static u32 tm_es(TMap *t) {
  static const u8 z[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4};
  return t->es ? t->es : t->elemtype < 13 ? z[t->elemtype] : 0;
}
static void tma_copy(Ctx *c, TMap *t, u32 smem, s32 *co, int load) {
  u32 es = tm_es(t), rank = t->rank1 + 1,
      mode = t->swizzle == 3   ? 1
             : t->swizzle == 2 ? 2
             : t->swizzle == 1 ? 3
                               : 0;
  if (!es || rank > 5) bad(UNSUP, 0);
  u32 n = 1;
  for (u32 d = 0; d < rank; d++) n *= t->box[d];
  if (smem & (mode == 1 ? 127 : mode == 2 ? 63 : mode == 3 ? 31 : 15)) bad(MISALIGNED, smem);
  for (u32 i = 0; i < n; i++) {
    u32 r = i;
    u64 ga = t->base;
    int in = 1;
    for (u32 d = 0; d < rank; d++) {
      s64 x = (s64)co[d] + r % t->box[d];
      r /= t->box[d];
      if (x < 0 || x >= t->gdim[d]) in = 0;
      ga += d ? x * t->gstride[d - 1] : x * es;
    }
    u32 a = swz(smem + i * es, mode);
    if (a + es > c->smem_n) bad(SMEM_OOB, a);
    if (load) {
      if (in)
        memcpy(c->smem + a, (u8 *)ga, es);
      else {
        u32 nan = t->fill ? (es == 2 ? 0x7fff7fffu : 0x7fffffffu) : 0;
        memcpy(c->smem + a, &nan, es < 4 ? es : 4);
        if (es == 8) memset(c->smem + a + 4, 0, 4);
      }
    } else if (in)
      memcpy((u8 *)ga, c->smem + a, es);
  }
}
static void tma_run(Ctx *c, TmaQ *q) {
  tma_copy(c, &q->t, q->dst, q->c, 1);
  u32 n = tm_es(&q->t);
  for (u32 d = 0; d <= q->t.rank1; d++) n *= q->t.box[d];
  u64 *p = (u64 *)(c->smem + q->mbar);
  mb_tx(p, -(s32)n);
  mb_check(p);
}
// a = shared address (imm), b = map address register, c = mbarrier register ; extra: coordinates ; k1 = map
// offset
static void do_tma(Ctx *c, Warp *w, Ins *I, u32 m, int load) {
  u8 *R = w->R;
  u32 *X = c->extra + I->x;
  for (int l = 0; l < 32; l++)
    if (m >> l & 1) {
      TmaQ q;
      memset(&q, 0, sizeof q);
      memcpy(&q.t, (u8 *)((u64 *)(R + I->b))[l], 128);
      q.dst = (u32)areg(I, R, l);
      for (int i = 0; i < I->n; i++) q.c[i] = ((s32 *)(R + X[i]))[l];
      if (q.t.rank1 + 1 != I->n) bad(UNSUP, 0);
      if (!load)
        tma_copy(c, &q.t, q.dst, q.c, 0);
      else {
        q.mbar = ((u32 *)(R + I->c))[l];
        if (q.mbar + 8 > c->smem_n || q.mbar & 7) bad(SMEM_OOB, q.mbar);
        if (c->late_async && ntq < 256)
          tq[ntq++] = q;
        else
          tma_run(c, &q);
      }
    }
}
static void tma_flush(Ctx *c) {
  for (u32 i = 0; i < ntq; i++) tma_run(c, &tq[i]);
  ntq = 0;
}
enum { MB_INIT, MB_ARRIVE, MB_ARRIVE_TX, MB_EXPECT, MB_INVAL };
static void do_mbar(Ctx *c, Warp *w, Ins *I, u32 m) {
  u8 *R = w->R;
  for (int l = 0; l < 32; l++)
    if (m >> l & 1) {
      u64 *p = (u64 *)addr_of(c, w, 2, l, areg(I, R, l), 8, 8);
      u32 v = I->b == NOP_ ? 1 : ((u32 *)(R + I->b))[l];
      switch (I->k0) {
      case MB_INIT: *p = (u64)((v << 1) | (v << 16)); break;
      case MB_ARRIVE:
        *p = (*p & ~0xfffeull) | ((((*p >> 1) - v) & 0x7fff) << 1);
        mb_check(p);
        break;
      case MB_ARRIVE_TX:
        mb_tx(p, v);
        *p = (*p & ~0xfffeull) | ((((*p >> 1) - 1) & 0x7fff) << 1);
        mb_check(p);
        break;
      case MB_EXPECT: mb_tx(p, v); break;
      case MB_INVAL: break;
      }
    }
}
static int do_trywait(Ctx *c, Warp *w, Ins *I, u32 m) {
  u8 *R = w->R;
  u32 ok = 0;
  for (int t = 0; t < 2; t++) {
    ok = 0;
    for (int l = 0; l < 32; l++)
      if (m >> l & 1) {
        u64 *p = (u64 *)addr_of(c, w, 2, l, areg(I, R, l), 8, 8);
        u32 par = ((u32 *)(R + I->b))[l] & 1;
        if ((*p & 1) != par) ok |= 1u << l;
      }
    if (ok == m || !ntq) break;
    tma_flush(c);
  }
  u32 *q = (u32 *)(R + I->d);
  *q = (*q & ~m) | ok;
  return ok == m;
}
static void do_tmrep(Ctx *c, Warp *w, Ins *I, u32 m) {
  u8 *R = w->R;
  for (int l = 0; l < 32; l++)
    if (m >> l & 1) {
      TMap *t = (TMap *)addr_of(c, w, I->k2 >> 1, l, areg(I, R, l), 128, 64);
      u64 v = I->k1 == 64 ? ((u64 *)(R + I->b))[l] : ((u32 *)(R + I->b))[l];
      u32 o = I->n;
      switch (I->k0) {
      case 0: t->base = v; break;
      case 1: t->rank1 = v; break;
      case 2: t->box[o] = v; break;
      case 3: t->gdim[o] = v; break;
      case 4: t->gstride[o] = v; break;
      case 5:
        t->estride[o] = v;
        if (v != 1) bad(UNSUP, 0);
        break;
      case 6:
        t->elemtype = v;
        t->es = 0;
        break;
      case 7:
        if (v) bad(UNSUP, 0);
        break;
      case 8: t->swizzle = v; break;
      case 9: t->fill = v; break;
      }
    }
}
