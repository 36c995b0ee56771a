// Processors that multiply pairs of bfloat16: inputs are rounded to it, weights of 4 bits become it
// in a register, and every product is summed in float.

#if defined(__x86_64__)

#include <immintrin.h>

#define PALMETTE_WIDTH 64
#define PALMETTE_ROWS 8
#define PALMETTE_OWN_PRODUCTS
#include "kernels.inl"

namespace palmette {
namespace {

inline __m512 multiply_pairs(__m512 sum, __m512i x, __m512i w) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
}

inline __m512i pair_at(const uint16_t* x) {
    int32_t both;
    std::memcpy(&both, x, sizeof both);
    return _mm512_set1_epi32(both);
}

inline __m512 half_at(const uint8_t* from) {
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// 0 to 15 as bfloat16, twice: the bit above four is that of another weight.
alignas(64) constexpr uint16_t kNibbles[32] = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
    0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
    0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};

// R rows with T tiles whose weights lie `size` bytes apart.
template <int R, int T>
inline void pairs_bf16(const uint8_t* w, int64_t size, int64_t k, const uint16_t* x, int64_t ldx,
                       __m512 (*y)[T]) {
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) y[r][t] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i += 2) {
        __m512i wi[T];
        for (int t = 0; t < T; ++t) wi[t] = _mm512_loadu_si512(w + t * size + 32 * i);
        for (int r = 0; r < R; ++r) {
            const __m512i xi = pair_at(x + r * ldx + i);
            for (int t = 0; t < T; ++t) y[r][t] = multiply_pairs(y[r][t], xi, wi[t]);
        }
    }
}

template <int R, int T>
inline void pairs_q4(const uint8_t* w, int64_t size, int64_t k, const uint16_t* x, int64_t ldx,
                     const float* sums, int64_t lds, __m512 (*y)[T]) {
    const __m512i table = _mm512_load_si512(kNibbles);
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) y[r][t] = _mm512_setzero_ps();
    for (int64_t b = 0; b < k / kBlock; ++b, w += 320) {
        __m512 part[R][T];
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) part[r][t] = _mm512_setzero_ps();
        for (int quarter = 0; quarter < 4; ++quarter) {
            __m512i packed[T];
            for (int t = 0; t < T; ++t)
                packed[t] = _mm512_loadu_si512(w + t * size + 64 + 64 * quarter);
            const uint16_t* at = x + b * kBlock + 8 * quarter;
            for (int pair = 0; pair < 4; ++pair) {
                __m512i wi[T];
                for (int t = 0; t < T; ++t) {
                    wi[t] = _mm512_permutexvar_epi16(packed[t], table);
                    packed[t] = _mm512_srli_epi16(packed[t], 4);
                }
                for (int r = 0; r < R; ++r) {
                    const __m512i xi = pair_at(at + r * ldx + 2 * pair);
                    for (int t = 0; t < T; ++t) part[r][t] = multiply_pairs(part[r][t], xi, wi[t]);
                }
            }
        }
        for (int t = 0; t < T; ++t) {
            const __m512 scale = half_at(w + t * size), offset = half_at(w + t * size + 32);
            for (int r = 0; r < R; ++r) {
                y[r][t] = _mm512_fmadd_ps(scale, part[r][t], y[r][t]);
                y[r][t] = _mm512_fmadd_ps(offset, _mm512_set1_ps(sums[r * lds + b]), y[r][t]);
            }
        }
    }
}

inline Floats floats_of(__m512 v) {
    Floats out;
    std::memcpy(&out, &v, sizeof out);
    return out;
}

template <Format format, int R, int T>
inline void pair_tiles(const Linear& linear, const uint16_t* x, int64_t ldx, const float* sums,
                       float* y, int64_t ldy, int64_t tile, Ending ending) {
    const int64_t size = tile_bytes(format, linear.k), lds = linear.k / kBlock;
    const uint8_t* w = linear.weight + tile * size;
    __m512 found[R][T];
    if constexpr (format == Format::bf16) {
        pairs_bf16<R, T>(w, size, linear.k, x, ldx, found);
    } else {
        pairs_q4<R, T>(w, size, linear.k, x, ldx, sums, lds, found);
    }
    for (int t = 0; t < T && linear.bias; ++t) {
        const __m512 bias = _mm512_loadu_ps(linear.bias + (tile + t) * kTile);
        for (int r = 0; r < R; ++r) found[r][t] = _mm512_add_ps(found[r][t], bias);
    }
    for (int r = 0; r < R; ++r) {
        if (ending == Ending::gated) {
            for (int t = 0; t + 1 < T; t += 2) {
                store(y + r * ldy + (tile + t) / 2 * kTile,
                      silu(floats_of(found[r][t])) * floats_of(found[r][t + 1]));
            }
            continue;
        }
        for (int t = 0; t < T; ++t) {
            float* at = y + r * ldy + (tile + t) * kTile;
            if (ending == Ending::add) found[r][t] = _mm512_add_ps(found[r][t], _mm512_loadu_ps(at));
            _mm512_storeu_ps(at, found[r][t]);
        }
    }
}

template <Format format, int R, int T>
inline void pair_rows(int64_t rows, const Linear& linear, const uint16_t* x, int64_t ldx,
                      const float* sums, float* y, int64_t ldy, int64_t tile, Ending ending) {
    if (rows == R) {
        pair_tiles<format, R, T>(linear, x, ldx, sums, y, ldy, tile, ending);
    } else if constexpr (R > 1) {
        pair_rows<format, R - 1, T>(rows, linear, x, ldx, sums, y, ldy, tile, ending);
    }
}

// The accumulators of so many rows and two tiles fit the registers.
template <Format format> constexpr int kPairRows = format == Format::bf16 ? 12 : 6;

template <Format format>
void multiply_pairs_as(const Linear& linear, const void* x, int64_t ldx, const float* sums,
                       int64_t rows, float* y, int64_t ldy, int64_t first_tile, int64_t last_tile,
                       Ending ending) {
    const auto* inputs = static_cast<const uint16_t*>(x);
    const int64_t lds = linear.k / kBlock;
    constexpr int most = kPairRows<format>;
    int64_t tile = first_tile;
    const auto run = [&](auto width) {
        constexpr int tiles = decltype(width)::value;
        for (int64_t row = 0; row < rows; row += most) {
            const int64_t count = rows - row < most ? rows - row : most;
            pair_rows<format, most, tiles>(count, linear, inputs + row * ldx, ldx, sums + row * lds,
                                           y + row * ldy, ldy, tile, ending);
        }
        tile += tiles;
    };
    while (tile + 2 <= last_tile) run(std::integral_constant<int, 2>());
    while (tile < last_tile) run(std::integral_constant<int, 1>());
}

void multiply_some(const Linear& linear, const void* x, int64_t ldx, const float* sums, int64_t rows,
                   float* y, int64_t ldy, int64_t first_tile, int64_t last_tile, Ending ending) {
    const auto run = linear.format == Format::bf16 ? multiply_pairs_as<Format::bf16>
                     : linear.format == Format::q4 ? multiply_pairs_as<Format::q4>
                                                   : multiply;
    run(linear, x, ldx, sums, rows, y, ldy, first_tile, last_tile, ending);
}

}  // namespace

const Kernels kernels_of_avx512_bf16 = {
    "avx512_bf16", {false, true, true, false}, multiply_some, sum_blocks, normalize, round_to_bf16,
    turn,          attend,
};

}  // namespace palmette

#endif
