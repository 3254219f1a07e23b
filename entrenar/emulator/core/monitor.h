// Counters and checks of one instruction. Everything here runs only when Ctx.mon is set.
static void tma_mon(Ctx *c, Warp *w, Ins *I, u32 m, int load) {
  u8 *R = w->R;
  u32 *X = c->extra + I->x, pc = I - c->prog, wi = w - c->warps;
  for (int l = 0; l < 32; l++)
    if (m >> l & 1) {
      TMap t;
      memcpy(&t, (u8 *)((u64 *)(R + I->b))[l], 128);
      u32 es = tm_es(&t), rank = t.rank1 + 1;
      if (!es || rank > 5 || rank != I->n) return;
      u32 dst = (u32)areg(I, R, l);
      s64 co[5] = {0};
      for (u32 i = 0; i < rank; i++) co[i] = ((s32 *)(R + X[i]))[l];
      int mode = t.swizzle == 3 ? 1 : t.swizzle == 2 ? 2 : t.swizzle == 1 ? 3 : 0;
      u32 rows = 1;
      for (u32 d = 1; d < rank; d++) rows *= t.box[d];
      u32 tot = rows * t.box[0] * es;
      int slot = load ? mb_slot(((u32 *)(R + I->c))[l]) : 0;
      if (load && SHD) sh_read(c, wi, 0, ((u32 *)(R + I->c))[l], 8, pc);
      if (SHD)
        for (u32 i = 0; i < tot; i += 16) {
          u32 a = swz(dst + i, mode), k = tot - i < 16 ? tot - i : 16;
          if (load)
            sh_write(c, wi, 4 * NW + slot, mbs[slot].done + 1, a, k, pc, 0, 0);
          else
            sh_read(c, wi, 2, a, k, pc);
        }
      u64 want = 0;
      IM *im = &MN->im[pc];
      u64 r0 = im->req;
      for (u32 q = 0; q < rows; q++) {
        u32 r = q;
        u64 ga = t.base;
        int in = 1;
        for (u32 d = 1; d < rank; d++) {
          s64 x = co[d] + r % t.box[d];
          r /= t.box[d];
          if (x < 0 || x >= t.gdim[d]) in = 0;
          ga += x * t.gstride[d - 1];
        }
        s64 x0 = co[0] < 0 ? 0 : co[0], x1 = co[0] + t.box[0];
        if (x1 > t.gdim[0]) x1 = t.gdim[0];
        if (in && x1 > x0) {
          g_add(ga + x0 * es, (x1 - x0) * es);
          want = (x1 - x0) * es;
          g_done(c, pc, load ? 0 : 1, want);
        }
      }
      im->req = r0 + 1;
    }
}
static void wg_reads(Ctx *c, u32 wi, Ins *I, u64 d, int rows, int r0, int K, int tr, int es) {
  u32 pc = I - c->prog;
  int st = 16 / es;
  if (!tr) {
    for (int i = 0; i < rows; i++)
      for (int k = 0; k < K; k += st) sh_read(c, wi, 1, wg_elem(c, d, r0 + i, k, 0, es) - c->smem, 16, pc);
  } else
    for (int k = 0; k < K; k++)
      for (int i = 0; i < rows; i += st) sh_read(c, wi, 1, wg_elem(c, d, r0 + i, k, 1, es) - c->smem, 16, pc);
}
static inline int mspace(int sp, u64 *a) {
  if (sp) return sp;
  if (*a >= LOCWIN && *a < LOCWIN + (1ull << 40)) {
    *a -= LOCWIN;
    return 3;
  }
  if (*a >= SHWIN && *a < SHWIN + (1ull << 40)) {
    *a -= SHWIN;
    return 2;
  }
  return 1;
}
static void mon_ins(Ctx *c, Warp *w, Ins *I, u32 m) {
  u32 pc = I - c->prog, wi = w - c->warps;
  IM *im = &MN->im[pc];
  u8 *R = w->R;
  u64 ad[32];
  MSEQ++;
  im->cnt++;
  im->lanes += __builtin_popcount(m);
  if (!m) return;
  switch (I->op) {
  case OP_LD:
  case OP_ST:
  case OP_ATOM: {
    int isat = I->op == OP_ATOM, ld = I->op == OP_LD;
    if (!isat && (I->k0 >> 24 & 1)) return;
    int sp = I->k0 & 255;
    u32 by = (I->k0 >> 8 & 255) * (isat ? 1 : I->n), ms = 0;
    u64 want = 0;
    nse = 0;
    u32 *v = VCL ? VC(wi) : 0;
    for (int l = 0; l < 32; l++)
      if (m >> l & 1) {
        u64 a = areg(I, R, l);
        int s = mspace(sp, &a);
        if (a & (by - 1) && by <= 16) return;
        if (s == 1) {
          g_bounds(c, a, by, pc);
          g_add(a, by);
          want += by;
        } else if (s == 2) {
          ad[l] = a;
          ms |= 1u << l;
          if (SHD) {
            if (ld)
              sh_read(c, wi, 0, a, by, pc);
            else {
              if (isat && (MN->flags & MF_INIT) && a + by <= c->smem_n && !shadow(a / MN->sgran)->wr)
                rept(c, K_UNINIT, pc, wi, pc, wi, 0, a, c->wg);
              u8 vb[64];
              if (!isat) {
                int e = I->k0 >> 8 & 255;
                u32 *X = c->extra + I->x;
                for (int i = 0; i < I->n; i++) {
                  u64 x = getreg(R, X[2 * i], X[2 * i + 1], l);
                  memcpy(vb + e * i, &x, e);
                }
              }
              sh_write(c, wi, wi, v[wi], a, by, pc, isat, isat ? 0 : vb);
            }
          }
        }
      }
    if (ms) {
      im->req++;
      im->bytes += (u64)by * __builtin_popcount(ms);
      if (MN->flags & MF_CNT) s_wave(im, ad, ms, by);
    }
    g_done(c, pc, isat ? 2 : ld ? 0 : 1, want);
  } break;
  case OP_CPASYNC: {
    u64 want = 0;
    nse = 0;
    for (int l = 0; l < 32; l++)
      if (m >> l & 1) {
        u64 a = areg(I, R, l);
        mspace(2, &a);
        if (a >= SHWIN) a -= SHWIN;
        ad[l] = a;
        u32 n = I->c == NOP_ ? I->k0 : ((u32 *)(R + I->c))[l];
        if (n > I->k0) n = I->k0;
        if (n) {
          g_bounds(c, ((u64 *)(R + I->b))[l] + (s32)I->k1, n, pc);
          g_add(((u64 *)(R + I->b))[l] + (s32)I->k1, n);
        }
        want += n;
        if (SHD) sh_write(c, wi, NW + wi, cpg[wi] + 1, a, I->k0, pc, 0, 0);
      }
    if (MN->flags & MF_CNT) s_wave(im, ad, m, I->k0);
    if (!nse) im->req++;
    g_done(c, pc, 0, want);
  } break;
  case OP_CPCOMMIT: cpg[wi]++; break;
  case OP_CPWAITALL:
    cpg[wi]++;
    if (VCL) VC(wi)[NW + wi] = cpg[wi];
    break;
  case OP_CPWAIT:
    if (VCL && cpg[wi] > I->k0 && VC(wi)[NW + wi] < cpg[wi] - I->k0) VC(wi)[NW + wi] = cpg[wi] - I->k0;
    break;
  case OP_NOP:
    switch (I->k0) {
    case 1: wgg[wi]++; break;
    case 3: blg[wi]++; break;
    case 2:
    case 4:
      if (VCL) {
        u32 g = I->k0 == 2 ? wgg[wi] : blg[wi], k = (I->k0 == 2 ? 2 : 3) * NW + wi;
        if (g > I->k1 && VC(wi)[k] < g - I->k1) VC(wi)[k] = g - I->k1;
      }
      break;
    }
    break;
  case OP_LDMATRIX:
  case OP_STMATRIX:
    if (m != FULL) return;
    for (int i = 0; i < I->n; i++) {
      for (int r = 0; r < 8; r++) {
        u64 a = areg(I, R, i * 8 + r);
        if (a >= SHWIN) a -= SHWIN;
        ad[r] = a;
        if (SHD) {
          if (I->op == OP_LDMATRIX)
            sh_read(c, wi, 0, a, 16, pc);
          else {
            u32 *X = c->extra + I->x;
            u16 row[8];
            for (int k = 0; k < 8; k++) {
              u32 v = ((u32 *)(R + X[2 * i]))[I->k0 ? k * 4 + (r >> 1) : r * 4 + (k >> 1)];
              row[k] = (I->k0 ? r & 1 : k & 1) ? v >> 16 : v;
            }
            sh_write(c, wi, wi, VC(wi)[wi], a, 16, pc, 0, (u8 *)row);
          }
        }
      }
      if (MN->flags & MF_CNT) s_wave(im, ad, 0xff, 16);
    }
    im->req++;
    im->bytes += 128 * I->n;
    break;
  case OP_WGMMA:
    if (m != FULL || !SHD) return;
    {
      u32 *X = c->extra + I->x;
      int ta = I->k0 & 15, tb = I->k0 >> 4, N = I->k1 & 0xffff, ar = I->k1 >> 17 & 1,
          es = ta < 2    ? 2
               : ta == 2 ? 4
                         : 1,
          K = 32 / es;
      (void)tb;
      if (!ar) wg_reads(c, wi, I, ((u64 *)(R + X[I->n]))[0], 64, 0, K, I->k2 & 1, es);
      wg_reads(c, wi, I, ((u64 *)(R + X[I->n + (ar ? 4 : 1)]))[0], N, 0, K, I->k2 >> 1 & 1, es);
    }
    break;
  case OP_MBAR:
    if (VCL)
      for (int l = 0; l < 32; l++)
        if (m >> l & 1) {
          u64 a = areg(I, R, l);
          if (a >= SHWIN) a -= SHWIN;
          int i = mb_slot(a);
          if (I->k0 == MB_INIT || I->k0 == MB_INVAL)
            sh_write(c, wi, wi, VC(wi)[wi], a, 8, pc, 0, 0);
          else
            sh_read(c, wi, 0, a, 8, pc);
          if (I->k0 == MB_ARRIVE || I->k0 == MB_ARRIVE_TX) {
            joinv(MBL + (u64)i * NAG, VC(wi));
          }
        }
    if (VCL) VC(wi)[wi]++;
    break;
  case OP_TRYWAIT:
    if (SHD)
      for (int l = 0; l < 32; l++)
        if (m >> l & 1) {
          u64 a = areg(I, R, l);
          if (a >= SHWIN) a -= SHWIN;
          sh_read(c, wi, 0, a, 8, pc);
          break;
        }
    break;
  case OP_TMALD: tma_mon(c, w, I, m, 1); break;
  case OP_TMAST: tma_mon(c, w, I, m, 0); break;
  case OP_TMREP:
    if (SHD && (I->k2 >> 1) == 2)
      for (int l = 0; l < 32; l++)
        if (m >> l & 1) {
          u64 a = areg(I, R, l);
          if (a >= SHWIN) a -= SHWIN;
          sh_write(c, wi, wi, VC(wi)[wi], a, 128, pc, 0, 0);
        }
    break;
  case OP_TMCP:
    if (SHD)
      for (int l = 0; l < 32; l++)
        if (m >> l & 1) {
          u64 a = areg(I, R, l);
          if (a >= SHWIN) a -= SHWIN;
          sh_read(c, wi, 0, a, 128, pc);
          break;
        }
    break;
  default: break;
  }
}
// after a store: does every lane find its own value? (two lanes of one instruction, same address, different
// values)
static void mon_st_post(Ctx *c, Warp *w, Ins *I, u32 m) {
  if (!(MN->flags & (MF_RACE | MF_GRACE))) return;
  u8 *R = w->R;
  int sp = I->k0 & 255, by = I->k0 >> 8 & 255, n = I->n;
  u32 *X = c->extra + I->x, pc = I - c->prog;
  for (int l = 0; l < 32; l++)
    if (m >> l & 1) {
      u64 a = areg(I, R, l);
      u64 a2 = a;
      int s = mspace(sp, &a2);
      if (s == 3 || !(MN->flags & (s == 2 ? MF_RACE : MF_GRACE))) continue;
      u8 *p = addr_of(c, w, sp, l, a, by * n, by * n);
      for (int i = 0; i < n; i++) {
        u64 v = getreg(R, X[2 * i], X[2 * i + 1], l);
        if (memcmp(p + by * i, &v, by)) {
          MReg *r = s == 1 ? mreg(a) : 0;
          rept(c, s == 2 ? K_LANES : K_GLANES, pc, w - c->warps, pc, l, r ? r - MN->reg : 0,
               s == 2 ? a2
               : r    ? a - r->lo
                      : a,
               c->wg);
          break;
        }
      }
    }
}
