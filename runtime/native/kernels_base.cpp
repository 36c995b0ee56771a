#define PALMETTE_WIDTH 16
#define PALMETTE_ROWS 2
#define PALMETTE_NAME "base"
#define PALMETTE_TABLE kernels_of_base
#include "kernels.inl"
