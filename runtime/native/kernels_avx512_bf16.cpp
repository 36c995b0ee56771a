// Processors that multiply pairs of bfloat16: inputs are rounded to it, weights of 4 bits become it
// in a register, and every product is summed in float. Weights of 8 bits are multiplied with inputs
// of 16 in whole numbers, 32 at a time without an error.

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

template <int R, int T>
inline void pairs_q8(const uint8_t* w, int64_t size, int64_t k, const int16_t* x, int64_t ldx,
                     const float* scales, int64_t lds, __m512 (*y)[T]) {
    // Of four bytes, the first two and the last two as the high bytes of 16 bits.
    const __m512i first = _mm512_set1_epi32(static_cast<int32_t>(0x01800080));
    const __m512i last = _mm512_set1_epi32(static_cast<int32_t>(0x03800280));
    const __m512i within = _mm512_set4_epi32(0x0C000C00, 0x08000800, 0x04000400, 0);
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) y[r][t] = _mm512_setzero_ps();
    for (int64_t b = 0; b < k / kBlock; ++b, w += 544) {
        __m512i part[R][T];
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) part[r][t] = _mm512_setzero_si512();
        for (int word = 0; word < 8; ++word) {
            __m512i low[T], high[T];
            for (int t = 0; t < T; ++t) {
                const __m512i packed = _mm512_loadu_si512(w + t * size + 32 + 64 * word);
                low[t] = _mm512_srai_epi16(
                    _mm512_shuffle_epi8(packed, _mm512_add_epi32(first, within)), 8);
                high[t] = _mm512_srai_epi16(
                    _mm512_shuffle_epi8(packed, _mm512_add_epi32(last, within)), 8);
            }
            const int16_t* at = x + b * kBlock + 4 * word;
            for (int r = 0; r < R; ++r) {
                int32_t both[2];
                std::memcpy(both, at + r * ldx, sizeof both);
                const __m512i one = _mm512_set1_epi32(both[0]);
                const __m512i other = _mm512_set1_epi32(both[1]);
                for (int t = 0; t < T; ++t) {
                    part[r][t] = _mm512_dpwssd_epi32(part[r][t], one, low[t]);
                    part[r][t] = _mm512_dpwssd_epi32(part[r][t], other, high[t]);
                }
            }
        }
        for (int t = 0; t < T; ++t) {
            const __m512 scale = half_at(w + t * size);
            for (int r = 0; r < R; ++r) {
                const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(scales[r * lds + b]));
                y[r][t] = _mm512_fmadd_ps(both, _mm512_maskz_cvtepi32_ps(0xffff, part[r][t]), y[r][t]);
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
    } else if constexpr (format == Format::q4) {
        pairs_q4<R, T>(w, size, linear.k, x, ldx, sums, lds, found);
    } else {
        pairs_q8<R, T>(w, size, linear.k, reinterpret_cast<const int16_t*>(x), ldx, sums, lds, found);
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
            with_count<most>(rows - row, [&](auto count) {
                pair_tiles<format, decltype(count)::value, tiles>(
                    linear, inputs + row * ldx, ldx, sums + row * lds, y + row * ldy, ldy, tile,
                    ending);
            });
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
                     : linear.format == Format::q8 ? multiply_pairs_as<Format::q8>
                                                   : multiply;
    run(linear, x, ldx, sums, rows, y, ldy, first_tile, last_tile, ending);
}

// Attention as `attend_some` has it, where pages and what is multiplied with them are bfloat16.
// Pairs of dimensions of a key, and of keys of a value, are multiplied at once.

inline __m512i words_at(const void* from) { return _mm512_loadu_si512(from); }

template <int R>
inline void pair_scores(const uint32_t* const* queries, const uint32_t* keys, int64_t num_pairs,
                        float* scores) {
    __m512 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
    for (int64_t i = 0; i < num_pairs; ++i) {
        const __m512i k = words_at(keys + i * kLanes);
        for (int r = 0; r < R; ++r) {
            const __m512i q = _mm512_set1_epi32(static_cast<int32_t>(queries[r][i]));
            acc[r] = multiply_pairs(acc[r], q, k);
        }
    }
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(scores + r * kKeys, acc[r]);
}

// Sums of 32 dimensions of a value: the first vector of each row holds 0-3, 8-11, 16-19, 24-27.
template <int R>
inline void pair_gather(const uint16_t* values, const int64_t* where, int64_t num_pairs,
                        const uint32_t* weights, int64_t ldw, float* sums, int64_t ld) {
    __m512 low[R], high[R];
    for (int r = 0; r < R; ++r) {
        low[r] = _mm512_loadu_ps(sums + r * ld);
        high[r] = _mm512_loadu_ps(sums + r * ld + kLanes);
    }
    for (int64_t i = 0; i < num_pairs; ++i) {
        const __m512i one = words_at(values + where[2 * i]);
        const __m512i other = words_at(values + where[2 * i + 1]);
        const __m512i first = _mm512_unpacklo_epi16(one, other);
        const __m512i second = _mm512_unpackhi_epi16(one, other);
        for (int r = 0; r < R; ++r) {
            const __m512i w = _mm512_set1_epi32(static_cast<int32_t>(weights[r * ldw + i]));
            low[r] = multiply_pairs(low[r], w, first);
            high[r] = multiply_pairs(high[r], w, second);
        }
    }
    for (int r = 0; r < R; ++r) {
        _mm512_storeu_ps(sums + r * ld, low[r]);
        _mm512_storeu_ps(sums + r * ld + kLanes, high[r]);
    }
}

void put_pairs(float* out, const float* sums, float total, int64_t dim) {
    const float share = 1.0f / total;
    for (int64_t d = 0; d < dim; ++d) {
        const int64_t chunk = d / 32, within = d % 32;
        const int64_t lane = within / 8 * 4 + within % 4;
        out[d] = sums[chunk * 32 + within % 8 / 4 * kLanes + lane] * share;
    }
}

void attend_in_pairs(const Heads& heads, const Span& span, int64_t kv_head, int64_t first,
                     int64_t last, const float* queries, int64_t ldq, const uint16_t* keys,
                     const uint16_t* values, const Reach& reach) {
    const int64_t dim = heads.dim, num_pairs = dim / 2;
    Together rows = together(heads, span, kv_head, first, last, queries, ldq, reach);
    const int64_t count = rows.count, end = rows.most_seen;
    alignas(64) uint32_t query[kMaxQueries * kMaxDim / 2];
    alignas(64) uint32_t block[kMaxDim / 2 * kLanes];
    alignas(64) uint32_t weights[kMaxQueries * kKeys / 2];
    alignas(64) float sums[kMaxQueries * kMaxDim];
    alignas(64) float scores[kMaxQueries * kKeys];
    const uint32_t* pairs[kMaxQueries];
    int64_t places[2][kKeys];  // of the block at hand, and of the next
    for (int64_t i = 0; i < count; ++i) {
        pairs[i] = query + i * num_pairs;
        round_to_bf16(rows.query[i], dim, reinterpret_cast<uint16_t*>(query + i * num_pairs));
    }
    const int64_t begin = reach.stretch < 0 ? 0 : reach.stretch * kStretch;
    if (begin < end) {
        locate(heads, span, kv_head, begin, end, keys, values, 2, places[begin / kKeys % 2]);
    }
    const auto block_from = [&](int64_t start) {
        const int64_t num_keys = end - start < kKeys ? end - start : kKeys;
        const int64_t* const where = places[start / kKeys % 2];
        if (start + kKeys < end) {
            locate(heads, span, kv_head, start + kKeys, end, keys, values, 2,
                   places[start / kKeys % 2 ^ 1]);
        }
        for (int64_t part = 0; part < num_keys; part += kLanes) {
            for (int64_t pair = 0; pair < num_pairs; pair += kLanes) {
                Floats v[16];  // two dimensions each, only moved
                for (int j = 0; j < kLanes; ++j) v[j] = load<Floats>(keys + where[part + j] + 2 * pair);
                transpose(v);
                for (int i = 0; i < kLanes; ++i) store(block + (pair + i) * kLanes, v[i]);
            }
            for (int64_t i = 0; i < count; i += kQueries) {
                with_count<kQueries>(count - i, [&](auto some) {
                    pair_scores<decltype(some)::value>(pairs + i, block, num_pairs,
                                                       scores + i * kKeys + part);
                });
            }
        }
        for (int64_t i = 0; i < count; ++i) {
            auto* const own = reinterpret_cast<uint16_t*>(weights + i * kKeys / 2);
            weigh(rows, i, start, scores + i * kKeys, sums + i * dim, dim,
                  [own](int k, Floats exact) {
                      const Halves rounded = to_bf16(exact);
                      store(own + k * kLanes, rounded);
                      return from_bf16(rounded);
                  });
        }
        for (int64_t d = 0; d < dim; d += 32) {
            for (int64_t i = 0; i < count; i += kQueries) {
                with_count<kQueries>(count - i, [&](auto some) {
                    pair_gather<decltype(some)::value>(values + d, where, (num_keys + 1) / 2,
                                                       weights + i * kKeys / 2, kKeys / 2,
                                                       sums + i * dim + d, dim);
                });
            }
        }
    };
    go_through(rows, dim, reach, sums, block_from, [&](int64_t i, const float* own, float total) {
        put_pairs(rows.out[i], own, total, dim);
    });
}

bool goes_in_pairs(const Heads& heads) { return heads.is_bf16 && heads.dim % 32 == 0; }

void attend_somehow(const Heads& heads, const Span& span, int64_t kv_head, int64_t first,
                    int64_t last, const float* queries, int64_t ldq, const void* keys,
                    const void* values, const Reach& reach) {
    if (!goes_in_pairs(heads)) {
        attend_plain(heads, span, kv_head, first, last, queries, ldq, keys, values, reach);
        return;
    }
    in_groups(heads, first, last, [&](int64_t row, int64_t end) {
        attend_in_pairs(heads, span, kv_head, row, end, queries, ldq,
                        static_cast<const uint16_t*>(keys), static_cast<const uint16_t*>(values),
                        reach);
    });
}

void conclude_somehow(const Heads& heads, const float* parts, int64_t step, int64_t num_stretches,
                      float* out) {
    if (!goes_in_pairs(heads)) {
        conclude_plain(heads, parts, step, num_stretches, out);
        return;
    }
    alignas(64) float sums[kMaxDim];
    const float total = joined(parts, step, num_stretches, heads.dim, sums);
    put_pairs(out, sums, total, heads.dim);
}

}  // namespace

const Kernels kernels_of_avx512_bf16 = {
    "avx512_bf16",          {Input::f32, Input::bf16, Input::bf16, Input::i16},
    multiply_some,          sum_blocks,
    normalize,              round_to_bf16,
    quantise,               turn,
    attend<attend_somehow>, attend_stretch<attend_somehow>,
    conclude_somehow,       allow,
    peak,                   weigh_tokens,
};

}  // namespace palmette

#endif
