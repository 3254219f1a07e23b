// The two loops that the generated arithmetic is made of: over the active lanes, and for a predicate.
#define LANES(BODY)                                                                                          \
  if (m == FULL) {                                                                                           \
    _Pragma("GCC ivdep") for (int l = 0; l < 32; l++) { BODY; }                                              \
  } else if (m) {                                                                                            \
    for (int l = 0; l < 32; l++)                                                                             \
      if (m >> l & 1) {                                                                                      \
        BODY;                                                                                                \
      }                                                                                                      \
  }
#define PSET(E)                                                                                              \
  {                                                                                                          \
    u32 r_ = 0;                                                                                              \
    for (int l = 0; l < 32; l++) r_ |= ((u32)((E) ? 1 : 0)) << l;                                            \
    pres = r_;                                                                                               \
  }
