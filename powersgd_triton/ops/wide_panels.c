// panels.c once more, for processors whose vectors have 16 numbers.

#include "common.h"

#if CHOSEN_WHEN_LOADED
#define LANES 16
#define PANELS powersgd_wide_panels
#define TARGET __attribute__((target("arch=x86-64-v4")))
#include "panels.c"
#endif
