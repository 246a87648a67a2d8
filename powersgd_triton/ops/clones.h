// Vector instructions are chosen when the library is loaded: it may run on another machine than it was built on.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define CHOSEN_WHEN_LOADED 1
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
// For what is called only where there is AVX2. Vectors have 8 numbers, so those of AVX-512 would not be used.
#define AVX2 __attribute__((target("arch=x86-64-v3")))
#else
#define CHOSEN_WHEN_LOADED 0
#define CLONES
#define AVX2
#endif
