// Instructions across the lanes of a warp: shfl and redux.
static void do_shfl(Warp *w, Ins *I, u32 m, u32 act) {
  u8 *R = w->R;
  u32 *a = (u32 *)(R + I->a), *b = (u32 *)(R + I->b), *cc = (u32 *)(R + I->c);
  u32 t[32], pm = 0;
  memcpy(t, a, 128);
  u32 o[32];
  for (int l = 0; l < 32; l++) {
    int seg = (cc[l] >> 8) & 31, cv = cc[l] & 31, bv = b[l] & 31, maxl = (l & seg) | (cv & ~seg),
        minl = l & seg, j = l, p = 0;
    switch (I->k0) {
    case 0:
      j = l - bv;
      p = j >= maxl;
      break;
    case 1:
      j = l + bv;
      p = j <= maxl;
      break;
    case 2:
      j = l ^ bv;
      p = j <= maxl;
      break;
    case 3:
      j = minl | (bv & ~seg);
      p = j <= maxl;
      break;
    }
    if (!p) j = l;
    o[l] = t[j];
    pm |= (u32)p << l;
  }
  for (int l = 0; l < 32; l++)
    if (m >> l & 1) ((u32 *)(R + I->d))[l] = o[l];
  if (I->x != NOP_) {
    u32 *q = (u32 *)(R + I->x);
    *q = (*q & ~m) | (pm & m);
  }
}
static void do_redux(Warp *w, Ins *I, u32 m) {
  u8 *R = w->R;
  u32 *a = (u32 *)(R + I->a), r = 0;
  int first = 1;
  for (int l = 0; l < 32; l++)
    if (m >> l & 1) {
      u32 v = a[l];
      if (first) {
        r = v;
        first = 0;
        continue;
      }
      switch (I->k0) {
      case 0: r += v; break;
      case 1: r = I->k1 ? ((s32)v < (s32)r ? v : r) : (v < r ? v : r); break;
      case 2: r = I->k1 ? ((s32)v > (s32)r ? v : r) : (v > r ? v : r); break;
      case 3: r &= v; break;
      case 4: r |= v; break;
      case 5: r ^= v; break;
      case 6: r = asu(fmin_(asf(r), asf(v))); break;
      case 7: r = asu(fmax_(asf(r), asf(v))); break;
      }
    }
  for (int l = 0; l < 32; l++)
    if (m >> l & 1) ((u32 *)(R + I->d))[l] = r;
}
