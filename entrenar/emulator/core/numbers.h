// Arithmetic that C has no operator for: 16-bit and 8-bit floats, PTX's minimum and maximum, bit fields.
//
// add, sub, mul, fma, div, sqrt and rcp of float32 are those of the host, rounded to nearest even; .ftz flushes
// subnormal operands and results to zero of the same sign. f16 rounds once; bf16 is computed in float64 and
// rounded once (through round-to-odd in float32). minimum and maximum give the other operand for a NaN, .NaN
// forms give the canonical NaN. Integer division by zero gives all ones, as the hardware does.
static inline f32 asf(u32 x) {
  f32 f;
  memcpy(&f, &x, 4);
  return f;
}
static inline u32 asu(f32 x) {
  u32 f;
  memcpy(&f, &x, 4);
  return f;
}
static inline f64 asd(u64 x) {
  f64 f;
  memcpy(&f, &x, 8);
  return f;
}
static inline u64 asul(f64 x) {
  u64 f;
  memcpy(&f, &x, 8);
  return f;
}
static inline f16 ash(u16 x) {
  f16 f;
  memcpy(&f, &x, 2);
  return f;
}
static inline u16 ashu(f16 x) {
  u16 f;
  memcpy(&f, &x, 2);
  return f;
}
static inline f32 bf(u16 x) { return asf((u32)x << 16); }
static inline u16 tobf(f32 x) {
  u32 w = asu(x);
  if ((w & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (u16)((w + 0x7fff + ((w >> 16) & 1)) >> 16);
}
// x*y + z with x*y exact in float64, rounded to odd, so that rounding it again to 16 bits is right.
static inline f64 fma_odd(f64 x, f64 y, f64 z) {
  f64 p = x * y, t = p + z, b = t - p, e = (p - (t - b)) + (z - b);
  u64 w = asul(t);
  if (e != 0 && isfinite(t) && !(w & 1)) w += (e > 0) == (t > 0) ? 1 : -1;
  return asd(w);
}
static inline u16 tobf_d(f64 x) { // single rounding from double: round to odd in f32 first
  f32 f = (f32)x;
  if ((f64)f != x && x == x && !isinf(f)) {
    u32 w = asu(f);
    if (fabs((f64)f) > fabs(x)) w--;
    w |= 1;
    f = asf(w);
  }
  return tobf(f);
}
static inline u16 f16rz(f32 x) {
  f16 h = (f16)x;
  if (fabsf((f32)h) > fabsf(x) && !isinf(x)) h = ash(ashu(h) - 1);
  return ashu(h);
}
static u8 tofp8(f32 x, int e5) { // round to nearest even, saturate
  u32 w = asu(x);
  u8 sg = w >> 31 ? 0x80 : 0;
  if (x != x) return 0x7f;
  f32 a = fabsf(x);
  f32 mx = e5 ? 57344.f : 448.f;
  int mb = e5 ? 2 : 3, bias = e5 ? 15 : 7;
  if (a >= mx) return sg | (e5 ? 0x7b : 0x7e);
  if (a == 0) return sg;
  int ex;
  frexpf(a, &ex);
  ex--;
  if (ex < 1 - bias) ex = 1 - bias;
  f32 q = ldexpf(a, mb - ex);
  f32 r = rintf(q);
  int m = (int)r;
  int e = ex + bias;
  if (m >= (2 << mb)) {
    m >>= 1;
    e++;
  }
  if (m < (1 << mb)) return sg | m;
  u32 v = (e << mb) | (m & ((1 << mb) - 1));
  if (!e5 && v > 0x7e) v = 0x7e;
  if (e5 && v > 0x7b) v = 0x7b;
  return sg | v;
}
static f32 e4m3(u8 b) {
  int s = b >> 7, e = (b >> 3) & 15, m = b & 7;
  f32 f;
  if (e == 15 && m == 7)
    f = NAN;
  else if (e == 0)
    f = ldexpf(m, -9);
  else
    f = ldexpf(8 + m, e - 10);
  return s ? -f : f;
}
static f32 e5m2(u8 b) { return (f32)ash((u16)b << 8); }
static inline f32 xsign(f32 r, f32 a, f32 b) {
  return asf((asu(r) & 0x7fffffff) | ((asu(a) ^ asu(b)) & 0x80000000u));
}
static inline f32 lo2(u64 x) { return asf((u32)x); }
static inline f32 hi2(u64 x) { return asf((u32)(x >> 32)); }
static inline u64 pk2(f32 a, f32 b) { return (u64)asu(a) | ((u64)asu(b) << 32); }
static inline f32 fz(f32 x) {
  u32 w = asu(x);
  return (w & 0x7f800000) ? x : asf(w & 0x80000000u);
}
static inline f32 fmin_(f32 a, f32 b) {
  return a != a ? b : b != b ? a : (a < b || (a == b && signbit(a))) ? a : b;
}
static inline f32 fmax_(f32 a, f32 b) {
  return a != a ? b : b != b ? a : (a > b || (a == b && !signbit(a))) ? a : b;
}
static inline f32 fminN(f32 a, f32 b) { return a != a || b != b ? asf(0x7fffffff) : fmin_(a, b); }
static inline f32 fmaxN(f32 a, f32 b) { return a != a || b != b ? asf(0x7fffffff) : fmax_(a, b); }
static inline f64 dmin_(f64 a, f64 b) { return a != a ? b : b != b ? a : a < b ? a : b; }
static inline f64 dmax_(f64 a, f64 b) { return a != a ? b : b != b ? a : a > b ? a : b; }
static inline s32 sdiv32(s32 a, s32 b) { return b == 0 ? -1 : (b == -1) ? (s32)(0u - (u32)a) : a / b; }
static inline s32 srem32(s32 a, s32 b) { return b == 0 ? a : b == -1 ? 0 : a % b; }
static inline s64 sdiv64(s64 a, s64 b) { return b == 0 ? -1 : (b == -1) ? (s64)(0ull - (u64)a) : a / b; }
static inline s64 srem64(s64 a, s64 b) { return b == 0 ? a : b == -1 ? 0 : a % b; }
static inline u32 prmt(u32 a, u32 b, u32 s) {
  u64 v = ((u64)b << 32) | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    u32 n = (s >> (4 * i)) & 15;
    u32 x = (v >> (8 * (n & 7))) & 0xff;
    if (n & 8) x = (x & 0x80) ? 0xff : 0;
    r |= x << (8 * i);
  }
  return r;
}
static inline u32 lop3(u32 a, u32 b, u32 c, u32 t) {
  u32 r = 0;
  if (t & 1) r |= ~a & ~b & ~c;
  if (t & 2) r |= ~a & ~b & c;
  if (t & 4) r |= ~a & b & ~c;
  if (t & 8) r |= ~a & b & c;
  if (t & 16) r |= a & ~b & ~c;
  if (t & 32) r |= a & ~b & c;
  if (t & 64) r |= a & b & ~c;
  if (t & 128) r |= a & b & c;
  return r;
}
static inline u64 bfe_(u64 a, u32 pos, u32 len, int w, int sg) {
  pos &= 255;
  len &= 255;
  u32 msb = w - 1;
  u32 sb;
  if (len == 0) return 0;
  sb = sg ? (pos + len - 1 < msb ? pos + len - 1 : msb) : 0;
  u64 sign = sg ? (a >> sb) & 1 : 0;
  u64 r = 0;
  for (u32 i = 0; i <= msb; i++) {
    u64 bit = (i < len && pos + i <= msb) ? (a >> (pos + i)) & 1 : sign;
    r |= bit << i;
  }
  return r;
}
static inline u64 bfi_(u64 a, u64 b, u32 pos, u32 len, int w) {
  pos &= 255;
  len &= 255;
  for (u32 i = 0; i < len && pos + i < (u32)w; i++) {
    u64 m = 1ull << (pos + i);
    b = (b & ~m) | (((a >> i) & 1) << (pos + i));
  }
  return b;
}
static inline u32 h2(u16 lo, u16 hi) { return (u32)lo | ((u32)hi << 16); }
#define HX2(a, b, e)                                                                                         \
  ({                                                                                                         \
    f16 x0 = ash((u16)(a)), x1 = ash((u16)((a) >> 16)), y0 = ash((u16)(b)), y1 = ash((u16)((b) >> 16));      \
    f16 x = x0, y = y0;                                                                                      \
    u16 lo = ashu((f16)(e));                                                                                 \
    x = x1;                                                                                                  \
    y = y1;                                                                                                  \
    u16 hi = ashu((f16)(e));                                                                                 \
    h2(lo, hi);                                                                                              \
  })
#define BX2(a, b, e)                                                                                         \
  ({                                                                                                         \
    f32 x = bf((u16)(a)), y = bf((u16)(b));                                                                  \
    u16 lo = tobf_d((f64)(e));                                                                               \
    x = bf((u16)((a) >> 16));                                                                                \
    y = bf((u16)((b) >> 16));                                                                                \
    u16 hi = tobf_d((f64)(e));                                                                               \
    h2(lo, hi);                                                                                              \
  })
