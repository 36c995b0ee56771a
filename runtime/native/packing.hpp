// From weights as files have them to tiles.

#pragma once

#include "kernels.hpp"

namespace palmette {

// How a weight comes: rows of numbers, or rows of GGUF's blocks of 32 or, with a K, of 256.
enum class Source : int32_t {
    f32 = 0,
    bf16 = 1,
    q4_0 = 2,
    q4_1 = 3,
    q8_0 = 4,
    q5_0 = 5,
    q5_1 = 6,
    q4_k = 7,
    q5_k = 8,
    q6_k = 9,
};

constexpr int kNumSources = 10;

// Numbers that lie together in a row of a source, and their bytes.
struct Stride {
    int64_t numbers, bytes;
};

constexpr Stride kStrides[kNumSources] = {{1, 4},   {1, 2},   {32, 18},   {32, 20},   {32, 34},
                                          {32, 22}, {32, 24}, {256, 144}, {256, 176}, {256, 210}};

constexpr Stride stride_of(Source source) { return kStrides[static_cast<int>(source)]; }

// Bytes of a row of `k` numbers.
constexpr int64_t row_bytes(Source source, int64_t k) {
    return k / stride_of(source).numbers * stride_of(source).bytes;
}

// The format that keeps blocks as they are, but for the scales and offsets of those with a K: these
// are products, and rounded to half.
constexpr Format format_of_blocks(Source source) {
    return source == Source::q8_0                             ? Format::q8
           : source == Source::q6_k                           ? Format::q6
           : source == Source::q5_0 || source == Source::q5_1 ||
                   source == Source::q5_k                     ? Format::q5
                                                              : Format::q4;
}

// Whether a source can be kept in a format without a loss that the format does not name: numbers
// may be rounded, blocks stay what they are.
constexpr bool can_pack(Source source, Format format) {
    return source == Source::f32 || source == Source::bf16
               ? format == Format::f32 || format == Format::bf16 || format == Format::b12
               : format == format_of_blocks(source);
}

// How many numbers of a tile are outside as b12 has them; rows[0] to rows[15] are its own.
int64_t count_outside(Source source, const uint8_t* from, const int64_t* rows, int64_t k);

// Packs tiles first_tile <= t < last_tile of `size` bytes each. Output n of the linear map is row
// rows[n] of `from`.
void pack(Source source, const uint8_t* from, const int64_t* rows, int64_t k, Format format,
          int64_t size, uint8_t* to, int64_t first_tile, int64_t last_tile);

// Row `index` of a packed weight, as floats [k].
void read_row(const Linear& linear, int64_t index, float* out);

}  // namespace palmette
