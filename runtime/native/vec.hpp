// Sixteen numbers at a time, in as many registers as the processor needs for them
// (PALMETTE_WIDTH bytes each).

#pragma once

#include <cstdint>
#include <cstring>

#if PALMETTE_WIDTH >= 32
#include <immintrin.h>
#endif

#define PALMETTE_INLINE inline __attribute__((always_inline))

namespace palmette {
namespace {  // each file is compiled for another processor, and its functions are its own

constexpr int kLanes = 16;
constexpr int kParts = 64 / PALMETTE_WIDTH;
constexpr int kPartLanes = PALMETTE_WIDTH / 4;

typedef float FloatPart __attribute__((vector_size(PALMETTE_WIDTH)));
typedef int32_t IntPart __attribute__((vector_size(PALMETTE_WIDTH)));
typedef uint32_t WordPart __attribute__((vector_size(PALMETTE_WIDTH)));
typedef uint16_t HalfPart __attribute__((vector_size(PALMETTE_WIDTH / 2)));
typedef uint8_t BytePart __attribute__((vector_size(PALMETTE_WIDTH / 4)));

struct Floats {
    FloatPart p[kParts];
};
struct Ints {
    IntPart p[kParts];
};
struct Words {
    WordPart p[kParts];
};
struct Halves {
    HalfPart p[kParts];
};
struct Bytes {
    BytePart p[kParts];
};

// Part by part, so that what is loaded need not lie in memory in between.
template <class V> PALMETTE_INLINE V load(const void* from) {
    V v;
    for (int i = 0; i < kParts; ++i)
        std::memcpy(&v.p[i], static_cast<const uint8_t*>(from) + i * sizeof v.p[i], sizeof v.p[i]);
    return v;
}

template <class V> PALMETTE_INLINE void store(void* to, V v) {
    for (int i = 0; i < kParts; ++i)
        std::memcpy(static_cast<uint8_t*>(to) + i * sizeof v.p[i], &v.p[i], sizeof v.p[i]);
}

PALMETTE_INLINE Floats all(float value) {
    Floats v;
    for (int i = 0; i < kParts; ++i) v.p[i] = value - FloatPart{};
    return v;
}

#define PALMETTE_BINARY(V, op)                                                                     \
    PALMETTE_INLINE V operator op(V a, V b) {                                                      \
        for (int i = 0; i < kParts; ++i) a.p[i] = a.p[i] op b.p[i];                                \
        return a;                                                                                  \
    }
#define PALMETTE_SCALAR(V, S, op)                                                                  \
    PALMETTE_INLINE V operator op(V a, S b) {                                                      \
        for (int i = 0; i < kParts; ++i) a.p[i] = a.p[i] op b;                                     \
        return a;                                                                                  \
    }
PALMETTE_BINARY(Floats, +)
PALMETTE_BINARY(Floats, -)
PALMETTE_BINARY(Floats, *)
PALMETTE_BINARY(Floats, /)
PALMETTE_SCALAR(Floats, float, +)
PALMETTE_SCALAR(Floats, float, -)
PALMETTE_SCALAR(Floats, float, *)
PALMETTE_BINARY(Words, +)
PALMETTE_BINARY(Words, |)
PALMETTE_BINARY(Words, &)
PALMETTE_SCALAR(Words, uint32_t, +)
PALMETTE_SCALAR(Words, uint32_t, &)
PALMETTE_SCALAR(Words, int, <<)
PALMETTE_SCALAR(Words, int, >>)
PALMETTE_BINARY(Ints, +)
PALMETTE_SCALAR(Ints, int, <<)
PALMETTE_SCALAR(Ints, int, >>)

PALMETTE_INLINE Floats& operator+=(Floats& a, Floats b) { return a = a + b; }

PALMETTE_INLINE Words operator~(Words a) {
    for (int i = 0; i < kParts; ++i) a.p[i] = ~a.p[i];
    return a;
}

// All bits of a lane where a < b, none elsewhere.
PALMETTE_INLINE Words less(Floats a, Floats b) {
    Words mask;
    for (int i = 0; i < kParts; ++i) mask.p[i] = (WordPart)(a.p[i] < b.p[i]);
    return mask;
}

PALMETTE_INLINE Words is_nan(Floats a) {
    Words mask;
    for (int i = 0; i < kParts; ++i) mask.p[i] = (WordPart)(a.p[i] != a.p[i]);
    return mask;
}

#define PALMETTE_SEEN_AS(name, From, To, Part)                                                     \
    PALMETTE_INLINE To name(From v) {                                                              \
        To seen;                                                                                   \
        for (int i = 0; i < kParts; ++i) seen.p[i] = (Part)v.p[i];                                 \
        return seen;                                                                               \
    }
PALMETTE_SEEN_AS(as_floats, Words, Floats, FloatPart)
PALMETTE_SEEN_AS(as_words, Floats, Words, WordPart)
PALMETTE_SEEN_AS(as_ints, Words, Ints, IntPart)

// 0 in the lanes that are `number`.
PALMETTE_INLINE Ints other_than(Ints v, int32_t number) {
    for (int i = 0; i < kParts; ++i) v.p[i] &= (IntPart)(v.p[i] != number);
    return v;
}

PALMETTE_INLINE Words widened(Halves v) {
    Words wide;
#if PALMETTE_WIDTH == 64  // which the compiler does in two halves
    __m256i halves;
    std::memcpy(&halves, &v, sizeof halves);
    wide.p[0] = (WordPart)_mm512_maskz_cvtepu16_epi32(0xffff, halves);
    return wide;
#endif
    for (int i = 0; i < kParts; ++i) wide.p[i] = __builtin_convertvector(v.p[i], WordPart);
    return wide;
}

PALMETTE_INLINE Halves narrowed(Words v) {
    Halves narrow;
    for (int i = 0; i < kParts; ++i) narrow.p[i] = __builtin_convertvector(v.p[i], HalfPart);
    return narrow;
}

// The low bytes.
PALMETTE_INLINE Bytes narrowed_twice(Words v) {
    Bytes narrow;
    for (int i = 0; i < kParts; ++i) {
        // What the compiler makes of a conversion goes through each number by itself.
#if PALMETTE_WIDTH == 64
        narrow.p[i] = (BytePart)_mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)v.p[i]);
#elif PALMETTE_WIDTH == 32
        const __m256i lowest = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                                -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                                -1, -1);
        const __m256i apart = _mm256_shuffle_epi8((__m256i)v.p[i], lowest);
        const __m256i joined =
            _mm256_permutevar8x32_epi32(apart, _mm256_setr_epi32(0, 4, 1, 1, 1, 1, 1, 1));
        const int64_t bytes = _mm_cvtsi128_si64(_mm256_castsi256_si128(joined));
        std::memcpy(&narrow.p[i], &bytes, sizeof bytes);
#else
        narrow.p[i] = __builtin_convertvector(v.p[i], BytePart);
#endif
    }
    return narrow;
}

#if PALMETTE_WIDTH >= 32
// To each 16 bits of `sum`, two bytes of `w` times two of those of `x`: what is not negative times
// what has a sign.
PALMETTE_INLINE Words with_pairs_of_bytes(Words sum, Words w, uint32_t x) {
    for (int i = 0; i < kParts; ++i) {
#if PALMETTE_WIDTH == 64
        const __m512i both = _mm512_set1_epi32(static_cast<int32_t>(x));
        sum.p[i] = (WordPart)_mm512_add_epi16((__m512i)sum.p[i],
                                              _mm512_maddubs_epi16((__m512i)w.p[i], both));
#else
        const __m256i both = _mm256_set1_epi32(static_cast<int32_t>(x));
        sum.p[i] = (WordPart)_mm256_add_epi16((__m256i)sum.p[i],
                                              _mm256_maddubs_epi16((__m256i)w.p[i], both));
#endif
    }
    return sum;
}

// Of the two 16 bits in each lane.
PALMETTE_INLINE Ints sums_of_pairs(Words v) {
    Ints sum;
    for (int i = 0; i < kParts; ++i) {
#if PALMETTE_WIDTH == 64
        sum.p[i] = (IntPart)_mm512_madd_epi16((__m512i)v.p[i], _mm512_set1_epi16(1));
#else
        sum.p[i] = (IntPart)_mm256_madd_epi16((__m256i)v.p[i], _mm256_set1_epi16(1));
#endif
    }
    return sum;
}
#endif

PALMETTE_INLINE Floats to_floats(Ints v) {
    Floats wide;
    for (int i = 0; i < kParts; ++i) wide.p[i] = __builtin_convertvector(v.p[i], FloatPart);
    return wide;
}

// bfloat16 is the upper half of a float.
PALMETTE_INLINE Floats from_bf16(Halves bits) { return as_floats(widened(bits) << 16); }

// To the nearest, ties to even; NaN stays NaN.
PALMETTE_INLINE Halves to_bf16(Floats value) {
    const Words bits = as_words(value), nan = is_nan(value);
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return narrowed((nan & 0x7fc0u) | (~nan & rounded));
}

PALMETTE_INLINE Floats from_half(Halves bits) {
    const Words wide = widened(bits);
    // Moves the exponent by a product, which makes what is subnormal as a half normal.
    const Floats magnitude = as_floats((wide & 0x7fffu) << 13) * 5.192296858534828e33f;  // 2^112
    return as_floats(as_words(magnitude) | ((wide & 0x8000u) << 16));
}

PALMETTE_INLINE Floats max(Floats a, Floats b) {
    for (int i = 0; i < kParts; ++i) a.p[i] = a.p[i] < b.p[i] ? b.p[i] : a.p[i];
    return a;
}

#if PALMETTE_WIDTH == 64
#define PALMETTE_EACH(f, w)                                                                        \
    f(0, w), f(1, w), f(2, w), f(3, w), f(4, w), f(5, w), f(6, w), f(7, w), f(8, w), f(9, w),      \
        f(10, w), f(11, w), f(12, w), f(13, w), f(14, w), f(15, w)
#elif PALMETTE_WIDTH == 32
#define PALMETTE_EACH(f, w) f(0, w), f(1, w), f(2, w), f(3, w), f(4, w), f(5, w), f(6, w), f(7, w)
#else
#define PALMETTE_EACH(f, w) f(0, w), f(1, w), f(2, w), f(3, w)
#endif
#define PALMETTE_OTHER(lane, width) ((lane) ^ (width))
#define PALMETTE_FOLDED(v, width) __builtin_shufflevector(v, v, PALMETTE_EACH(PALMETTE_OTHER, width))

// Joins lanes i and i + 8, then i and i + 4, and so on: in the same order whatever the width.
template <class Part, class Join> PALMETTE_INLINE Part folded(Part* p, const Join& join) {
    for (int apart = kParts / 2; apart > 0; apart /= 2)
        for (int i = 0; i < apart; ++i) p[i] = join(p[i], p[i + apart]);
    Part v = p[0];
#if PALMETTE_WIDTH == 64
    v = join(v, PALMETTE_FOLDED(v, 8));
#endif
#if PALMETTE_WIDTH >= 32
    v = join(v, PALMETTE_FOLDED(v, 4));
#endif
    v = join(v, PALMETTE_FOLDED(v, 2));
    return join(v, PALMETTE_FOLDED(v, 1));
}

PALMETTE_INLINE float sum(Floats v) {
    return folded(v.p, [](FloatPart a, FloatPart b) { return a + b; })[0];
}

PALMETTE_INLINE float largest(Floats v) {
    return folded(v.p, [](FloatPart a, FloatPart b) { return b > a ? b : a; })[0];
}

PALMETTE_INLINE int32_t sum(Ints v) {
    return folded(v.p, [](IntPart a, IntPart b) { return a + b; })[0];
}

PALMETTE_INLINE int32_t largest(Ints v) {
    return folded(v.p, [](IntPart a, IntPart b) { return b > a ? b : a; })[0];
}

PALMETTE_INLINE Ints max(Ints a, Ints b) {
    for (int i = 0; i < kParts; ++i) a.p[i] = a.p[i] < b.p[i] ? b.p[i] : a.p[i];
    return a;
}

// 2 to the power, which is 0 or less, within 3 millionths; below -126 as for -126.
PALMETTE_INLINE Floats rough_exp2(Floats power) {
    constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer
    power = max(power, all(-126.0f));
    const Floats shifted = power + kRounding;
    const Floats rest = power - (shifted - kRounding);
    Floats p = all(9.58285e-3f);
    p = p * rest + 5.590643e-2f;
    p = p * rest + 0.24024099f;
    p = p * rest + 0.69312419f;
    p = p * rest + 1.0f;
    return as_floats(as_words(p) + (as_words(shifted) << 23));
}

// e to the x for x <= 0, within 4 millionths, at half the cost of `exp`. Below -87 it is 0.
PALMETTE_INLINE Floats rough_exp(Floats x) {
    const Words is_zero = less(x, all(-87.0f));
    return as_floats(as_words(rough_exp2(x * 1.44269504f)) & ~is_zero);
}

// e to the x for x <= 88, within 2 units in the last place: 2^n times a polynomial in what is left,
// with the coefficients of Cephes' expf. Below -87.3 it is 0.
PALMETTE_INLINE Floats exp(Floats x) {
    const Floats lowest = all(-87.33654f);
    const Words is_zero = less(x, lowest);
    x = max(x, lowest);
    const Floats shifted = x * 1.44269504f + 12582912.0f;  // rounds to the nearest integer
    const Floats n = shifted - 12582912.0f;
    Floats r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Words power = (as_words(shifted) + 127u) << 23;  // the low bits of shifted hold n
    return as_floats(as_words(p * as_floats(power)) & ~is_zero);
}

#define PALMETTE_SWAP(lane, width) ((lane) & (width)) ? (lane) - (width) + kPartLanes : (lane)
#define PALMETTE_KEEP(lane, width) ((lane) & (width)) ? (lane) + kPartLanes : (lane) + (width)

// Of rows that lie `width` apart, what lies above and below the diagonal changes places.
template <int width> PALMETTE_INLINE void exchange(Floats* v) {
    for (int i = 0; i < 16; ++i) {
        if (i & width) continue;
        Floats &a = v[i], &b = v[i + width];
        if constexpr (width >= kPartLanes) {
            constexpr int apart = width / kPartLanes;
            for (int part = 0; part < kParts; ++part) {
                if (part & apart) continue;
                const FloatPart moved = a.p[part + apart];
                a.p[part + apart] = b.p[part];
                b.p[part] = moved;
            }
        } else {
            for (int part = 0; part < kParts; ++part) {
                const FloatPart x = a.p[part], y = b.p[part];
                a.p[part] = __builtin_shufflevector(x, y, PALMETTE_EACH(PALMETTE_SWAP, width));
                b.p[part] = __builtin_shufflevector(x, y, PALMETTE_EACH(PALMETTE_KEEP, width));
            }
        }
    }
}

// Sixteen rows of sixteen.
PALMETTE_INLINE void transpose(Floats* v) {
    exchange<8>(v);
    exchange<4>(v);
    exchange<2>(v);
    exchange<1>(v);
}

}  // namespace
}  // namespace palmette
