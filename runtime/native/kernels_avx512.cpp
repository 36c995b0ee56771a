#if defined(__x86_64__)

#define PALMETTE_WIDTH 64
#define PALMETTE_ROWS 8
#define PALMETTE_NAME "avx512"
#define PALMETTE_TABLE kernels_of_avx512
#include "kernels.inl"

#endif
