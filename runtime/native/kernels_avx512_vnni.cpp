// Processors that multiply bytes in whole numbers, and no pairs of bfloat16; machines in a cloud are
// often made to look like this. Weights of bfloat16 are multiplied in float.

#if defined(__x86_64__)

// Headers of GCC 12 read a register that nothing has set where all of it is masked out.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <vector>

#define PALMETTE_WIDTH 64
#define PALMETTE_ROWS 8
#define PALMETTE_OWN_PRODUCTS
#include "kernels.inl"
#include "whole_products.inl"

namespace palmette {
namespace {

constexpr Input kTakes[kNumFormats] = {Input::f32, Input::f32, Input::i8,  Input::i16,
                                       Input::i8,  Input::i16, Input::f32};

// As `product` sums them, to the bit.
template <Format format, int R, int T>
PALMETTE_INLINE void products_of_bf16(const uint8_t* w, int64_t size, int64_t k, const void* x, int64_t ldx,
                                      bool is_first, uint8_t*, __m512 (*y)[T]) {
    const auto* const rows = static_cast<const float*>(x);
    const __m512i halves = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
    PALMETTE_UNROLLED (int r = 0; r < R; ++r)
        PALMETTE_UNROLLED (int t = 0; t < T; ++t) y[r][t] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i += 2) {
        __m512 even[T], odd[T];
        PALMETTE_UNROLLED (int t = 0; t < T; ++t) {
            const __m512i both = _mm512_loadu_si512(w + t * size + 32 * i);
            even[t] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
            odd[t] = _mm512_castsi512_ps(_mm512_and_si512(both, halves));
        }
        if (is_first) fetch_next<T>(w + 32 * i, size, 64);
        PALMETTE_UNROLLED (int r = 0; r < R; ++r) {
            const __m512 one = _mm512_set1_ps(rows[r * ldx + i]);
            const __m512 other = _mm512_set1_ps(rows[r * ldx + i + 1]);
            PALMETTE_UNROLLED (int t = 0; t < T; ++t) y[r][t] = _mm512_fmadd_ps(even[t], one, y[r][t]);
            PALMETTE_UNROLLED (int t = 0; t < T; ++t) y[r][t] = _mm512_fmadd_ps(odd[t], other, y[r][t]);
        }
    }
}

}  // namespace
}  // namespace palmette

#include "several_tiles.inl"

namespace palmette {
namespace {

void multiply_some(const Linear& linear, const Rows& rows, int64_t num_rows, float* y, int64_t ldy,
                   int64_t first_tile, int64_t last_tile, Ending ending) {
    constexpr decltype(&multiply_some) of_few_bits[kNumFormats] = {
        nullptr,
        nullptr,
        multiply_several_as<Format::q4>,
        multiply_several_as<Format::q8>,
        multiply_several_as<Format::q5>,
        multiply_several_as<Format::q6>,
        nullptr,
    };
    auto run = multiply;
    if (linear.format == Format::bf16) {
        run = multiply_several_as<Format::bf16>;
    } else if (rows.input != Input::f32) {
        run = of_few_bits[static_cast<int>(linear.format)];
    }
    run(linear, rows, num_rows, y, ldy, first_tile, last_tile, ending);
}

}  // namespace

const Kernels kernels_of_avx512_vnni = {
    "avx512_vnni",
    false,
    {kTakes[0], kTakes[1], kTakes[2], kTakes[3], kTakes[4], kTakes[5], kTakes[6]},
    {Input::f32, Input::f32, Input::f32, Input::f32, Input::f32, Input::f32, Input::f32},
    multiply_some,
    sum_blocks,
    normalize,
    round_to_bf16,
    quantise,
    quantise_bytes,
    turn,
    attend<attend_plain>,
    attend_stretch<attend_plain>,
    conclude_plain,
    allow,
    peak,
    weigh_tokens,
    total_of_tokens,
};

}  // namespace palmette

#endif
