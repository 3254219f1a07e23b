// cp.async. With late_async the bytes move when the group is waited for, as late as hardware may move them, so that
// a missing wait reads what was there before.
static void cp_do(Ctx *c, Warp *w, Cp *q) {
  u8 *d = addr_of(c, w, 2, q->lane, q->dst, q->size, q->size);
  if (q->srcsize) memcpy(d, (u8 *)q->src, q->srcsize);
  if (q->srcsize < q->size) memset(d + q->srcsize, 0, q->size - q->srcsize);
}
// cp.async: a=dst shared (reg), b=src, k0=size, c = srcsize reg or NOP_, imm = dst offset, k1 = src offset,
// k2 bit0: dst reg is 64-bit
static void do_cp(Ctx *c, Warp *w, Ins *I, u32 m) {
  u8 *R = w->R;
  for (int l = 0; l < 32; l++)
    if (m >> l & 1) {
      Cp q = {areg(I, R, l),
              ((u64 *)(R + I->b))[l] + (s32)I->k1,
              I->k0,
              I->c == NOP_ ? I->k0 : ((u32 *)(R + I->c))[l],
              l,
              0};
      if (q.srcsize > q.size) q.srcsize = q.size;
      if (q.srcsize && q.src & (q.size - 1)) bad(MISALIGNED, q.src);
      // What cannot be read faults here, at the copy, and not at the wait where the bytes move.
      if (q.srcsize) (void)*(volatile u8 *)q.src, (void)*(volatile u8 *)(q.src + q.srcsize - 1);
      if (!c->late_async)
        cp_do(c, w, &q);
      else {
        if (w->ncp == w->cap) {
          w->cap = w->cap ? 2 * w->cap : 4096;
          w->cp = realloc(w->cp, w->cap * sizeof(Cp));
        }
        w->cp[w->ncp++] = q;
      }
    }
}
static void cp_wait(Ctx *c, Warp *w, u32 keep) {
  if (!c->late_async) return;
  u32 g = w->ngrp > keep ? w->ngrp - keep : 0;
  if (!g) return;
  u32 end = w->grp_end[g - 1];
  for (u32 i = 0; i < end; i++) cp_do(c, w, &w->cp[i]);
  memmove(w->cp, w->cp + end, (w->ncp - end) * sizeof(Cp));
  w->ncp -= end;
  for (u32 i = g; i < w->ngrp; i++) w->grp_end[i - g] = w->grp_end[i] - end;
  w->ngrp -= g;
}
