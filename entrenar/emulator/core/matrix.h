// Matrix instructions: ldmatrix, stmatrix, mma.sync, wgmma. Products accumulate in float32 by fused multiply-add in
// the order of k, one rounding a term; hardware sums a few products before it rounds, in an order it does not
// state, so results may differ by about K units in the last place of the largest partial sum. tf32 operands are
// truncated to 10 bits. wgmma computes at issue, each warp the 16 rows that are its own.
// ldmatrix: n matrices, k0 = trans
static void do_ldmatrix(Ctx *c, Warp *w, Ins *I) {
  u8 *R = w->R;
  u32 *X = c->extra + I->x;
  u16 M[4][8][8];
  for (int i = 0; i < I->n; i++)
    for (int r = 0; r < 8; r++)
      memcpy(M[i][r], addr_of(c, w, 2, i * 8 + r, areg(I, R, i * 8 + r), 16, 16), 16);
  for (int i = 0; i < I->n; i++)
    for (int l = 0; l < 32; l++) {
      u32 v = I->k0 ? h2(M[i][(l & 3) * 2][l >> 2], M[i][(l & 3) * 2 + 1][l >> 2])
                    : h2(M[i][l >> 2][(l & 3) * 2], M[i][l >> 2][(l & 3) * 2 + 1]);
      ((u32 *)(R + X[2 * i]))[l] = v;
    }
}
// mma: extra: regs of D, A, B, C ; k0 kind ; k1 D/C f16?
enum {
  M_F16K16,
  M_BF16K16,
  M_TF32K8,
  M_F16K8,
  M_BF16K8,
  M_S8K32,
  M_S8K16,
  M_U8K32,
  M_F64,
  M_TF32K4,
  M_E4K32,
  M_E5K32,
  M_E4E5K32,
  M_E5E4K32
};
static void do_mma(Ctx *c, Warp *w, Ins *I) {
  u8 *R = w->R;
  u32 *X = c->extra + I->x;
  int kind = I->k0, nd = I->n;
  static const int NA[] = {4, 4, 4, 2, 2, 4, 2, 4, 1, 2, 4, 4, 4, 4},
                   NB[] = {2, 2, 2, 1, 1, 2, 1, 2, 1, 1, 2, 2, 2, 2};
  u32 *A = X + nd, *B = A + NA[kind], *C = B + NB[kind];
#define RG(o, l) (((u32 *)(R + (o)))[l])
  if (kind == M_F64) {
    f64 a[8][4], b[4][8], cc[8][8];
    for (int l = 0; l < 32; l++) {
      a[l >> 2][l & 3] = ((f64 *)(R + A[0]))[l];
      b[l & 3][l >> 2] = ((f64 *)(R + B[0]))[l];
      for (int i = 0; i < 2; i++) cc[l >> 2][(l & 3) * 2 + i] = ((f64 *)(R + C[i]))[l];
    }
    for (int i = 0; i < 8; i++)
      for (int j = 0; j < 8; j++)
        for (int k = 0; k < 4; k++) cc[i][j] = fma(a[i][k], b[k][j], cc[i][j]);
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 2; i++) ((f64 *)(R + X[i]))[l] = cc[l >> 2][(l & 3) * 2 + i];
    return;
  }
  f32 a[16][32], b[32][8], acc[16][8];
  s32 ia[16][32], ib[32][8], iacc[16][8];
  int K;
  int isint = kind == M_S8K32 || kind == M_S8K16 || kind == M_U8K32, fp8 = kind >= M_E4K32;
  if (isint || fp8) {
    K = kind == M_S8K16 ? 16 : 32;
    for (int l = 0; l < 32; l++) {
      int g = l >> 2, t = l & 3;
      for (int r = 0; r < NA[kind]; r++) {
        u32 v = RG(A[r], l);
        for (int i = 0; i < 4; i++) {
          u8 q = v >> (8 * i);
          int row = g + 8 * (r & 1), k = t * 4 + i + 16 * (r >> 1);
          if (isint)
            ia[row][k] = kind == M_U8K32 ? q : (s8)q;
          else
            a[row][k] = (kind == M_E4K32 || kind == M_E4E5K32) ? e4m3(q) : e5m2(q);
        }
      }
      for (int r = 0; r < NB[kind]; r++) {
        u32 v = RG(B[r], l);
        for (int i = 0; i < 4; i++) {
          u8 q = v >> (8 * i);
          int k = t * 4 + i + 16 * r;
          if (isint)
            ib[k][g] = kind == M_U8K32 ? q : (s8)q;
          else
            b[k][g] = (kind == M_E4K32 || kind == M_E5E4K32) ? e4m3(q) : e5m2(q);
        }
      }
    }
  } else if (kind == M_TF32K8 || kind == M_TF32K4) {
    K = kind == M_TF32K8 ? 8 : 4;
    for (int l = 0; l < 32; l++) {
      int g = l >> 2, t = l & 3;
      for (int r = 0; r < NA[kind]; r++) a[g + 8 * (r & 1)][t + 4 * (r >> 1)] = asf(RG(A[r], l) & ~0x1fffu);
      for (int r = 0; r < NB[kind]; r++) b[t + 4 * r][g] = asf(RG(B[r], l) & ~0x1fffu);
    }
  } else {
    K = (kind == M_F16K16 || kind == M_BF16K16) ? 16 : 8;
    int isb = kind == M_BF16K16 || kind == M_BF16K8;
    for (int l = 0; l < 32; l++) {
      int g = l >> 2, t = l & 3;
      for (int r = 0; r < NA[kind]; r++) {
        u32 v = RG(A[r], l);
        for (int i = 0; i < 2; i++) {
          u16 h = v >> (16 * i);
          a[g + 8 * (r & 1)][t * 2 + i + 8 * (r >> 1)] = isb ? bf(h) : (f32)ash(h);
        }
      }
      for (int r = 0; r < NB[kind]; r++) {
        u32 v = RG(B[r], l);
        for (int i = 0; i < 2; i++) {
          u16 h = v >> (16 * i);
          b[t * 2 + i + 8 * r][g] = isb ? bf(h) : (f32)ash(h);
        }
      }
    }
  }
  for (int l = 0; l < 32; l++) {
    int g = l >> 2, t = l & 3;
    for (int r = 0; r < 4; r++) {
      int row = g + 8 * (r >> 1), col = t * 2 + (r & 1);
      if (isint)
        iacc[row][col] = RG(C[r], l);
      else if (I->k1) {
        u32 v = RG(C[r >> 1], l);
        acc[row][col] = (f32)ash((u16)(v >> (16 * (r & 1))));
      } else
        acc[row][col] = asf(RG(C[r], l));
    }
  }
  if (isint && I->k2) {
    for (int i = 0; i < 16; i++)
      for (int j = 0; j < 8; j++) {
        s64 z = iacc[i][j];
        for (int k = 0; k < K; k++) z += (s64)ia[i][k] * ib[k][j];
        iacc[i][j] = z > INT32_MAX ? INT32_MAX : z < INT32_MIN ? INT32_MIN : (s32)z;
      }
  } else if (isint) {
    for (int i = 0; i < 16; i++)
      for (int k = 0; k < K; k++)
        for (int j = 0; j < 8; j++) iacc[i][j] = (s32)((u32)iacc[i][j] + (u32)(ia[i][k] * ib[k][j]));
  } else
    for (int i = 0; i < 16; i++)
      for (int k = 0; k < K; k++) {
        f32 x = a[i][k];
        for (int j = 0; j < 8; j++) acc[i][j] = __builtin_fmaf(x, b[k][j], acc[i][j]);
      }
  for (int l = 0; l < 32; l++) {
    int g = l >> 2, t = l & 3;
    if (isint)
      for (int r = 0; r < 4; r++) RG(X[r], l) = iacc[g + 8 * (r >> 1)][t * 2 + (r & 1)];
    else if (I->k1)
      for (int r = 0; r < 2; r++)
        RG(X[r], l) = h2(ashu((f16)acc[g + 8 * r][t * 2]), ashu((f16)acc[g + 8 * r][t * 2 + 1]));
    else
      for (int r = 0; r < 4; r++) RG(X[r], l) = asu(acc[g + 8 * (r >> 1)][t * 2 + (r & 1)]);
  }
}
// stmatrix: the inverse of ldmatrix
static void do_stmatrix(Ctx *c, Warp *w, Ins *I) {
  u8 *R = w->R;
  u32 *X = c->extra + I->x;
  u16 M[4][8][8];
  for (int i = 0; i < I->n; i++)
    for (int l = 0; l < 32; l++) {
      u32 v = ((u32 *)(R + X[2 * i]))[l];
      if (I->k0) {
        M[i][(l & 3) * 2][l >> 2] = v;
        M[i][(l & 3) * 2 + 1][l >> 2] = v >> 16;
      } else {
        M[i][l >> 2][(l & 3) * 2] = v;
        M[i][l >> 2][(l & 3) * 2 + 1] = v >> 16;
      }
    }
  for (int i = 0; i < I->n; i++)
    for (int r = 0; r < 8; r++)
      memcpy(addr_of(c, w, 2, i * 8 + r, areg(I, R, i * 8 + r), 16, 16), M[i][r], 16);
}
// wgmma: computed at issue, each warp its 16 rows. k0 = type (0 f16,1 bf16,2 tf32,3 s8,4 u8,5 e4m3,6 e5m2; a
// | b<<4), k1 = N | D is f16 <<16 | A in registers <<17 | satfinite <<18, k2 = transA | transB<<1 | negA<<2 |
// negB<<3 ; c = scale-d predicate ; extra: D regs, A regs (4) or 1 desc, B desc
static u32 swz(u32 a, int mode) {
  return mode == 1   ? a ^ ((a >> 3) & 0x70)
         : mode == 2 ? a ^ ((a >> 3) & 0x30)
         : mode == 3 ? a ^ ((a >> 3) & 0x10)
                     : a;
}
static u8 *wg_elem(Ctx *c, u64 d, int mn, int kb, int trans,
                   int es) { // mn row index, kb = k index (elements)
  u32 start = (d & 0x3fff) << 4, lbo = ((d >> 16) & 0x3fff) << 4, sbo = ((d >> 32) & 0x3fff) << 4;
  int mode = d >> 62;
  u32 a;
  int S = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 16;
  if ((d >> 49) & 7) bad(UNSUP, d);
  if (!trans) {
    u32 b = kb * es;
    if (mode)
      a = start + (mn >> 3) * sbo + (mn & 7) * S + b;
    else
      a = start + (mn >> 3) * sbo + (b >> 4) * lbo + (mn & 7) * 16 + (b & 15);
  } else {
    u32 b = mn * es;
    if (mode)
      a = start + (b / S) * lbo + (kb >> 3) * sbo + (kb & 7) * S + b % S;
    else
      a = start + (b >> 4) * sbo + (kb >> 3) * lbo + (kb & 7) * 16 + (b & 15);
  }
  a = swz(a, mode);
  if (a + es > c->smem_n) bad(SMEM_OOB, a);
  return c->smem + a;
}
static f32 el2f(int ty, u8 *p) {
  u16 h;
  u32 x;
  switch (ty) {
  case 0: memcpy(&h, p, 2); return (f32)ash(h);
  case 1: memcpy(&h, p, 2); return bf(h);
  case 2: memcpy(&x, p, 4); return asf(x & ~0x1fffu);
  case 3: return (s8)*p;
  case 4: return *p;
  case 5: return e4m3(*p);
  default: return e5m2(*p);
  }
}
static void do_wgmma(Ctx *c, Warp *w, Ins *I) {
  u8 *R = w->R;
  u32 *X = c->extra + I->x;
  int ta = I->k0 & 15, tb = I->k0 >> 4, N = I->k1 & 0xffff, df16 = I->k1 >> 16 & 1, areg_ = I->k1 >> 17 & 1,
      es = ta < 2    ? 2
           : ta == 2 ? 4
                     : 1,
      K = 32 / es, isint = ta == 3 || ta == 4;
  int wi = (int)(w - c->warps) & 3, nd = I->n;
  if ((s64)(w - c->warps) / 4 * 4 + 4 > c->nwarps) bad(UNSUP, 0);
  static __thread f32 A[16][32], B[32][256], acc[16][256];
  static __thread s32 iacc[16][256];
  if (areg_)
    for (int l = 0; l < 32; l++) {
      int g = l >> 2, t = l & 3;
      for (int r = 0; r < 4; r++) {
        u32 v = ((u32 *)(R + X[nd + r]))[l];
        int row = g + 8 * (r & 1), kh = r >> 1;
        for (int i = 0; i < 4 / es; i++) {
          u32 q = v >> (8 * es * i);
          u8 b[4];
          memcpy(b, &q, 4);
          A[row][t * (4 / es) + i + kh * (K / 2)] = el2f(ta, b);
        }
      }
    }
  else {
    u64 d = ((u64 *)(R + X[nd]))[0];
    for (int i = 0; i < 16; i++)
      for (int k = 0; k < K; k++) A[i][k] = el2f(ta, wg_elem(c, d, 16 * wi + i, k, I->k2 & 1, es));
  }
  {
    u64 d = ((u64 *)(R + X[nd + (areg_ ? 4 : 1)]))[0];
    for (int k = 0; k < K; k++)
      for (int j = 0; j < N; j++) B[k][j] = el2f(tb, wg_elem(c, d, j, k, I->k2 >> 1 & 1, es));
  }
  if (I->k2 & 4)
    for (int i = 0; i < 16; i++)
      for (int k = 0; k < K; k++) A[i][k] = -A[i][k];
  if (I->k2 & 8)
    for (int k = 0; k < K; k++)
      for (int j = 0; j < N; j++) B[k][j] = -B[k][j];
  u32 sd = I->c == NOP_ ? FULL : *(u32 *)(R + I->c);
  for (int l = 0; l < 32; l++) {
    int g = l >> 2, t = l & 3;
    for (int j = 0; j < N / 8; j++)
      for (int r = 0; r < 4; r++) {
        int row = g + 8 * (r >> 1), col = 8 * j + 2 * t + (r & 1);
        if (!(sd >> l & 1)) {
          acc[row][col] = 0;
          iacc[row][col] = 0;
          continue;
        }
        if (df16) {
          u32 v = ((u32 *)(R + X[2 * j + (r >> 1)]))[l];
          acc[row][col] = (f32)ash((u16)(v >> (16 * (r & 1))));
        } else {
          u32 v = ((u32 *)(R + X[4 * j + r]))[l];
          if (isint)
            iacc[row][col] = v;
          else
            acc[row][col] = asf(v);
        }
      }
  }
  if (isint)
    for (int i = 0; i < 16; i++)
      for (int j = 0; j < N; j++) {
        s64 z = iacc[i][j];
        for (int k = 0; k < K; k++) z += (s64)A[i][k] * (s64)B[k][j];
        iacc[i][j] = (I->k1 >> 18 & 1) ? (z > INT32_MAX   ? INT32_MAX
                                          : z < INT32_MIN ? INT32_MIN
                                                          : (s32)z)
                                       : (s32)(u32)z;
      }
  else
    for (int i = 0; i < 16; i++)
      for (int k = 0; k < K; k++) {
        f32 x = A[i][k];
        for (int j = 0; j < N; j++) acc[i][j] = __builtin_fmaf(x, B[k][j], acc[i][j]);
      }
  for (int l = 0; l < 32; l++) {
    int g = l >> 2, t = l & 3;
    for (int j = 0; j < N / 8; j++) {
      if (df16)
        for (int r = 0; r < 2; r++)
          ((u32 *)(R + X[2 * j + r]))[l] =
              h2(ashu((f16)acc[g + 8 * r][8 * j + 2 * t]), ashu((f16)acc[g + 8 * r][8 * j + 2 * t + 1]));
      else
        for (int r = 0; r < 4; r++) {
          int row = g + 8 * (r >> 1), col = 8 * j + 2 * t + (r & 1);
          ((u32 *)(R + X[4 * j + r]))[l] = isint ? (u32)iacc[row][col] : asu(acc[row][col]);
        }
    }
  }
}
