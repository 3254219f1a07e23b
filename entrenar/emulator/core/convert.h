// cvt between integers and floats of 8 to 64 bits: nearest even unless the modifier says otherwise, saturating to the
// range of an integer, NaN to 0; .rna to tf32 rounds half away from zero at 10 bits.
// cvt: k0 = dst type, k1 = src type, k2 = rnd | ftz<<4 | sat<<5 | dstwidth<<8 | srcwidth<<16 ; types 0 u8 1
// s8 2 u16 3 s16 4 u32 5 s32 6 u64 7 s64 8 f16 9 bf16 10 f32 11 f64 ; rnd 0 none 1 rn 2 rz 3 rm 4 rp 5 rni 6
// rzi 7 rmi 8 rpi 9 rna
static f64 rint_(f64 x, int r) {
  switch (r) {
  case 5: return nearbyint(x);
  case 6: return trunc(x);
  case 7: return floor(x);
  case 8: return ceil(x);
  }
  return x;
}
static f32 d2f(f64 x, int r) {
  f32 f = (f32)x;
  if (r == 2 && fabs((f64)f) > fabs(x)) f = nextafterf(f, 0);
  if (r == 3 && (f64)f > x) f = nextafterf(f, -INFINITY);
  if (r == 4 && (f64)f < x) f = nextafterf(f, INFINITY);
  return f;
}
static void do_cvt(Warp *w, Ins *I, u32 m) {
  u8 *R = w->R;
  int dt = I->k0, at = I->k1, rn = I->k2 & 15, ftz = I->k2 >> 4 & 1, sat = I->k2 >> 5 & 1,
      dw = I->k2 >> 8 & 255, aw = I->k2 >> 16;
  for (int l = 0; l < 32; l++)
    if (m >> l & 1) {
      u64 v = getreg(R, I->a, aw, l), o = 0;
      s64 iv = 0;
      int isf = at >= 8, sg = at & 1;
      f64 x = 0;
      if (!isf) {
        switch (at) {
        case 0: iv = (u8)v; break;
        case 1: iv = (s8)v; break;
        case 2: iv = (u16)v; break;
        case 3: iv = (s16)v; break;
        case 4: iv = (u32)v; break;
        case 5: iv = (s32)v; break;
        default: iv = (s64)v;
        }
      } else
        x = at == 8    ? (f64)ash(v)
            : at == 9  ? (f64)bf(v)
            : at == 10 ? (f64)(ftz ? fz(asf(v)) : asf(v))
                       : asd(v);
      if (dt < 8) {
        static const int bits[] = {8, 8, 16, 16, 32, 32, 64, 64};
        int bw = bits[dt], ds = dt & 1;
        if (isf) {
          f64 y = rint_(x, rn < 5 ? 6 : rn);
          s64 lo = ds ? (bw == 64 ? INT64_MIN : -(1ll << (bw - 1))) : 0;
          if (y != y)
            o = (bw == 64 || bw == 32) ? (ds && bw == 32 ? 0 : 0) : 0;
          else if (ds) {
            f64 hi = ldexp(1, bw - 1);
            o = y >= hi   ? (bw == 64 ? (u64)INT64_MAX : (1ull << (bw - 1)) - 1)
                : y < -hi ? (u64)lo
                          : (u64)(s64)y;
          } else {
            f64 hi = ldexp(1, bw);
            o = y >= hi ? (bw == 64 ? ~0ull : (1ull << bw) - 1) : y <= 0 ? 0 : (u64)y;
          }
        } else {
          o = (u64)iv;
          if (sat) {
            if (ds) {
              s64 hi = bw == 64 ? INT64_MAX : (1ll << (bw - 1)) - 1, lo = -hi - 1;
              if (at == 6 && (u64)iv > (u64)hi)
                o = hi;
              else
                o = iv > hi ? hi : iv < lo ? lo : iv;
            } else {
              u64 hi = bw == 64 ? ~0ull : (1ull << bw) - 1;
              if (sg && iv < 0)
                o = 0;
              else
                o = (u64)iv > hi ? hi : (u64)iv;
            }
          }
        }
        if (bw < 64) {
          o &= (1ull << bw) - 1;
          if (ds && dw > bw && (o >> (bw - 1) & 1)) o |= ~0ull << bw;
        }
      } else {
        if (isf) {
          x = rint_(x, rn);
        }
        if (dt == 11)
          o = asul(isf ? x : (at == 6 ? (f64)(u64)iv : (f64)iv));
        else if (dt == 10) {
          f32 f;
          if (isf)
            f = d2f(x, rn);
          else
            f = at == 6 ? (f32)(u64)iv : (f32)iv;
          if (ftz) f = fz(f);
          if (sat) f = f != f ? 0 : f < 0 ? 0 : f > 1 ? 1 : f;
          if (rn == 9) {
            u32 q = asu(f);
            if ((q & 0x7f800000) != 0x7f800000) q = (q + 0x1000) & ~0x1fffu;
            f = asf(q);
          }
          o = asu(f);
        } else if (dt == 8) {
          f16 h;
          if (isf)
            h = (f16)x;
          else
            h = at == 6 ? (f16)(u64)iv : (f16)iv;
          if (rn == 2 && isf && fabs((f64)h) > fabs(x)) {
            u16 q = ashu(h);
            h = ash(q - 1);
          }
          o = ashu(h);
        } else if (dt == 9) {
          if (isf) {
            if (rn == 2) {
              o = asu((f32)x) >> 16;
            } else
              o = tobf_d(x);
          } else
            o = tobf((f32)iv);
        }
      }
      setreg(R, I->d, dw, l, o);
    }
}
