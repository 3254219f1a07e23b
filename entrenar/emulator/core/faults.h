// How a run ends early: bad() leaves it with a code and an address; so does a signal, which a guard page raises.
static __thread sigjmp_buf jb;
static __thread volatile u64 g_fault;
static __thread volatile int g_on;
static __thread Ctx *G;
static struct sigaction old_segv, old_bus, old_fpe;
static void handler(int sig, siginfo_t *si, void *uc) {
  if (g_on) {
    g_fault = sig == SIGFPE ? ~0ull : (u64)si->si_addr;
    siglongjmp(jb, 1 + FAULT);
  }
  signal(sig, SIG_DFL);
  raise(sig);
}
static void bad(int code, u64 v) {
  g_fault = v;
  siglongjmp(jb, 1 + code);
}
