// basis.c once more, for processors whose vectors have 16 numbers.

#include "common.h"

#if CHOSEN_WHEN_LOADED
#define LANES 16
#define ROWS 8
#define BASIS powersgd_wide_basis
#define TARGET __attribute__((target("arch=x86-64-v4")))
#include "basis.c"
#endif
