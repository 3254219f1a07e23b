// Global accesses of one request as 32-byte sectors with a mask of bytes, and shared ones as bank wavefronts.
// global accesses of one request, as sectors with a mask of bytes
typedef struct {
  MReg *r;
  u64 s;
  u32 m;
} SE;
static __thread SE se[1024];
static __thread int nse;
static MReg *mreg(u64 a) {
  if (LASTR && a - LASTR->lo < LASTR->n) return LASTR;
  for (u32 i = 0; i < MN->nreg; i++)
    if (a - MN->reg[i].lo < MN->reg[i].n) return LASTR = &MN->reg[i];
  return 0;
}
// An access between the last byte of an argument and its guard page, or before its first byte.
static void g_bounds(Ctx *c, u64 a, u64 n, u32 pc) {
  MReg *r = mreg(a);
  if (r && a - r->lo + n <= r->n) return;
  for (u32 i = 0; i < MN->nreg; i++) {
    MReg *q = &MN->reg[i];
    if (a - q->mlo < q->mn) {
      rept(c, K_BOUNDS, pc, 0, pc, 0, i, a - q->lo, n);
      return;
    }
  }
}
static void g_add(u64 a, u64 n) {
  MReg *r = mreg(a);
  u64 o = r ? a - r->lo : a;
  if (r && o + n > r->n) n = r->n - o;
  while (n) {
    u32 b = o & 31, k = n < 32 - b ? n : 32 - b;
    u32 mk = (k == 32 ? ~0u : ((1u << k) - 1)) << b;
    u64 s = o >> 5;
    int i = nse - 1;
    while (i >= 0 && !(se[i].s == s && se[i].r == r)) i--;
    if (i >= 0)
      se[i].m |= mk;
    else if (nse < 1024)
      se[nse++] = (SE){r, s, mk};
    o += k;
    n -= k;
  }
}
static void g_race(Ctx *c, SE *e, u32 pc, int kind) {
  u32 gg = MN->ggran, me = c->wg + 1, rg = e->r - MN->reg;
  for (u32 b = 0; b < 32; b += gg) {
    if (!(e->m >> b & 1)) continue;
    u32 *q = e->r->gr + 6 * ((e->s * 32 + b) / gg);
    u64 ad = e->s * 32 + b; // w,wpc, a,apc, r,rpc
    if (kind == 0) {
      if (q[0] && q[0] != me) rept(c, K_GWR, q[1], 0, pc, 0, rg, ad, q[0] - 1);
      if (q[4] != me) {
        q[4] = q[4] ? ~0u : me;
        q[5] = pc;
      }
    } else if (kind == 2) {
      if (q[0] && q[0] != me) rept(c, K_GWA, q[1], 0, pc, 0, rg, ad, q[0] - 1);
      if (q[2] != me) {
        q[2] = q[2] ? ~0u : me;
        q[3] = pc;
      }
    } else {
      if (q[0] && q[0] != me) rept(c, K_GWW, q[1], 0, pc, 0, rg, ad, q[0] - 1);
      if (q[4] && q[4] != me) rept(c, K_GRW, q[5], 0, pc, 0, rg, ad, q[4] - 1);
      if (q[2] && q[2] != me) rept(c, K_GWA, q[3], 0, pc, 0, rg, ad, q[2] - 1);
      q[0] = me;
      q[1] = pc;
    }
  }
}
static u64 g_new(Ctx *c, u32 *bits, u32 *block, u64 s, u32 m) { // bytes that the block had not touched
  if (block[s] != (u32)c->wg + 1) block[s] = (u32)c->wg + 1, bits[s] = 0;
  u32 fresh = m & ~bits[s];
  bits[s] |= m;
  return __builtin_popcount(fresh);
}
static void g_done(Ctx *c, u32 pc, int kind, u64 want) {
  if (!nse) return;
  IM *im = &MN->im[pc];
  u32 f = MN->flags, dist = 0;
  for (int i = 0; i < nse; i++) {
    SE *e = &se[i];
    dist += __builtin_popcount(e->m);
    if (!e->r) continue;
    if (f & MF_CNT) {
      if (kind != 1) {
        e->r->ld[e->s] |= e->m;
        e->r->rld += __builtin_popcount(e->m);
        e->r->pld += g_new(c, e->r->bld, e->r->gld, e->s, e->m);
      }
      if (kind != 0) {
        e->r->st[e->s] |= e->m;
        e->r->rst += __builtin_popcount(e->m);
        e->r->pst += g_new(c, e->r->bst, e->r->gst, e->s, e->m);
      }
    }
    if ((f & MF_INIT) && e->r->valid) {
      u32 b = e->m & ~e->r->valid[e->s];
      if (kind != 1 && b)
        rept(c, K_GUNINIT, pc, 0, pc, 0, e->r - MN->reg, e->s * 32 + __builtin_ctz(b), c->wg);
      if (kind != 0) e->r->valid[e->s] |= e->m;
    }
    if ((f & MF_GRACE) && e->r->gr) g_race(c, e, pc, kind);
  }
  im->req++;
  im->bytes += want;
  im->sect += nse;
  im->ideal += (dist + 31) / 32;
  nse = 0;
}
// bank wavefronts: up to 4 bytes a lane all lanes at once, 8 by half warps, 16 by quarters
static void s_wave(IM *im, const u64 *ad, u32 m, u32 by) {
  int gl = by <= 4 ? 32 : by == 8 ? 16 : by == 16 ? 8 : 4;
  u32 words = by < 4 ? 1 : by / 4;
  for (int g = 0; g < 32; g += gl) {
    u32 mm = gl == 32 ? m : (m >> g) & ((1u << gl) - 1);
    if (!mm) continue;
    u32 bw[32][32];
    u8 n[32];
    memset(n, 0, 32);
    u32 mx = 0;
    for (int l = 0; l < gl; l++)
      if (mm >> l & 1)
        for (u32 k = 0; k < words; k++) {
          u32 wd = (u32)(ad[g + l] >> 2) + k, b = wd & 31;
          u32 j = 0;
          while (j < n[b] && bw[b][j] != wd) j++;
          if (j == n[b] && j < 32) {
            bw[b][n[b]++] = wd;
            if (n[b] > mx) mx = n[b];
          }
        }
    im->wave += mx;
    im->wideal++;
  }
}
