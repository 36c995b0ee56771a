// Processors that multiply pairs of bfloat16: inputs are rounded to it, and every product is summed
// in float.

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

inline __m512 multiply_pairs(__m512 sum, __m512i x, __m512i w) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
}

// R rows with T tiles whose weights lie `size` bytes apart; `is_first`: of those that go through them.
template <int R, int T>
PALMETTE_INLINE void pairs_bf16(const uint8_t* w, int64_t size, int64_t k, const uint16_t* x, int64_t ldx,
                       bool is_first, __m512 (*y)[T]) {
    PALMETTE_UNROLLED (int r = 0; r < R; ++r)
        PALMETTE_UNROLLED (int t = 0; t < T; ++t) y[r][t] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i += 2) {
        __m512i wi[T];
        PALMETTE_UNROLLED (int t = 0; t < T; ++t) wi[t] = _mm512_loadu_si512(w + t * size + 32 * i);
        if (is_first) fetch_next<T>(w + 32 * i, size, 64);
        PALMETTE_UNROLLED (int r = 0; r < R; ++r) {
            const __m512i xi = word_at(x + r * ldx + i);
            PALMETTE_UNROLLED (int t = 0; t < T; ++t) y[r][t] = multiply_pairs(y[r][t], xi, wi[t]);
        }
    }
}

// The lowest exponents of a block of b12, where they are in each pair of numbers.
inline __m512i lowest_of(const uint8_t* tile, int64_t block) {
    const __m512i each = _mm512_cvtepu8_epi32(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile + 16 * block)));
    return _mm512_or_si512(_mm512_slli_epi32(each, 7), _mm512_slli_epi32(each, 23));
}

// A pair of inputs of b12 as bf16 has them: `halves` are words whose bits 8 to 11 are theirs, and
// `signs` words whose highest bits are their signs.
inline __m512i pair_of(const uint8_t* bytes, __m512i halves, __m512i signs, __m512i lowest) {
    const __m512i own =
        _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
    constexpr int kAndOr = 0xEA, kOrAnd = 0xF8;  // (a & b) | c, and a | (b & c)
    const __m512i size =
        _mm512_ternarylogic_epi32(halves, _mm512_set1_epi16(0x0700), own, kAndOr);
    const __mmask32 is_some = _mm512_test_epi16_mask(size, size);
    const __m512i number = _mm512_mask_add_epi16(size, is_some, size, lowest);
    return _mm512_ternarylogic_epi32(number, signs,
                                     _mm512_set1_epi16(static_cast<int16_t>(0x8000)), kOrAnd);
}

// Two pairs, of 32 inputs `block` those from 4 * index on.
inline void pairs_of_b12(const uint8_t* block, int index, __m512i lowest, __m512i* pairs) {
    const __m512i both = _mm512_cvtepu8_epi16(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 512 + 32 * index)));
    const __m512i up = _mm512_slli_epi16(both, 8);
    pairs[0] = pair_of(block + 64 * index, up, _mm512_slli_epi16(both, 12), lowest);
    pairs[1] = pair_of(block + 64 * index + 32, _mm512_slli_epi16(both, 4), up, lowest);
}

// As `pairs_bf16`, to the bit, but for what is outside. The tiles are written to `expanded` as bf16 has
// them, one after the other, unless that is null.
template <int R, int T>
PALMETTE_INLINE void pairs_of_12_bits(const uint8_t* w, int64_t size, int64_t k, const uint16_t* x,
                                      int64_t ldx, uint8_t* expanded, __m512 (*y)[T]) {
    PALMETTE_UNROLLED (int r = 0; r < R; ++r)
        PALMETTE_UNROLLED (int t = 0; t < T; ++t) y[r][t] = _mm512_setzero_ps();
    fetch_next<T>(w, size, room(k / 2));
    fetch_next<T>(w + outsides_at(k), size, 1);
    const uint8_t* block = w + room(k / 2);
    for (int64_t b = 0; b < k / kBlock; ++b, block += kBlockOfB12) {
        __m512i lowest[T];
        PALMETTE_UNROLLED (int t = 0; t < T; ++t) lowest[t] = lowest_of(w + t * size, b);
        for (int i = 0; i < 8; ++i) {
            fetch_next<T>(block + 64 * i, size, 64);
            if (i % 2 == 0) fetch_next<T>(block + 512 + 32 * i, size, 64);
            __m512i pairs[T][2];
            PALMETTE_UNROLLED (int t = 0; t < T; ++t)
                pairs_of_b12(block + t * size, i, lowest[t], pairs[t]);
            PALMETTE_UNROLLED (int j = 0; j < 2; ++j) {
                if (expanded) {
                    PALMETTE_UNROLLED (int t = 0; t < T; ++t)
                        _mm512_storeu_si512(expanded + t * 32 * k + 64 * j, pairs[t][j]);
                }
                PALMETTE_UNROLLED (int r = 0; r < R; ++r) {
                    const __m512i xi = word_at(x + r * ldx + b * kBlock + 4 * i + 2 * j);
                    PALMETTE_UNROLLED (int t = 0; t < T; ++t)
                        y[r][t] = multiply_pairs(y[r][t], xi, pairs[t][j]);
                }
            }
            if (expanded) expanded += 128;
        }
    }
}

// Adds what is outside, of one tile, whose sums lie `step` apart.
template <int R>
PALMETTE_INLINE void add_outside(const uint8_t* tile, int64_t k, const uint16_t* x, int64_t ldx, __m512* y,
                        int step) {
    uint64_t count;
    std::memcpy(&count, tile + outsides_at(k), sizeof count);
    for (uint64_t i = 0; i < count; ++i) {
        Outside one;
        std::memcpy(&one, tile + outsides_at(k) + (1 + i) * sizeof one, sizeof one);
        const auto lane = static_cast<__mmask16>(1u << one.lane);
        const float weight = float_of(static_cast<int32_t>(static_cast<uint32_t>(one.bits) << 16));
        PALMETTE_UNROLLED (int r = 0; r < R; ++r) {
            const uint32_t bits = static_cast<uint32_t>(x[r * ldx + one.input]) << 16;
            const __m512 product = _mm512_set1_ps(weight * float_of(static_cast<int32_t>(bits)));
            y[r * step] = _mm512_mask_add_ps(y[r * step], lane, y[r * step], product);
        }
    }
}

constexpr Input kTakes[kNumFormats] = {Input::f32, Input::bf16, Input::i8,  Input::i16,
                                       Input::i8,  Input::i16,  Input::bf16};

template <Format format, int R, int T>
PALMETTE_INLINE void products_of_bf16(const uint8_t* w, int64_t size, int64_t k, const void* x, int64_t ldx,
                                      bool is_first, uint8_t* expanded, __m512 (*y)[T]) {
    const auto* const rows = static_cast<const uint16_t*>(x);
    if constexpr (format == Format::bf16) {
        pairs_bf16<R, T>(w, size, k, rows, ldx, is_first, y);
        return;
    }
    if (is_first) {
        pairs_of_12_bits<R, T>(w, size, k, rows, ldx, expanded, y);
    } else {
        pairs_bf16<R, T>(expanded, 32 * k, k, rows, ldx, false, y);
    }
    PALMETTE_UNROLLED (int t = 0; t < T; ++t) add_outside<R>(w + t * size, k, rows, ldx, &y[0][t], T);
}

}  // namespace
}  // namespace palmette

#include "several_tiles.inl"

namespace palmette {
namespace {

void multiply_some(const Linear& linear, const Rows& rows, int64_t num_rows, float* y, int64_t ldy,
                   int64_t first_tile, int64_t last_tile, Ending ending) {
    constexpr decltype(&multiply_some) all_of[kNumFormats] = {
        multiply,
        multiply_several_as<Format::bf16>,
        multiply_several_as<Format::q4>,
        multiply_several_as<Format::q8>,
        multiply_several_as<Format::q5>,
        multiply_several_as<Format::q6>,
        multiply_several_as<Format::b12>,
    };
    all_of[static_cast<int>(linear.format)](linear, rows, num_rows, y, ldy, first_tile, last_tile, ending);
}

// Attention as `attend_some` has it, where pages and what is multiplied with them are bfloat16.
// Pairs of dimensions of a key, and of keys of a value, are multiplied at once.

inline __m512i words_at(const void* from) { return _mm512_loadu_si512(from); }

constexpr int kPairQueries = 6;  // query heads whose sums over four vectors fit the registers

// e to the x for x <= 0, within 3 millionths, and 1 for 0: for weights that are then rounded to
// bfloat16, a thousand times as coarse. Below 2^-126 it is 0.
inline __m512 raised(__m512 x) {
    const __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    const __mmask16 is_some = _mm512_cmp_ps_mask(power, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
    const __m512 rounding = _mm512_set1_ps(kRounding);
    const __m512 shifted = _mm512_add_ps(power, rounding);
    const __m512 rest = _mm512_sub_ps(power, _mm512_sub_ps(shifted, rounding));
    __m512 p = _mm512_set1_ps(9.58285e-3f);
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.590643e-2f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.24024099f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.69312419f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(
        _mm512_maskz_add_epi32(is_some, _mm512_castps_si512(p), exponent));
}

// Scores of R query heads for 16 keys in each of P vectors.
template <int R, int P>
inline void pair_scores(const uint32_t* const* queries, const uint32_t* keys, int64_t num_pairs,
                        float* scores) {
    __m512 acc[R][P];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) acc[r][p] = _mm512_setzero_ps();
    for (int64_t i = 0; i < num_pairs; ++i) {
        __m512i k[P];
        for (int p = 0; p < P; ++p) k[p] = words_at(keys + (p * num_pairs + i) * kLanes);
        for (int r = 0; r < R; ++r) {
            const __m512i q = word_at(queries[r] + i);
            for (int p = 0; p < P; ++p) acc[r][p] = multiply_pairs(acc[r][p], q, k[p]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) _mm512_storeu_ps(scores + r * kKeys + p * kLanes, acc[r][p]);
}

// Sums of C times 32 dimensions of a value: the first vector of 32 holds 0-3, 8-11, 16-19, 24-27.
template <int R, int C>
inline void pair_gather(const uint16_t* values, const int64_t* where, int64_t num_pairs,
                        const uint32_t* weights, int64_t ldw, float* sums, int64_t ld,
                        const Places* ahead) {
    __m512 acc[R][2 * C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < 2 * C; ++c) acc[r][c] = _mm512_loadu_ps(sums + r * ld + c * kLanes);
    for (int64_t i = 0; i < num_pairs; ++i) {
        __m512i pair[2 * C];
        for (int c = 0; c < C; ++c) {
            const __m512i one = words_at(values + where[2 * i] + 32 * c);
            const __m512i other = words_at(values + where[2 * i + 1] + 32 * c);
            pair[2 * c] = _mm512_unpacklo_epi16(one, other);
            pair[2 * c + 1] = _mm512_unpackhi_epi16(one, other);
        }
        if (ahead) ahead->fetch_values(2 * i, 2);
        for (int r = 0; r < R; ++r) {
            const __m512i w = word_at(weights + r * ldw + i);
            for (int c = 0; c < 2 * C; ++c) acc[r][c] = multiply_pairs(acc[r][c], w, pair[c]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < 2 * C; ++c) _mm512_storeu_ps(sums + r * ld + c * kLanes, acc[r][c]);
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
    alignas(64) uint32_t block[kMaxDim / 2 * kKeys];
    alignas(64) uint32_t weights[kMaxQueries * kKeys / 2];
    alignas(64) float sums[kMaxQueries * kMaxDim];
    alignas(64) float scores[kMaxQueries * kKeys];
    const uint32_t* pairs[kMaxQueries];
    for (int64_t i = 0; i < count; ++i) {
        pairs[i] = query + i * num_pairs;
        round_to_bf16(rows.query[i], dim, reinterpret_cast<uint16_t*>(query + i * num_pairs));
    }
    Places places{heads,  span, kv_head, first_of(reach), last_of(reach, end),
                  keys, values, 2, {}, nullptr};
    places.find_first();
    const auto block_from = [&](int64_t start) {
        const int64_t num_keys = end - start < kKeys ? end - start : kKeys;
        const int64_t* const where = places.block(start);
        for (int64_t part = 0; part < num_keys; part += kLanes) {
            places.fetch_keys(part, kLanes);
            for (int64_t pair = 0; pair < num_pairs; pair += kLanes) {
                Floats v[16];  // two dimensions each, only moved
                for (int j = 0; j < kLanes; ++j) v[j] = load<Floats>(keys + where[part + j] + 2 * pair);
                transpose(v);
                uint32_t* const to = block + (part / kLanes * num_pairs + pair) * kLanes;
                for (int i = 0; i < kLanes; ++i) store(to + i * kLanes, v[i]);
            }
        }
        for (int64_t i = 0; i < count; i += kPairQueries) {
            with_count<kPairQueries>(count - i, [&](auto some) {
                constexpr int R = decltype(some)::value;
                float* const own = scores + i * kKeys;
                if (num_keys > kKeys - kLanes) {
                    pair_scores<R, 4>(pairs + i, block, num_pairs, own);
                    return;
                }
                for (int64_t part = 0; part < num_keys; part += kLanes)
                    pair_scores<R, 1>(pairs + i, block + part * num_pairs, num_pairs, own + part);
            });
        }
        for (int64_t i = 0; i < count; ++i) {
            auto* const own = reinterpret_cast<uint16_t*>(weights + i * kKeys / 2);
            weigh(
                rows, i, start, scores + i * kKeys, sums + i * dim, dim,
                [](Floats x) { return floats_of(raised(vector_of(x))); },
                [own](int k, Floats exact) {
                    const Halves rounded = to_bf16(exact);
                    store(own + k * kLanes, rounded);
                    return from_bf16(rounded);
                });
        }
        const int64_t key_pairs = (num_keys + 1) / 2;
        for (int64_t i = 0; i < count; i += kPairQueries) {
            with_count<kPairQueries>(count - i, [&](auto some) {
                constexpr int R = decltype(some)::value;
                const uint32_t* const own = weights + i * kKeys / 2;
                const Places* const ahead = i == 0 ? &places : nullptr;
                int64_t d = 0;
                for (; d + 64 <= dim; d += 64) {
                    pair_gather<R, 2>(values + d, where, key_pairs, own, kKeys / 2,
                                      sums + i * dim + d, dim, d == 0 ? ahead : nullptr);
                }
                for (; d < dim; d += 32) {
                    pair_gather<R, 1>(values + d, where, key_pairs, own, kKeys / 2,
                                      sums + i * dim + d, dim, d == 0 ? ahead : nullptr);
                }
            });
        }
    };
    go_through_apart(rows, dim, reach, sums, block_from, [&](int64_t i, const float* own, float total) {
        put_pairs(rows.out[i], own, total, dim);
    });
}

// The same for so many query heads that each has a lane of V vectors: scores need no transposed keys
// then, and the softmax no steps across lanes. Every sum has the terms of `attend_in_pairs` in their
// order, so that the bits are the same.

// As a number of its own: a product that goes into a sum would otherwise be joined with it.
inline __m512 rounded(__m512 v) {
    asm("" : "+v"(v));
    return v;
}

// Words of the lower half and of the upper one in turn.
alignas(64) constexpr uint16_t kInTurn[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,
                                              21, 6, 22, 7, 23, 8,  24, 9,  25, 10, 26,
                                              11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

template <int V> class Lanes {
public:
    Lanes(const Heads& heads, const Span& span, int64_t kv_head, const Together& rows,
          const uint16_t* keys, const uint16_t* values, const Reach& reach)
        : heads_(heads), keys_(keys), values_(values), end_(rows.most_seen),
          least_seen_(rows.most_seen),
          places_{heads,  span, kv_head, first_of(reach), last_of(reach, end_),
                  keys, values, 2, {}, nullptr} {
        alignas(64) uint16_t taken[kMaxDim];
        alignas(64) int32_t seen[kWidth];
        std::memset(query_, 0, sizeof(uint32_t) * static_cast<std::size_t>(heads.dim / 2 * kWidth));
        for (int64_t i = 0; i < kWidth; ++i) {
            const int64_t num_seen = rows.num_seen[i < rows.count ? i : 0];
            seen[i] = static_cast<int32_t>(num_seen);
            if (num_seen < least_seen_) least_seen_ = num_seen;
        }
        for (int v = 0; v < V; ++v) seen_[v] = _mm512_load_si512(seen + v * kLanes);
        for (int64_t i = 0; i < rows.count; ++i) {
            round_to_bf16(rows.query[i], heads.dim, taken);
            for (int64_t pair = 0; pair < heads.dim / 2; ++pair) {
                std::memcpy(query_ + pair * kWidth + i, taken + 2 * pair, sizeof(uint32_t));
            }
        }
        places_.find_first();
    }

    void begin() {
        for (int v = 0; v < V; ++v) {
            peak_[v] = _mm512_set1_ps(-INFINITY);
            total_[v] = _mm512_setzero_ps();
        }
        std::memset(sums_, 0, sizeof(float) * static_cast<std::size_t>(heads_.dim * kWidth));
    }

    void block(int64_t start) {
        const int64_t num_keys = end_ - start < kKeys ? end_ - start : kKeys;
        const int64_t* const where = places_.block(start);
        for (int64_t j = 0; j < num_keys; j += kTogether) {
            places_.fetch_keys(j, kTogether);
            score(where + j, scores_ + j * kWidth);
        }
        for (int64_t j = least_seen_ - start < 0 ? 0 : least_seen_ - start; j < kKeys; ++j) {
            for (int v = 0; v < V; ++v) hide(start + j, v, scores_ + j * kWidth + v * kLanes);
        }
        for (int v = 0; v < V; ++v) weigh(v);
        mix(where, (num_keys + 1) / 2);
        for (int64_t d = 0; d < heads_.dim; d += kTogether) gather(d, (num_keys + 1) / 2);
    }

    // Peaks, totals and sums of each query head by itself.
    void finish(Together& rows, float* sums) const {
        alignas(64) float peaks[kWidth], totals[kWidth];
        for (int v = 0; v < V; ++v) {
            _mm512_store_ps(peaks + v * kLanes, peak_[v]);
            _mm512_store_ps(totals + v * kLanes, total_[v]);
        }
        for (int64_t i = 0; i < rows.count; ++i) {
            rows.peak[i] = peaks[i];
            rows.total[i] = totals[i];
        }
        for (int64_t d = 0; d < heads_.dim; d += kLanes) {
            for (int64_t first = 0; first < rows.count; first += kLanes) {
                Floats v[16];
                for (int i = 0; i < kLanes; ++i) v[i] = load<Floats>(sums_ + (d + i) * kWidth + first);
                transpose(v);
                for (int64_t i = first; i < rows.count && i < first + kLanes; ++i) {
                    store(sums + i * heads_.dim + d, v[i - first]);
                }
            }
        }
    }

private:
    static constexpr int kWidth = V * kLanes;
    static constexpr int kTogether = V == 1 ? 16 : 8;  // keys, and dimensions: all sums are registers

    void score(const int64_t* where, float* scores) const {
        const uint16_t* key[kTogether];
        for (int j = 0; j < kTogether; ++j) key[j] = keys_ + where[j];
        const uint32_t* query = query_;
        const int64_t num_pairs = heads_.dim / 2;
        __m512 acc[kTogether][V];
        for (int j = 0; j < kTogether; ++j)
            for (int v = 0; v < V; ++v) acc[j][v] = _mm512_setzero_ps();
        for (int64_t pair = 0; pair < num_pairs; ++pair, query += kWidth) {
            __m512i q[V];
            for (int v = 0; v < V; ++v) q[v] = words_at(query + v * kLanes);
            for (int j = 0; j < kTogether; ++j) {
                const __m512i k = word_at(key[j] + 2 * pair);
                for (int v = 0; v < V; ++v) acc[j][v] = multiply_pairs(acc[j][v], q[v], k);
            }
        }
        for (int j = 0; j < kTogether; ++j)
            for (int v = 0; v < V; ++v) _mm512_store_ps(scores + j * kWidth + v * kLanes, acc[j][v]);
    }

    // No lane sees a key that comes after its row.
    void hide(int64_t key, int v, float* scores) const {
        const __mmask16 is_seen =
            _mm512_cmpgt_epi32_mask(seen_[v], _mm512_set1_epi32(static_cast<int32_t>(key)));
        const __m512 hidden = _mm512_set1_ps(-INFINITY);
        _mm512_store_ps(scores, _mm512_mask_mov_ps(hidden, is_seen, _mm512_load_ps(scores)));
    }

    // As `weigh` in all lanes at once.
    void weigh(int v) {
        const float* const scores = scores_ + v * kLanes;
        __m512 most[4];
        for (int k = 0; k < 4; ++k) most[k] = _mm512_load_ps(scores + k * kWidth);
        for (int64_t j = 4; j < kKeys; j += 4)
            for (int k = 0; k < 4; ++k)
                most[k] = _mm512_max_ps(most[k], _mm512_load_ps(scores + (j + k) * kWidth));
        const __m512 now = _mm512_max_ps(
            _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3])), peak_[v]);
        // Where nothing is seen yet, all weights are 0.
        const __m512 none = _mm512_set1_ps(-INFINITY);
        const __m512 peak = _mm512_mask_mov_ps(now, _mm512_cmpeq_ps_mask(now, none), _mm512_setzero_ps());
        scale_[v] = vector_of(exp(floats_of(_mm512_sub_ps(peak_[v], peak))));
        peak_[v] = now;
        const __m512i halves = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
        const __m512i in_turn = _mm512_load_si512(kInTurn);
        __m512 added[kLanes];
        for (int l = 0; l < kLanes; l += 2) {
            __m512 even[4], odd[4];
            for (int k = 0; k < 4; ++k) {
                const int64_t j = k * kLanes + l;
                const __m512 one = _mm512_sub_ps(_mm512_load_ps(scores + j * kWidth), peak);
                const __m512 other = _mm512_sub_ps(_mm512_load_ps(scores + (j + 1) * kWidth), peak);
                const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh(raised(other), raised(one));
                const __m512i pair = _mm512_permutexvar_epi16(in_turn, apart);
                _mm512_store_si512(weights_ + j / 2 * kWidth + v * kLanes, pair);
                even[k] = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
                odd[k] = _mm512_castsi512_ps(_mm512_and_si512(pair, halves));
            }
            added[l] = _mm512_add_ps(_mm512_add_ps(even[0], even[1]), _mm512_add_ps(even[2], even[3]));
            added[l + 1] = _mm512_add_ps(_mm512_add_ps(odd[0], odd[1]), _mm512_add_ps(odd[2], odd[3]));
        }
        for (int width = 8; width > 0; width /= 2)
            for (int l = 0; l < width; ++l) added[l] = _mm512_add_ps(added[l], added[l + width]);
        total_[v] = _mm512_add_ps(rounded(_mm512_mul_ps(total_[v], scale_[v])), added[0]);
    }

    // Pairs of values, dimension by dimension in the order of `pair_gather`.
    void mix(const int64_t* where, int64_t num_pairs) {
        for (int64_t i = 0; i < num_pairs; ++i) {
            places_.fetch_values(2 * i, 2);
            for (int64_t d = 0; d < heads_.dim; d += 32) {
                const __m512i one = words_at(values_ + where[2 * i] + d);
                const __m512i other = words_at(values_ + where[2 * i + 1] + d);
                uint32_t* const to = mixed_ + i * heads_.dim + d;
                _mm512_store_si512(to, _mm512_unpacklo_epi16(one, other));
                _mm512_store_si512(to + kLanes, _mm512_unpackhi_epi16(one, other));
            }
        }
    }

    void gather(int64_t d, int64_t num_pairs) {
        __m512 acc[kTogether][V];
        float* const sums = sums_ + d * kWidth;
        for (int i = 0; i < kTogether; ++i) {
            for (int v = 0; v < V; ++v) {
                acc[i][v] = rounded(_mm512_mul_ps(_mm512_load_ps(sums + i * kWidth + v * kLanes), scale_[v]));
            }
        }
        for (int64_t pair = 0; pair < num_pairs; ++pair) {
            __m512i w[V];
            for (int v = 0; v < V; ++v) w[v] = words_at(weights_ + pair * kWidth + v * kLanes);
            for (int i = 0; i < kTogether; ++i) {
                const __m512i value = word_at(mixed_ + pair * heads_.dim + d + i);
                for (int v = 0; v < V; ++v) acc[i][v] = multiply_pairs(acc[i][v], w[v], value);
            }
        }
        for (int i = 0; i < kTogether; ++i)
            for (int v = 0; v < V; ++v) _mm512_store_ps(sums + i * kWidth + v * kLanes, acc[i][v]);
    }

    const Heads& heads_;
    const uint16_t* const keys_;
    const uint16_t* const values_;
    const int64_t end_;
    int64_t least_seen_;
    Places places_;
    __m512i seen_[V];  // how many keys, of each lane
    __m512 peak_[V], total_[V], scale_[V];
    alignas(64) uint32_t query_[kMaxDim / 2 * kWidth];    // [pair of dimensions][lane]
    alignas(64) float scores_[kKeys * kWidth];            // [key][lane]
    alignas(64) uint32_t weights_[kKeys / 2 * kWidth];    // [pair of keys][lane]
    alignas(64) uint32_t mixed_[kKeys / 2 * kMaxDim];     // [pair of keys][dimension]
    alignas(64) float sums_[kMaxDim * kWidth];            // [dimension][lane]
};

template <int V>
void attend_in_lanes(const Heads& heads, const Span& span, int64_t kv_head, int64_t first,
                     int64_t last, const float* queries, int64_t ldq, const uint16_t* keys,
                     const uint16_t* values, const Reach& reach) {
    Together rows = together(heads, span, kv_head, first, last, queries, ldq, reach);
    alignas(64) float sums[kMaxQueries * kMaxDim];
    Lanes<V> lanes(heads, span, kv_head, rows, keys, values, reach);
    go_through(
        rows, heads.dim, reach, sums, [&] { lanes.begin(); },
        [&](int64_t start) { lanes.block(start); }, [&] { lanes.finish(rows, sums); },
        [&](int64_t i, const float* own, float total) {
            put_pairs(rows.out[i], own, total, heads.dim);
        });
}

constexpr int64_t kLanesFrom = 12;  // query heads, that go better each in a lane

bool goes_in_pairs(const Heads& heads) { return heads.is_bf16 && heads.dim % 32 == 0; }

void attend_somehow(const Heads& heads, const Span& span, int64_t kv_head, int64_t first,
                    int64_t last, const float* queries, int64_t ldq, const void* keys,
                    const void* values, const Reach& reach) {
    if (!goes_in_pairs(heads)) {
        attend_plain(heads, span, kv_head, first, last, queries, ldq, keys, values, reach);
        return;
    }
    in_groups(heads, first, last, [&](int64_t row, int64_t end) {
        const int64_t count = (end - row) * (heads.num_heads / heads.num_kv_heads);
        const auto run = count < kLanesFrom     ? attend_in_pairs
                         : count <= kLanes      ? attend_in_lanes<1>
                         : count <= 2 * kLanes  ? attend_in_lanes<2>
                                                : attend_in_lanes<3>;
        run(heads, span, kv_head, row, end, queries, ldq, static_cast<const uint16_t*>(keys),
            static_cast<const uint16_t*>(values), reach);
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
    "avx512_bf16",
    true,
    {kTakes[0], kTakes[1], kTakes[2], kTakes[3], kTakes[4], kTakes[5], kTakes[6]},
    {kTakes[0], kTakes[1], kTakes[2], kTakes[3], kTakes[4], kTakes[5], kTakes[6]},
    multiply_some,
    sum_blocks,
    normalize,
    round_to_bf16,
    quantise,
    quantise_bytes,
    turn,
    attend<attend_somehow>,
    attend_stretch<attend_somehow>,
    conclude_somehow,
    allow,
    peak,
    weigh_tokens,
    total_of_tokens,
};

}  // namespace palmette

#endif
