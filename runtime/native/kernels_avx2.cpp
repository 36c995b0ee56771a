#if defined(__x86_64__)

#define PALMETTE_WIDTH 32
#define PALMETTE_ROWS 4
#define PALMETTE_NAME "avx2"
#define PALMETTE_TABLE kernels_of_avx2
#include "kernels.inl"

#endif
