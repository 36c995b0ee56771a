// Products in whole numbers for processors that have them (AVX-512 with VNNI), of several tiles at a time:
// weights of 4 and 5 bits with inputs of 8, and weights of 6 and 8 with inputs of 16, as many as share a
// scale without an error. Included after `kernels.inl`.

// A loop over what registers hold: as it is unrolled none of them has to be in memory.
#define PALMETTE_UNROLLED _Pragma("GCC unroll 16") for

namespace palmette {
namespace {

// Four bytes in each lane: two numbers of 16 bits, or four of 8.
inline __m512i word_at(const void* from) {
    // Of an integer the compiler would load it into another register first.
    float word;
    std::memcpy(&word, from, sizeof word);
    return _mm512_castps_si512(_mm512_set1_ps(word));
}

inline __m512 half_at(const uint8_t* from) {
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// A weight may be read faster than the processor fetches it by itself, since tiles are short stretches
// of memory: what follows the T tiles at hand is fetched meanwhile.
template <int T> inline void fetch_next(const uint8_t* w, int64_t size, int64_t num_bytes) {
    for (int t = 0; t < T; ++t)
        for (int64_t line = 0; line < num_bytes; line += 64) __builtin_prefetch(w + (t + T) * size + line);
}

inline __m512i vector_of(Words v) {
    __m512i out;
    std::memcpy(&out, &v, sizeof out);
    return out;
}

inline __m512 vector_of(Floats v) {
    __m512 out;
    std::memcpy(&out, &v, sizeof out);
    return out;
}

inline Floats floats_of(__m512 v) {
    Floats out;
    std::memcpy(&out, &v, sizeof out);
    return out;
}

// Adds the sums over a block, in whole numbers, as what they mean; `own` is the first row's.
template <int R, int T>
PALMETTE_INLINE void add_scaled(const uint8_t* w, int64_t size, const Bytes32* own, int64_t lds,
                                const __m512i (*part)[T], __m512 (*y)[T]) {
    PALMETTE_UNROLLED (int t = 0; t < T; ++t) {
        const __m512 scale = half_at(w + t * size), offset = half_at(w + t * size + 32);
        PALMETTE_UNROLLED (int r = 0; r < R; ++r) {
            const Bytes32& row = own[r * lds / 4];  // four floats long
            const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(row.scale));
            y[r][t] = _mm512_fmadd_ps(both, _mm512_maskz_cvtepi32_ps(0xffff, part[r][t]), y[r][t]);
            y[r][t] = _mm512_fmadd_ps(offset, _mm512_set1_ps(row.sum), y[r][t]);
        }
    }
}

template <Format format, int R, int T>
PALMETTE_INLINE void bytes_of_few_bits(const uint8_t* w, int64_t size, int64_t k, const int8_t* x, int64_t ldx,
                              const float* sums, int64_t lds, bool is_first, __m512 (*y)[T]) {
    const __m512i nibbles = _mm512_set1_epi8(15);
    PALMETTE_UNROLLED (int r = 0; r < R; ++r)
        PALMETTE_UNROLLED (int t = 0; t < T; ++t) y[r][t] = _mm512_setzero_ps();
    for (int64_t b = 0; b < k / kBlock; ++b, w += block_bytes(format)) {
        __m512i part[R][T];
        PALMETTE_UNROLLED (int r = 0; r < R; ++r)
            PALMETTE_UNROLLED (int t = 0; t < T; ++t) part[r][t] = _mm512_setzero_si512();
        if (is_first) fetch_next<T>(w, size, block_bytes(format));
#pragma GCC unroll 4
        for (int quarter = 0; quarter < 4; ++quarter) {
            __m512i first[T], others[T];
            PALMETTE_UNROLLED (int t = 0; t < T; ++t) {
                const Eight eight = eight_of<format>(w + t * size, quarter);
                first[t] = vector_of(eight.first);
                others[t] = vector_of(eight.others);
            }
            const int8_t* const at = x + b * kBlock + 8 * quarter;
            PALMETTE_UNROLLED (int r = 0; r < R; ++r) {
                const __m512i one = word_at(at + r * ldx), other = word_at(at + r * ldx + 4);
                PALMETTE_UNROLLED (int t = 0; t < T; ++t) {
                    part[r][t] = _mm512_dpbusd_epi32(part[r][t], first[t], one);
                    part[r][t] = _mm512_dpbusd_epi32(part[r][t], others[t], other);
                }
            }
        }
        PALMETTE_UNROLLED (int r = 0; r < R; ++r) {
            const Bytes32& own = bytes_of(sums + r * lds)[b];
            const uint8_t* const at = w + 64 + (own.place & ~63);
            const __m128i up = _mm_cvtsi32_si128(own.place & 4);
            const __m512i sixteens = word_at(&own.sixteens);
            PALMETTE_UNROLLED (int t = 0; t < T; ++t) {
                const __m512i packed = _mm512_sll_epi32(_mm512_loadu_si512(at + t * size), up);
                const __m512i sixteenfold = _mm512_andnot_si512(nibbles, packed);
                part[r][t] = _mm512_dpbusd_epi32(part[r][t], sixteenfold, sixteens);
                if constexpr (format == Format::q5) {  // sixteen times a fifth bit is no byte
                    const __m512i bits = _mm512_srl_epi32(_mm512_loadu_si512(w + t * size + 320),
                                                          _mm_cvtsi32_si128(fifth_of(own)));
                    const __m512i ones = _mm512_and_si512(bits, _mm512_set1_epi8(1));
                    const __m512i apart =
                        _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, sixteens);
                    part[r][t] = _mm512_add_epi32(part[r][t], _mm512_slli_epi32(apart, 8));
                }
            }
        }
        add_scaled<R, T>(w, size, bytes_of(sums) + b, lds, part, y);
    }
}

// For many rows, T tiles are written as bytes once: [t] of as many as tiles of bfloat16 have, of which
// the first half are [k / 4][16] words of four inputs, and the others the same times kFold.
template <Format format> constexpr int kFold = format == Format::q5 ? 8 : 16;  // what fits a byte

template <Format format, int T>
inline void expand_few_bits(const uint8_t* w, int64_t size, int64_t k, uint8_t* expanded) {
    for (int t = 0; t < T; ++t) {
        const uint8_t* block = w + t * size;
        uint8_t* to = expanded + t * 32 * k;
        for (int64_t b = 0; b < k / kBlock; ++b, block += block_bytes(format)) {
            fetch_next<T>(block, size, block_bytes(format));
#pragma GCC unroll 4
            for (int quarter = 0; quarter < 4; ++quarter, to += 128) {
                const Eight eight = eight_of<format>(block, quarter);
                constexpr int bits = format == Format::q5 ? 3 : 4;  // no byte runs over into the next
                store(to, eight.first);
                store(to + 64, eight.others);
                store(to + 16 * k, eight.first << bits);
                store(to + 16 * k + 64, eight.others << bits);
            }
        }
    }
}

// As `bytes_of_few_bits`, to the bit.
template <Format format, int R, int T>
PALMETTE_INLINE void bytes_of_expanded(const uint8_t* expanded, const uint8_t* w, int64_t size, int64_t k,
                                       const int8_t* x, int64_t ldx, const float* sums, int64_t lds,
                                       __m512 (*y)[T]) {
    PALMETTE_UNROLLED (int r = 0; r < R; ++r)
        PALMETTE_UNROLLED (int t = 0; t < T; ++t) y[r][t] = _mm512_setzero_ps();
    for (int64_t b = 0; b < k / kBlock; ++b, w += block_bytes(format), expanded += 512) {
        __m512i part[R][T];
        PALMETTE_UNROLLED (int r = 0; r < R; ++r) {
            const Bytes32& own = bytes_of(sums + r * lds)[b];
            const __m512i sixteens = word_at(&own.sixteens);
            const uint8_t* const at = expanded + 16 * k + (own.place & ~63) * 2 + (own.place & 4 ? 0 : 64);
            PALMETTE_UNROLLED (int t = 0; t < T; ++t) {
                const __m512i folded = _mm512_loadu_si512(at + t * 32 * k);
                part[r][t] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), folded, sixteens);
                if constexpr (kFold<format> == 8)
                    part[r][t] = _mm512_dpbusd_epi32(part[r][t], folded, sixteens);
            }
        }
#pragma GCC unroll 8
        for (int word = 0; word < 8; ++word) {
            __m512i four[T];
            PALMETTE_UNROLLED (int t = 0; t < T; ++t)
                four[t] = _mm512_loadu_si512(expanded + t * 32 * k + 64 * word);
            PALMETTE_UNROLLED (int r = 0; r < R; ++r) {
                const __m512i own = word_at(x + r * ldx + b * kBlock + 4 * word);
                PALMETTE_UNROLLED (int t = 0; t < T; ++t)
                    part[r][t] = _mm512_dpbusd_epi32(part[r][t], four[t], own);
            }
        }
        add_scaled<R, T>(w, size, bytes_of(sums) + b, lds, part, y);
    }
}

// Bytes with signs of inputs 4 * word to 4 * word + 3.
template <Format format> inline __m512i signed_bytes(const uint8_t* block, int word) {
    if constexpr (format == Format::q8) return _mm512_loadu_si512(block + 32 + 64 * word);
    const Eight eight = eight_of<format>(block, word / 2);
    return _mm512_sub_epi8(vector_of(word % 2 ? eight.others : eight.first), _mm512_set1_epi8(32));
}

template <Format format, int R, int T>
PALMETTE_INLINE void pairs_of_bytes(const uint8_t* w, int64_t size, int64_t k, const int16_t* x, int64_t ldx,
                           const float* scales, int64_t lds, bool is_first, __m512 (*y)[T]) {
    // Of four bytes, the first two and the last two as the high bytes of 16 bits.
    const __m512i first = _mm512_set1_epi32(static_cast<int32_t>(0x01800080));
    const __m512i last = _mm512_set1_epi32(static_cast<int32_t>(0x03800280));
    const __m512i within = _mm512_set4_epi32(0x0C000C00, 0x08000800, 0x04000400, 0);
    constexpr int kNumScales = format == Format::q6 ? 2 : 1;  // each of as many inputs
    PALMETTE_UNROLLED (int r = 0; r < R; ++r)
        PALMETTE_UNROLLED (int t = 0; t < T; ++t) y[r][t] = _mm512_setzero_ps();
    for (int64_t b = 0; b < k / kBlock; ++b, w += block_bytes(format)) {
        if (is_first) fetch_next<T>(w, size, block_bytes(format));
#pragma GCC unroll 2
        for (int which = 0; which < kNumScales; ++which) {
            __m512i part[R][T];
            PALMETTE_UNROLLED (int r = 0; r < R; ++r)
                PALMETTE_UNROLLED (int t = 0; t < T; ++t) part[r][t] = _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int i = 0; i < 8 / kNumScales; ++i) {
                const int word = i + which * 4;
                __m512i low[T], high[T];
                PALMETTE_UNROLLED (int t = 0; t < T; ++t) {
                    const __m512i bytes = signed_bytes<format>(w + t * size, word);
                    low[t] = _mm512_srai_epi16(
                        _mm512_shuffle_epi8(bytes, _mm512_add_epi32(first, within)), 8);
                    high[t] = _mm512_srai_epi16(
                        _mm512_shuffle_epi8(bytes, _mm512_add_epi32(last, within)), 8);
                }
                const int16_t* at = x + b * kBlock + 4 * word;
                PALMETTE_UNROLLED (int r = 0; r < R; ++r) {
                    const __m512i one = word_at(at + r * ldx), other = word_at(at + r * ldx + 2);
                    PALMETTE_UNROLLED (int t = 0; t < T; ++t) {
                        part[r][t] = _mm512_dpwssd_epi32(part[r][t], one, low[t]);
                        part[r][t] = _mm512_dpwssd_epi32(part[r][t], other, high[t]);
                    }
                }
            }
            PALMETTE_UNROLLED (int t = 0; t < T; ++t) {
                const __m512 scale = half_at(w + t * size + 32 * which);
                PALMETTE_UNROLLED (int r = 0; r < R; ++r) {
                    const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(scales[r * lds + b]));
                    y[r][t] =
                        _mm512_fmadd_ps(both, _mm512_maskz_cvtepi32_ps(0xffff, part[r][t]), y[r][t]);
                }
            }
        }
    }
}

}  // namespace
}  // namespace palmette
