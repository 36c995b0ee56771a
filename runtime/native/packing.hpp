// From weights as files have them to tiles.

#pragma once

#include "kernels.hpp"

namespace palmette {

// How a weight comes: rows of numbers, or rows of GGUF's blocks of 32.
enum class Source : int32_t { f32 = 0, bf16 = 1, q4_0 = 2, q4_1 = 3, q8_0 = 4 };

// Bytes of a row of `k` numbers.
constexpr int64_t row_bytes(Source source, int64_t k) {
    return source == Source::f32    ? k * 4
           : source == Source::bf16 ? k * 2
           : source == Source::q4_0 ? k / 32 * 18
           : source == Source::q4_1 ? k / 32 * 20
                                    : k / 32 * 34;
}

// Whether a source can be kept in a format without a loss that the format does not name: numbers
// may be rounded, blocks stay what they are.
constexpr bool can_pack(Source source, Format format) {
    return source == Source::f32 || source == Source::bf16
               ? format == Format::f32 || format == Format::bf16
           : source == Source::q8_0 ? format == Format::q8
                                    : format == Format::q4;
}

// Packs tiles first_tile <= t < last_tile. Output n of the linear map is row rows[n] of `from`.
void pack(Source source, const uint8_t* from, const int64_t* rows, int64_t k, Format format,
          uint8_t* to, int64_t first_tile, int64_t last_tile);

// Row `index` of a packed weight, as floats [k].
void read_row(const Linear& linear, int64_t index, float* out);

}  // namespace palmette
