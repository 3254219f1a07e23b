// Loads, stores and atomics of the four spaces. Every access is checked for alignment; shared and local memory for
// their bounds; global memory by guard pages around each argument.
static inline u8 *addr_of(Ctx *c, Warp *w, int space, int lane, u64 a, u32 n, int align) {
  if (space == 0) {
    if (a >= LOCWIN && a < LOCWIN + (1ull << 40)) {
      space = 3;
      a -= LOCWIN;
    } else if (a >= SHWIN && a < SHWIN + (1ull << 40)) {
      space = 2;
      a -= SHWIN;
    } else
      space = 1;
  }
  if (a & (align - 1)) bad(MISALIGNED, a);
  if (space == 1) return (u8 *)a;
  if (space == 2) {
    if (a + n > c->smem_n || a > c->smem_n) bad(SMEM_OOB, a);
    return c->smem + a;
  }
  if (a + n > c->local_n) bad(SMEM_OOB, a);
  return w->local + (u64)lane * c->local_n + a;
}
static inline u64 areg(Ins *I, u8 *R, int l) {
  return (I->k2 & 1) ? ((u64 *)(R + I->a))[l] + I->imm : (u64)(u32)(((u32 *)(R + I->a))[l] + (u32)I->imm);
}
static void setreg(u8 *R, u32 off, int width, int l, u64 v) {
  if (width == 64)
    ((u64 *)(R + off))[l] = v;
  else if (width == 32)
    ((u32 *)(R + off))[l] = (u32)v;
  else if (width == 16)
    ((u16 *)(R + off))[l] = (u16)v;
}
static u64 getreg(u8 *R, u32 off, int width, int l) {
  return width == 64 ? ((u64 *)(R + off))[l] : width == 32 ? ((u32 *)(R + off))[l] : ((u16 *)(R + off))[l];
}
// k0 = space | bytes<<8 | sext<<16 ; extra[x..] = (offset,width) pairs
static void do_ld(Ctx *c, Warp *w, Ins *I, u32 m) {
  u8 *R = w->R;
  int sp = I->k0 & 255, by = (I->k0 >> 8) & 255, sx = (I->k0 >> 16) & 1, n = I->n;
  u32 *X = c->extra + I->x;
  for (int l = 0; l < 32; l++)
    if (m >> l & 1) {
      u8 *p = addr_of(c, w, sp, l, areg(I, R, l), by * n, by * n);
      u64 v[8];
      for (int i = 0; i < n; i++) {
        u8 *q = p + by * i;
        switch (by) {
        case 1: v[i] = sx ? (u64)(s64) * (s8 *)q : *q; break;
        case 2: v[i] = sx ? (u64)(s64) * (s16 *)q : *(u16 *)q; break;
        case 4: v[i] = sx ? (u64)(s64) * (s32 *)q : *(u32 *)q; break;
        default: v[i] = *(u64 *)q;
        }
      }
      for (int i = 0; i < n; i++)
        if (X[2 * i] != NOP_) setreg(R, X[2 * i], X[2 * i + 1], l, v[i]);
    }
}
static void do_st(Ctx *c, Warp *w, Ins *I, u32 m) {
  u8 *R = w->R;
  int sp = I->k0 & 255, by = (I->k0 >> 8) & 255, n = I->n;
  u32 *X = c->extra + I->x;
  for (int l = 0; l < 32; l++)
    if (m >> l & 1) {
      u8 *p = addr_of(c, w, sp, l, areg(I, R, l), by * n, by * n);
      for (int i = 0; i < n; i++) {
        u64 v = getreg(R, X[2 * i], X[2 * i + 1], l);
        u8 *q = p + by * i;
        switch (by) {
        case 1: *q = (u8)v; break;
        case 2: *(u16 *)q = (u16)v; break;
        case 4: *(u32 *)q = (u32)v; break;
        default: *(u64 *)q = v;
        }
      }
    }
}
enum { A_ADD, A_MIN, A_MAX, A_AND, A_OR, A_XOR, A_EXCH, A_CAS, A_INC, A_DEC };
// k0 = space | bytes<<8 | type<<16 (0 u,1 s,2 f32,3 f64,4 f16,5 bf16,6 f16x2,7 bf16x2), k1 = aop |
// dstwidth<<8 ; d=NOP_ for red ; extra: (b off,width),(c off,width)
static void do_atom(Ctx *c, Warp *w, Ins *I, u32 m) {
  u8 *R = w->R;
  int sp = I->k0 & 255, by = (I->k0 >> 8) & 255, ty = I->k0 >> 16, op = I->k1 & 255, dw = I->k1 >> 8;
  u32 *X = c->extra + I->x;
  for (int l = 0; l < 32; l++)
    if (m >> l & 1) {
      u8 *p = addr_of(c, w, sp, l, areg(I, R, l), by, by);
      u64 o = 0, n = 0, b = getreg(R, X[0], X[1], l), cc = I->n > 1 ? getreg(R, X[2], X[3], l) : 0;
      memcpy(&o, p, by);
      u64 mk = by == 8 ? ~0ull : (1ull << (8 * by)) - 1;
      b &= mk;
      cc &= mk;
      s64 so = by == 4   ? (s32)o
               : by == 2 ? (s16)o
                         : (s64)o,
          sb = by == 4   ? (s32)b
               : by == 2 ? (s16)b
                         : (s64)b;
      switch (op) {
      case A_ADD:
        switch (ty) {
        case 2: n = asu(asf(o) + asf(b)); break;
        case 3: n = asul(asd(o) + asd(b)); break;
        case 4: n = ashu((f16)(ash(o) + ash(b))); break;
        case 5: n = tobf(bf(o) + bf(b)); break;
        case 6: n = HX2((u32)o, (u32)b, x + y); break;
        case 7: n = BX2((u32)o, (u32)b, (f64)x + y); break;
        default: n = o + b;
        }
        break;
      case A_MIN:
        n = ty == 1 ? (so < sb ? o : b) : ty == 2 ? asu(fmin_(asf(o), asf(b))) : (o < b ? o : b);
        break;
      case A_MAX:
        n = ty == 1 ? (so > sb ? o : b) : ty == 2 ? asu(fmax_(asf(o), asf(b))) : (o > b ? o : b);
        break;
      case A_AND: n = o & b; break;
      case A_OR: n = o | b; break;
      case A_XOR: n = o ^ b; break;
      case A_EXCH: n = b; break;
      case A_CAS: n = o == b ? cc : o; break;
      case A_INC: n = o >= b ? 0 : o + 1; break;
      case A_DEC: n = (o == 0 || o > b) ? b : o - 1; break;
      }
      memcpy(p, &n, by);
      if (I->d != NOP_) setreg(R, I->d, dw, l, o);
    }
}
