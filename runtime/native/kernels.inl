// The operations, written once: included by a file for each kind of processor, which says how many
// rows fit its registers (PALMETTE_ROWS) and gives its table a name.

#include <cmath>
#include <type_traits>

#include "kernels.hpp"
#include "vec.hpp"

namespace palmette {
namespace {

constexpr int kRows = PALMETTE_ROWS;
constexpr int kByteRows = kRows < 4 ? kRows : 4;  // of inputs of 8 bits, which take more registers
constexpr int64_t kBlock = 32;  // inputs that share a scale

PALMETTE_INLINE Words moved_up(Words v, int count) { return count < 0 ? v >> -count : v << count; }

// Of a block of nibbles the bytes of inputs 8 * quarter to 8 * quarter + 7: of the first four, and of
// the others.
struct Eight {
    Words first, others;
};

template <Format format> PALMETTE_INLINE Eight eight_of(const uint8_t* block, int quarter) {
    const Words packed = load<Words>(block + 64 + 64 * quarter);
    Eight v{packed & 0x0f0f0f0fu, (packed >> 4) & 0x0f0f0f0fu};
    if constexpr (format == Format::q5) {
        const Words fifth = load<Words>(block + 320);
        v.first = v.first | (moved_up(fifth, 4 - 2 * quarter) & 0x10101010u);
        v.others = v.others | (moved_up(fifth, 3 - 2 * quarter) & 0x10101010u);
    } else if constexpr (format == Format::q6) {
        const Words pairs = load<Words>(block + 320 + quarter / 2 * 64);
        v.first = v.first | (moved_up(pairs, 4 - quarter % 2 * 4) & 0x30303030u);
        v.others = v.others | (moved_up(pairs, 2 - quarter % 2 * 4) & 0x30303030u);
    }
    return v;
}

// Products of R rows with one tile, each summed in the order of the inputs.
template <Format format, int R>
PALMETTE_INLINE void product(const uint8_t* w, int64_t k, const float* x, int64_t ldx, const float* sums,
                    int64_t lds, Floats* y) {
    Floats acc[R];
    for (int r = 0; r < R; ++r) acc[r] = all(0.0f);
    if constexpr (format == Format::f32) {
        for (int64_t i = 0; i < k; ++i) {
            const Floats wi = load<Floats>(w + 64 * i);
            for (int r = 0; r < R; ++r) acc[r] += wi * all(x[r * ldx + i]);
        }
    } else if constexpr (format == Format::bf16) {
        for (int64_t i = 0; i < k; i += 2) {
            const Words both = load<Words>(w + 32 * i);
            const Floats even = as_floats(both << 16), odd = as_floats(both & 0xffff0000u);
            for (int r = 0; r < R; ++r) {
                acc[r] += even * all(x[r * ldx + i]);
                acc[r] += odd * all(x[r * ldx + i + 1]);
            }
        }
    } else if constexpr (format == Format::q8) {
        for (int64_t b = 0; b < k / kBlock; ++b, w += block_bytes(format)) {
            const float* xb = x + b * kBlock;
            Floats part[R];
            for (int r = 0; r < R; ++r) part[r] = all(0.0f);
            for (int64_t i = 0; i < kBlock; i += 4) {
                const Words packed = load<Words>(w + 32 + 16 * i);
                for (int j = 0; j < 4; ++j) {
                    const Floats value = to_floats(as_ints(packed << (24 - 8 * j)) >> 24);
                    for (int r = 0; r < R; ++r) part[r] += value * all(xb[r * ldx + i + j]);
                }
            }
            const Floats scale = from_half(load<Halves>(w));
            for (int r = 0; r < R; ++r) acc[r] += scale * part[r];
        }
    } else {
        constexpr int kNumScales = format == Format::q6 ? 2 : 1;  // each of as many inputs
        for (int64_t b = 0; b < k / kBlock; ++b, w += block_bytes(format)) {
            for (int which = 0; which < kNumScales; ++which) {
                Floats part[R];
                for (int r = 0; r < R; ++r) part[r] = all(0.0f);
#pragma GCC unroll 4
                for (int i = 0; i < 4 / kNumScales; ++i) {
                    const int quarter = i + which * 2;
                    const Eight eight = eight_of<format>(w, quarter);
                    for (int j = 0; j < 8; ++j) {
                        const Words bytes = (j < 4 ? eight.first : eight.others) >> (j % 4 * 8);
                        Floats value = to_floats(as_ints(bytes & 255u));
                        if constexpr (format == Format::q6) value = value - 32.0f;
                        const float* const at = x + b * kBlock + 8 * quarter + j;
                        for (int r = 0; r < R; ++r) part[r] += value * all(at[r * ldx]);
                    }
                }
                const Floats scale = from_half(load<Halves>(w + 32 * which));
                for (int r = 0; r < R; ++r) acc[r] += scale * part[r];
            }
            if constexpr (has_offsets(format)) {
                const Floats offset = from_half(load<Halves>(w + 32));
                for (int r = 0; r < R; ++r) acc[r] += offset * all(sums[r * lds + b]);
            }
        }
    }
    for (int r = 0; r < R; ++r) y[r] = acc[r];
}

#if PALMETTE_WIDTH >= 32
// Of inputs of 8 bits, in whole numbers but for the scales. A lane adds pairs of products in 16 bits,
// as many as fit: eight of 2 * 15 * 127 at most, or four of 2 * 31 * 127. Outliers are apart.
template <Format format, int R>
PALMETTE_INLINE void product_of_bytes(const uint8_t* w, int64_t k, const int8_t* x, int64_t ldx,
                                      const float* sums, int64_t lds, Floats* y) {
    constexpr int kTogether = format == Format::q5 ? 2 : 4;  // quarters
    Floats acc[R];
    for (int r = 0; r < R; ++r) acc[r] = all(0.0f);
    for (int64_t b = 0; b < k / kBlock; ++b, w += block_bytes(format)) {
        Words part[R];
        Ints whole[R];
        for (int r = 0; r < R; ++r) part[r] = Words{};
        for (int r = 0; r < R; ++r) whole[r] = Ints{};
#pragma GCC unroll 4
        for (int quarter = 0; quarter < 4; ++quarter) {
            const Eight eight = eight_of<format>(w, quarter);
            const int8_t* const at = x + b * kBlock + 8 * quarter;
            for (int r = 0; r < R; ++r) {
                uint32_t one, other;
                std::memcpy(&one, at + r * ldx, sizeof one);
                std::memcpy(&other, at + r * ldx + 4, sizeof other);
                part[r] = with_pairs_of_bytes(part[r], eight.first, one);
                part[r] = with_pairs_of_bytes(part[r], eight.others, other);
                if (quarter % kTogether == kTogether - 1) {
                    whole[r] = whole[r] + sums_of_pairs(part[r]);
                    part[r] = Words{};
                }
            }
        }
        const Floats scale = from_half(load<Halves>(w)), offset = from_half(load<Halves>(w + 32));
        for (int r = 0; r < R; ++r) {
            const Bytes32& own = bytes_of(sums + r * lds)[b];
            const Words packed = load<Words>(w + 64 + (own.place & ~63)) >> (4 - (own.place & 4));
            Words bytes = packed & 0x0f0f0f0fu;
            if constexpr (format == Format::q5) {
                const Words fifth = load<Words>(w + 320) >> fifth_of(own);
                bytes = bytes | ((fifth & 0x01010101u) << 4);
            }
            const Ints apart = sums_of_pairs(with_pairs_of_bytes(Words{}, bytes, own.sixteens));
            acc[r] += (scale * all(own.scale)) * to_floats(whole[r] + (apart << 4));
            acc[r] += offset * all(own.sum);
        }
    }
    for (int r = 0; r < R; ++r) y[r] = acc[r];
}
#endif

template <Format format, Input input, int R>
PALMETTE_INLINE void product_of(const uint8_t* w, int64_t k, const void* x, int64_t ldx,
                                const float* sums, int64_t lds, Floats* y) {
#if PALMETTE_WIDTH >= 32
    if constexpr (input == Input::i8) {
        product_of_bytes<format, R>(w, k, static_cast<const int8_t*>(x), ldx, sums, lds, y);
        return;
    }
#endif
    product<format, R>(w, k, static_cast<const float*>(x), ldx, sums, lds, y);
}

PALMETTE_INLINE Floats silu(Floats x) { return x / (exp(all(0.0f) - x) + 1.0f); }

template <Format format, Input input, int R>
inline void tiles(const Linear& linear, const void* x, int64_t ldx, const float* sums, float* y,
                  int64_t ldy, int64_t tile, Ending ending) {
    const int64_t lds = num_sums(input, linear.k), size = linear.tile_size;
    const uint8_t* w = linear.weight + tile * size;
    Floats first[R];
    product_of<format, input, R>(w, linear.k, x, ldx, sums, lds, first);
    if (linear.bias) {
        const Floats bias = load<Floats>(linear.bias + tile * kTile);
        for (int r = 0; r < R; ++r) first[r] += bias;
    }
    if (ending == Ending::gated) {
        Floats second[R];
        product_of<format, input, R>(w + size, linear.k, x, ldx, sums, lds, second);
        if (linear.bias) {
            const Floats bias = load<Floats>(linear.bias + (tile + 1) * kTile);
            for (int r = 0; r < R; ++r) second[r] += bias;
        }
        for (int r = 0; r < R; ++r) {
            store(y + r * ldy + tile / 2 * kTile, silu(first[r]) * second[r]);
        }
        return;
    }
    float* at = y + tile * kTile;
    for (int r = 0; r < R; ++r) {
        if (ending == Ending::add) first[r] += load<Floats>(at + r * ldy);
        store(at + r * ldy, first[r]);
    }
}

// Calls work with a count, at most `most`, as a constant: a loop over it is then unrolled.
template <int most, class Work> PALMETTE_INLINE void with_count(int64_t count, const Work& work) {
    if (count >= most) {
        work(std::integral_constant<int, most>());
    } else if constexpr (most > 1) {
        with_count<most - 1>(count, work);
    }
}

template <Format format, Input input>
void multiply_as(const Linear& linear, const Rows& rows, int64_t num_rows, float* y, int64_t ldy,
                 int64_t first_tile, int64_t last_tile, Ending ending) {
    const auto* inputs = static_cast<const uint8_t*>(rows.x);
    const int64_t step = ending == Ending::gated ? 2 : 1, lds = num_sums(input, linear.k);
    constexpr int most = input == Input::i8 ? kByteRows : kRows;
    for (int64_t tile = first_tile; tile < last_tile; tile += step) {
        for (int64_t row = 0; row < num_rows; row += most) {
            with_count<most>(num_rows - row, [&](auto count) {
                tiles<format, input, decltype(count)::value>(
                    linear, inputs + row * rows.ldx * size_of(input), rows.ldx,
                    rows.sums + row * lds, y + row * ldy, ldy, tile, ending);
            });
        }
    }
}

void multiply(const Linear& linear, const Rows& rows, int64_t num_rows, float* y, int64_t ldy,
              int64_t first_tile, int64_t last_tile, Ending ending) {
    constexpr decltype(&multiply) all_of[kNumFormats] = {
        multiply_as<Format::f32, Input::f32>, multiply_as<Format::bf16, Input::f32>,
        multiply_as<Format::q4, Input::f32>,  multiply_as<Format::q8, Input::f32>,
        multiply_as<Format::q5, Input::f32>,  multiply_as<Format::q6, Input::f32>,
        nullptr,
    };
    auto run = all_of[static_cast<int>(linear.format)];
#if PALMETTE_WIDTH >= 32
    if (rows.input == Input::i8) {
        run = linear.format == Format::q5 ? multiply_as<Format::q5, Input::i8>
                                          : multiply_as<Format::q4, Input::i8>;
    }
#endif
    run(linear, rows, num_rows, y, ldy, first_tile, last_tile, ending);
}

void sum_blocks(const float* x, int64_t n, float* out) {
    for (int64_t b = 0; b < n / kBlock; ++b, x += kBlock) {
        out[b] = sum(load<Floats>(x) + load<Floats>(x + kLanes));
    }
}

void normalize(const float* x, const float* weight, float epsilon, int64_t n, void* out,
               bool is_bf16) {
    Floats squares = all(0.0f);
    for (int64_t i = 0; i < n; i += kLanes) {
        const Floats v = load<Floats>(x + i);
        squares += v * v;
    }
    const Floats scale = all(1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + epsilon));
    for (int64_t i = 0; i < n; i += kLanes) {
        const Floats v = load<Floats>(x + i) * scale * load<Floats>(weight + i);
        if (is_bf16) {
            store(static_cast<uint16_t*>(out) + i, to_bf16(v));
        } else {
            store(static_cast<float*>(out) + i, v);
        }
    }
}

void round_to_bf16(const float* x, int64_t n, uint16_t* out) {
    for (int64_t i = 0; i < n; i += kLanes) store(out + i, to_bf16(load<Floats>(x + i)));
}

// Adding it leaves an integer in the lowest bits: it is 1.5 * 2^23.
constexpr float kRounding = 12582912.0f;
constexpr uint32_t kRoundingBits = 0x4b400000u;
constexpr float kLeastScale = 1e-30f;  // of which there is an inverse

PALMETTE_INLINE Words magnitude(Floats v) { return as_words(v) & 0x7fffffffu; }

PALMETTE_INLINE float float_of(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

void quantise(const float* x, int64_t n, int16_t* out, float* scales) {
    for (int64_t b = 0; b < n / kBlock; ++b, x += kBlock, out += kBlock) {
        const Floats low = load<Floats>(x), high = load<Floats>(x + kLanes);
        // As integers floats without a sign have the same order, and what is no finite number is above.
        const int32_t bits = largest(max(as_ints(magnitude(low)), as_ints(magnitude(high))));
        const float scale = float_of(bits) / 32767.0f;
        const float inverse = scale > kLeastScale ? 1.0f / scale : 0.0f;
        store(out, narrowed(as_words(low * inverse + kRounding)));
        store(out + kLanes, narrowed(as_words(high * inverse + kRounding)));
        // What is no finite number makes a NaN of the scale, and so of every product.
        scales[b] = bits < 0x7f800000 ? scale : NAN;
    }
}

alignas(64) constexpr uint32_t kNumbers[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                               11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                               22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

void quantise_bytes(const float* x, int64_t n, int8_t* out, Bytes32* blocks) {
    for (int64_t b = 0; b < n / kBlock; ++b, x += kBlock, out += kBlock) {
        const Floats low = load<Floats>(x), high = load<Floats>(x + kLanes);
        // The lowest bits say which it is.
        const Ints first = as_ints((magnitude(low) & ~31u) | load<Words>(kNumbers));
        const Ints second = as_ints((magnitude(high) & ~31u) | load<Words>(kNumbers + kLanes));
        const int32_t most = largest(max(first, second));
        const int32_t next = largest(max(other_than(first, most), other_than(second, most)));
        const int64_t place = most & 31;
        const float peak = std::fabs(x[place]);
        const float others = float_of(next | 31) * (1.0f / 127.0f), own = peak * (1.0f / 2159.0f);
        const float scale = others > own ? others : own;
        const float inverse = scale > kLeastScale ? 1.0f / scale : 0.0f;
        const Words whole[2] = {as_words(low * inverse + kRounding),
                                as_words(high * inverse + kRounding)};
        for (int half = 0; half < 2; ++half) store(out + half * kLanes, narrowed_twice(whole[half]));
        uint32_t integers[32];
        for (int half = 0; half < 2; ++half) store(integers + half * kLanes, whole[half]);
        const auto largest_one = static_cast<int32_t>(integers[place] - kRoundingBits);
        const int32_t rounded = (largest_one + 8) >> 4;
        const int32_t sixteens = rounded > 127 ? 127 : rounded < -127 ? -127 : rounded;
        out[place] = static_cast<int8_t>(largest_one - 16 * sixteens);
        const Words together = whole[0] + whole[1] + (0u - 2u * kRoundingBits);
        // What is no finite number makes a NaN of the scale, and so of every product.
        blocks[b].scale = most < 0x7f800000 ? scale : NAN;
        blocks[b].sum = blocks[b].scale * static_cast<float>(sum(as_ints(together)));
        blocks[b].sixteens = static_cast<uint32_t>(sixteens & 255) << (place % 4 * 8);
        blocks[b].place = static_cast<int32_t>(place / 8 * 64 + (place % 8 < 4 ? 4 : 0));
    }
}

void turn(float* head, int64_t dim, const float* cosines, const float* sines) {
    const int64_t half = dim / 2;
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Floats a = load<Floats>(head + i), b = load<Floats>(head + half + i);
        const Floats c = load<Floats>(cosines + i), s = load<Floats>(sines + i);
        store(head + i, a * c - b * s);
        store(head + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cosines[i] - b * sines[i];
        head[half + i] = b * cosines[i] + a * sines[i];
    }
}

// Attention. Keys are taken 64 at a time from a multiple of 64 on, whatever the batch, so that a
// row's sums are the same wherever it is computed: scores over the dimensions in their order, then
// a running softmax (Milakov and Gimelshein, arXiv:1805.02867), then values in the order of keys.
// Stretches of 512 keys are each begun anew and joined in their order, as in "Flash-Decoding".

constexpr int64_t kKeys = 64;
constexpr int kQueries = 8;         // heads that are multiplied with keys at once
constexpr int kTogether = kParts == 1 ? 2 : 1;  // times 16 keys or dimensions, as registers allow
constexpr int64_t kMaxQueries = kMaxQueriesTogether;
constexpr int64_t kMaxDim = kMaxHeadDim;

template <bool is_bf16> inline Floats load_kv(const void* base, int64_t index) {
    if constexpr (is_bf16) return from_bf16(load<Halves>(static_cast<const uint16_t*>(base) + index));
    return load<Floats>(static_cast<const float*>(base) + index);
}

// Of R query heads, whose number for dimension d is query(r, d), and P times 16 keys.
template <int R, int P, class Query>
inline void score(const Query& query, const float* keys, int64_t dim, float* scores) {
    Floats acc[R][P];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) acc[r][p] = all(0.0f);
    for (int64_t d = 0; d < dim; ++d) {
        Floats k[P];
        for (int p = 0; p < P; ++p) k[p] = load<Floats>(keys + (p * dim + d) * kLanes);
        for (int r = 0; r < R; ++r) {
            const Floats q = all(query(r, d));
            for (int p = 0; p < P; ++p) acc[r][p] += k[p] * q;
        }
    }
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) store(scores + r * kKeys + p * kLanes, acc[r][p]);
}

// Of P times 16 dimensions; those of key j lie from place_of(j) on.
template <int R, int P, class Number, class PlaceOf>
inline void gather(const Number* values, const PlaceOf& place_of, int64_t num_keys,
                   const float* weights, float* sums, int64_t ld) {
    Floats acc[R][P];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) acc[r][p] = load<Floats>(sums + r * ld + p * kLanes);
    for (int64_t j = 0; j < num_keys; ++j) {
        Floats v[P];
        for (int p = 0; p < P; ++p)
            v[p] = load_kv<sizeof(Number) == 2>(values, place_of(j) + p * kLanes);
        for (int r = 0; r < R; ++r) {
            const Floats w = all(weights[r * kKeys + j]);
            for (int p = 0; p < P; ++p) acc[r][p] += v[p] * w;
        }
    }
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) store(sums + r * ld + p * kLanes, acc[r][p]);
}

// Where the keys of a block from `start` on lie, as an index; those after `end` are the last one.
inline void locate(const Heads& heads, const Span& span, int64_t kv_head, int64_t start, int64_t end,
                   int64_t* where) {
    const int64_t first = kv_head * heads.head_step;
    int64_t page = start / heads.page_size, within = start % heads.page_size;
    for (int64_t j = 0; j < kKeys; ++j) {
        if (start + j >= end) {
            where[j] = where[j - 1];
            continue;
        }
        where[j] = first + span.pages[page] * heads.page_step + within * heads.dim;
        if (++within == heads.page_size) ++page, within = 0;
    }
}

// Keys or values that are needed soon: pages are all over the pool.
PALMETTE_INLINE void fetch(const void* from, const int64_t* where, int64_t count, int64_t dim,
                           int64_t size) {
    const auto* const base = static_cast<const uint8_t*>(from);
    for (int64_t j = 0; j < count; ++j)
        for (int64_t at = where[j] * size; at < (where[j] + dim) * size; at += 64)
            __builtin_prefetch(base + at);
}

// Where the keys of two blocks lie, of the one at hand and of the next, which is fetched meanwhile:
// behind the last one, if there is another head to go through, the first one of that.
struct Places {
    const Heads& heads;
    const Span& span;
    int64_t kv_head, begin, end;
    const void *keys, *values;
    int64_t size;
    int64_t where[2][kKeys];
    const int64_t* next;  // or null

    PALMETTE_INLINE void find_first() {
        if (begin >= end) return;
        int64_t* const first = where[begin / kKeys % 2];
        locate(heads, span, kv_head, begin, end, first);
        if (heads.in_order && kv_head > 0) return;
        fetch(keys, first, kKeys, heads.dim, size);
        fetch(values, first, kKeys, heads.dim, size);
    }

    PALMETTE_INLINE const int64_t* block(int64_t start) {
        int64_t* const after = where[start / kKeys % 2 ^ 1];
        next = after;
        if (start + kKeys < end) {
            locate(heads, span, kv_head, start + kKeys, end, after);
        } else if (heads.in_order && kv_head + 1 < heads.num_kv_heads) {
            locate(heads, span, kv_head + 1, begin, end, after);
        } else {
            next = nullptr;
        }
        return where[start / kKeys % 2];
    }

    PALMETTE_INLINE void fetch_keys(int64_t first, int64_t count) const {
        if (next) fetch(keys, next + first, count, heads.dim, size);
    }
    PALMETTE_INLINE void fetch_values(int64_t first, int64_t count) const {
        if (next) fetch(values, next + first, count, heads.dim, size);
    }
};

// Query heads of some rows that go through the keys of one head together.
struct Together {
    int64_t count;
    int64_t most_seen;
    int64_t num_seen[kMaxQueries];  // keys, of each
    const float* query[kMaxQueries];
    float* out[kMaxQueries];  // of all keys, or of a stretch
    float peak[kMaxQueries], total[kMaxQueries];  // of the softmax so far
};

// The keys of one stretch, or of all, and where what they come to goes.
struct Reach {
    int64_t stretch;  // or below 0
    float* out;
    int64_t ldo;  // of rows, in numbers
    int64_t head_step;
};

inline Reach of_all(const Heads& heads, float* out, int64_t ldo) { return {-1, out, ldo, heads.dim}; }

inline Reach of_one(const Heads& heads, int64_t stretch, float* parts) {
    const int64_t size = stretch_size(heads.dim);
    return {stretch, parts, heads.num_heads * size, size};
}

inline int64_t first_of(const Reach& reach) { return reach.stretch < 0 ? 0 : reach.stretch * kStretch; }

// Of keys up to `end`.
inline int64_t last_of(const Reach& reach, int64_t end) {
    const int64_t last = first_of(reach) + kStretch;
    return reach.stretch >= 0 && last < end ? last : end;
}

inline Together together(const Heads& heads, const Span& span, int64_t kv_head, int64_t first,
                         int64_t last, const float* queries, int64_t ldq, const Reach& reach) {
    const int64_t group = heads.num_heads / heads.num_kv_heads;
    const int64_t first_out = reach.stretch < 0 ? span.first_row : 0;
    Together all_of;
    all_of.count = (last - first) * group;
    all_of.most_seen = span.num_keys - (span.num_rows - last);
    for (int64_t i = 0; i < all_of.count; ++i) {
        const int64_t row = first + i / group, at = (kv_head * group + i % group) * heads.dim;
        all_of.query[i] = queries + (span.first_row + row) * ldq + at;
        all_of.out[i] = reach.out + (first_out + row) * reach.ldo +
                        (kv_head * group + i % group) * reach.head_step;
        all_of.num_seen[i] = span.num_keys - (span.num_rows - 1 - row);
    }
    return all_of;
}

// Adds the sums of a stretch to those of what lies before it. Never inlined: its bits must be the
// same wherever it is called.
__attribute__((noinline)) void join(float* peak, float* total, float* sums, float other_peak,
                                    float other_total, const float* other_sums, int64_t dim) {
    if (other_peak == -INFINITY) return;  // nothing of it is seen
    const float now = other_peak > *peak ? other_peak : *peak;
    const Floats scale = exp(all(*peak - now)), other_scale = exp(all(other_peak - now));
    *total = *total * scale.p[0][0] + other_total * other_scale.p[0][0];
    *peak = now;
    for (int64_t d = 0; d < dim; d += kLanes) {
        store(sums + d, load<Floats>(sums + d) * scale + load<Floats>(other_sums + d) * other_scale);
    }
}

// Takes the keys 64 at a time, `block(start)`, between `begin()` and `finish()` of each stretch,
// which leaves peaks, totals and sums; what they come to for each query head, once all are taken, is
// `put(i, sums, total)`, or written as that of a stretch.
template <class Begin, class Block, class Finish, class Put>
void go_through(Together& queries, int64_t dim, const Reach& reach, const float* sums,
                const Begin& begin, const Block& block, const Finish& finish, const Put& put) {
    const int64_t count = queries.count, end = queries.most_seen;
    alignas(64) float before[kMaxQueries * kMaxDim];
    float peaks[kMaxQueries], totals[kMaxQueries];
    const std::size_t num_bytes = sizeof(float) * static_cast<std::size_t>(dim);
    const bool is_part = reach.stretch >= 0;
    const int64_t first = first_of(reach), last = last_of(reach, end);
    for (int64_t start = first; start == first || start < last; start += kStretch) {
        const int64_t stop = start + kStretch < last ? start + kStretch : last;
        begin();
        for (int64_t at = start; at < stop; at += kKeys) block(at);
        finish();
        for (int64_t i = 0; i < count; ++i) {
            const float* const own = sums + i * dim;
            if (is_part) {
                std::memcpy(queries.out[i], own, num_bytes);
                queries.out[i][dim] = queries.peak[i];
                queries.out[i][dim + 1] = queries.total[i];
            } else if (start > 0) {
                join(peaks + i, totals + i, before + i * dim, queries.peak[i], queries.total[i], own,
                     dim);
                if (stop == last) put(i, before + i * dim, totals[i]);
            } else if (stop == last) {
                put(i, own, queries.total[i]);
            } else {
                std::memcpy(before + i * dim, own, num_bytes);
                peaks[i] = queries.peak[i];
                totals[i] = queries.total[i];
            }
        }
    }
}

// The same where each query head has its sums by itself from the first key on.
template <class Block, class Put>
void go_through_apart(Together& queries, int64_t dim, const Reach& reach, float* sums,
                      const Block& block, const Put& put) {
    const auto begin = [&] {
        for (int64_t i = 0; i < queries.count; ++i) {
            queries.peak[i] = -INFINITY;
            queries.total[i] = 0.0f;
        }
        std::memset(sums, 0, sizeof(float) * static_cast<std::size_t>(queries.count * dim));
    };
    go_through(queries, dim, reach, sums, begin, block, [] {}, put);
}

// The sums of all stretches of a query head, in `sums`, and their total.
inline float joined(const float* parts, int64_t step, int64_t num_stretches, int64_t dim,
                    float* sums) {
    std::memcpy(sums, parts, sizeof(float) * static_cast<std::size_t>(dim));
    float peak = parts[dim], total = parts[dim + 1];
    for (int64_t i = 1; i < num_stretches; ++i) {
        const float* const other = parts + i * step;
        join(&peak, &total, sums, other[dim], other[dim + 1], other, dim);
    }
    return total;
}

// From the scores of one query over the keys from `start` on to their weights, by `raise` to the
// powers of e, of which `keep(k, w)` takes 16 at a time and returns them as they are used; what was
// summed before is scaled.
template <class Raise, class Keep>
inline void weigh(Together& queries, int64_t i, int64_t start, float* scores, float* sums,
                  int64_t dim, const Raise& raise, const Keep& keep) {
    const int64_t num_seen = queries.num_seen[i] - start;
    for (int64_t j = num_seen > 0 ? num_seen : 0; j < kKeys; ++j) scores[j] = -INFINITY;
    Floats s[4];
    for (int k = 0; k < 4; ++k) s[k] = load<Floats>(scores + k * kLanes);
    const float most = largest(max(max(s[0], s[1]), max(s[2], s[3])));
    if (most == -INFINITY) {
        for (int k = 0; k < 4; ++k) keep(k, all(0.0f));
        return;
    }
    const float before = queries.peak[i], now = most > before ? most : before;
    for (int k = 0; k < 4; ++k) s[k] = keep(k, raise(s[k] - all(now)));
    const float added = sum((s[0] + s[1]) + (s[2] + s[3]));
    if (now != before) {
        const Floats scale = exp(all(before - now));
        queries.total[i] *= scale.p[0][0];
        for (int64_t d = 0; d < dim; d += kLanes) store(sums + d, load<Floats>(sums + d) * scale);
        queries.peak[i] = now;
    }
    queries.total[i] += added;
}

inline void put_plain(float* out, const float* sums, float total, int64_t dim) {
    const Floats share = all(1.0f / total);
    for (int64_t d = 0; d < dim; d += kLanes) store(out + d, load<Floats>(sums + d) * share);
}

template <bool is_bf16>
void attend_some(const Heads& heads, const Span& span, int64_t kv_head, int64_t first, int64_t last,
                 const float* queries, int64_t ldq, const void* keys, const void* values,
                 const Reach& reach) {
    const int64_t dim = heads.dim;
    Together rows = together(heads, span, kv_head, first, last, queries, ldq, reach);
    const int64_t count = rows.count, end = rows.most_seen;
    alignas(64) float sums[kMaxQueries * kMaxDim];
    alignas(64) float scores[kMaxQueries * kKeys];
    alignas(64) float block[kTogether * kMaxDim * kLanes];
    alignas(64) float turned[kMaxQueries * kMaxDim];
    alignas(64) float wide[is_bf16 ? kKeys * kMaxDim : 1];
    // Numbers of heads that are used together lie together: there is no register for each head's place.
    const int64_t num_turned = count / kQueries * kQueries;
    for (int64_t i = 0; i < num_turned; i += kQueries)
        for (int64_t d = 0; d < dim; ++d)
            for (int r = 0; r < kQueries; ++r)
                turned[i * dim + d * kQueries + r] = rows.query[i + r][d];
    Places places{heads,  span, kv_head, first_of(reach), last_of(reach, end),
                  keys, values, is_bf16 ? 2 : 4, {}, nullptr};
    places.find_first();
    const auto score_of = [&](int64_t part, auto num_parts) {
        constexpr int P = decltype(num_parts)::value;
        float* const to = scores + part;
        for (int64_t i = 0; i < num_turned; i += kQueries) {
            const float* const query = turned + i * dim;
            score<kQueries, P>([query](int r, int64_t d) { return query[d * kQueries + r]; }, block, dim,
                               to + i * kKeys);
        }
        with_count<kQueries - 1>(count - num_turned, [&](auto rest) {
            const float* const* const query = rows.query + num_turned;
            score<decltype(rest)::value, P>([query](int r, int64_t d) { return query[r][d]; }, block, dim,
                                            to + num_turned * kKeys);
        });
    };
    const auto block_from = [&](int64_t start) {
        const int64_t num_keys = end - start < kKeys ? end - start : kKeys;
        const int64_t* const where = places.block(start);
        for (int64_t part = 0; part < num_keys; part += kTogether * kLanes) {
            const int64_t num_parts = (num_keys - part + kLanes - 1) / kLanes;
            for (int64_t p = 0; p < kTogether && p < num_parts; ++p) {
                const int64_t first_key = part + p * kLanes;
                places.fetch_keys(first_key, kLanes);
                places.fetch_values(first_key, kLanes);
                for (int64_t d = 0; d < dim; d += kLanes) {
                    Floats v[16];
                    for (int j = 0; j < kLanes; ++j)
                        v[j] = load_kv<is_bf16>(keys, where[first_key + j] + d);
                    transpose(v);
                    for (int i = 0; i < kLanes; ++i) store(block + (p * dim + d + i) * kLanes, v[i]);
                }
            }
            with_count<kTogether>(num_parts, [&](auto some) { score_of(part, some); });
        }
        for (int64_t i = 0; i < count; ++i) {
            float* const own = scores + i * kKeys;
            weigh(
                rows, i, start, own, sums + i * dim, dim,
                [](Floats x) {
                    if constexpr (is_bf16) return rough_exp(x);  // nearer than keys are rounded
                    return exp(x);
                },
                [own](int k, Floats weights) {
                    store(own + k * kLanes, weights);
                    return weights;
                });
        }
        const auto gather_from = [&](const auto* from, auto place_of) {
            for (int64_t i = 0; i < count; i += kQueries) {
                with_count<kQueries>(count - i, [&](auto some) {
                    for (int64_t d = 0; d < dim; d += kTogether * kLanes) {
                        with_count<kTogether>((dim - d) / kLanes, [&](auto parts) {
                            gather<decltype(some)::value, decltype(parts)::value>(
                                from + d, place_of, num_keys, scores + i * kKeys, sums + i * dim + d,
                                dim);
                        });
                    }
                });
            }
        };
        const auto at_place = [where](int64_t j) { return where[j]; };
        if constexpr (!is_bf16) {
            gather_from(static_cast<const float*>(values), at_place);
        } else if (count <= kQueries) {
            gather_from(static_cast<const uint16_t*>(values), at_place);
        } else {  // more than once: widened once
            for (int64_t j = 0; j < num_keys; ++j)
                for (int64_t d = 0; d < dim; d += kLanes)
                    store(wide + j * dim + d, load_kv<true>(values, where[j] + d));
            gather_from(wide, [dim](int64_t j) { return j * dim; });
        }
    };
    go_through_apart(rows, dim, reach, sums, block_from, [&](int64_t i, const float* own, float total) {
        put_plain(rows.out[i], own, total, dim);
    });
}

// As many rows at a time as go through the keys together.
template <class Some>
inline void in_groups(const Heads& heads, int64_t first, int64_t last, const Some& some) {
    const int64_t group = heads.num_heads / heads.num_kv_heads;
    const int64_t step = kMaxQueries / group > 0 ? kMaxQueries / group : 1;
    for (int64_t row = first; row < last; row += step) {
        some(row, row + step < last ? row + step : last);
    }
}

void attend_plain(const Heads& heads, const Span& span, int64_t kv_head, int64_t first,
                  int64_t last, const float* queries, int64_t ldq, const void* keys,
                  const void* values, const Reach& reach) {
    in_groups(heads, first, last, [&](int64_t row, int64_t end) {
        const auto run = heads.is_bf16 ? attend_some<true> : attend_some<false>;
        run(heads, span, kv_head, row, end, queries, ldq, keys, values, reach);
    });
}

void conclude_plain(const Heads& heads, const float* parts, int64_t step, int64_t num_stretches,
                    float* out) {
    alignas(64) float sums[kMaxDim];
    const float total = joined(parts, step, num_stretches, heads.dim, sums);
    put_plain(out, sums, total, heads.dim);
}

// The entries of the tables, with how a kind of processor goes about it.
template <auto attend_within>
void attend(const Heads& heads, const Span& span, int64_t kv_head, int64_t first, int64_t last,
            const float* queries, int64_t ldq, const void* keys, const void* values, float* out,
            int64_t ldo) {
    attend_within(heads, span, kv_head, first, last, queries, ldq, keys, values,
                  of_all(heads, out, ldo));
}

template <auto attend_within>
void attend_stretch(const Heads& heads, const Span& span, int64_t kv_head, int64_t first,
                    int64_t last, int64_t stretch, const float* queries, int64_t ldq,
                    const void* keys, const void* values, float* parts) {
    attend_within(heads, span, kv_head, first, last, queries, ldq, keys, values,
                  of_one(heads, stretch, parts));
}

// Drawing tokens. The loops are plain enough for the compiler to take several numbers at once.

void allow(const float* x, const uint8_t* mask, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = mask[i] ? x[i] : -INFINITY;
}

float peak(const float* x, int64_t n) {
    constexpr int32_t kInfinite = 0x7f800000;  // the bits of a NaN, but for the sign, are more
    Floats most = all(-INFINITY), others = most;
    Ints magnitude = as_ints(as_words(all(0.0f))), further = magnitude;
    const auto look = [](Floats found, Floats& largest_yet, Ints& magnitude_yet) {
        largest_yet = max(largest_yet, found);
        magnitude_yet = max(magnitude_yet, as_ints(as_words(found) & 0x7fffffffu));
    };
    int64_t i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        look(load<Floats>(x + i), most, magnitude);
        look(load<Floats>(x + i + kLanes), others, further);
    }
    for (; i < n; i += kLanes) {
        float rest[kLanes];
        for (int j = 0; j < kLanes; ++j) rest[j] = i + j < n ? x[i + j] : -INFINITY;
        look(load<Floats>(rest), most, magnitude);
    }
    return largest(max(magnitude, further)) > kInfinite ? NAN : largest(max(most, others));
}

// e to the x for -600 < x <= 0, within 2 units in the last place: 2^n times the first terms of the
// series of what is left, which is at most 0.35.
inline double exp_of(double x) {
    constexpr double kRounding = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves an integer
    const double shifted = x * 1.4426950408889634 + kRounding;
    const double n = shifted - kRounding;
    double r = x - n * 6.93147180369123816490e-01;
    r = r - n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    uint64_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);  // the lowest hold n
    bits = (bits + 1023) << 52;
    double power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

float total_of_tokens(const float* x, int64_t n, float peak) {
    constexpr float kLog2E = 1.44269504f;
    Floats sums = all(0.0f), others = all(0.0f);
    int64_t i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        sums += rough_exp2((load<Floats>(x + i) - all(peak)) * kLog2E);
        others += rough_exp2((load<Floats>(x + i + kLanes) - all(peak)) * kLog2E);
    }
    for (; i < n; i += kLanes) {
        float rest[kLanes];
        for (int j = 0; j < kLanes; ++j) rest[j] = i + j < n ? x[i + j] - peak : -INFINITY;
        sums += rough_exp2(load<Floats>(rest) * kLog2E);
    }
    return sum(sums + others);
}

void weigh_tokens(const float* x, int64_t n, float peak, double temperature, int bits,
                  int64_t* out) {
    constexpr double kRounding = 6755399441055744.0;
    const double one = std::ldexp(1.0, bits);
    if (bits > 50) {  // for few tokens: too large to be rounded so
        for (int64_t i = 0; i < n; ++i) {
            const double y = (static_cast<double>(x[i]) - peak) / temperature;
            out[i] = y > -500 ? std::llrint(exp_of(y) * one) : 0;
        }
        return;
    }
    for (int64_t i = 0; i < n; ++i) {
        const double y = (static_cast<double>(x[i]) - peak) / temperature;
        const double rounded = exp_of(y > -500 ? y : -500) * one + kRounding;
        int64_t found;
        std::memcpy(&found, &rounded, sizeof found);
        out[i] = found - 0x4338000000000000;  // the same of kRounding
    }
}

}  // namespace

#ifndef PALMETTE_OWN_PRODUCTS
constexpr Input kOfFewBits = PALMETTE_WIDTH >= 32 ? Input::i8 : Input::f32;

const Kernels PALMETTE_TABLE = {
    PALMETTE_NAME,
    false,
    {Input::f32, Input::f32, kOfFewBits, Input::f32, kOfFewBits, Input::f32, Input::f32},
    {Input::f32, Input::f32, Input::f32, Input::f32, Input::f32, Input::f32, Input::f32},
    multiply,
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
#endif

}  // namespace palmette
