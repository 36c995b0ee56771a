// The operations of a step, as one table per kind of processor.

#pragma once

#include <cstdint>

namespace palmette {

// How the weight of a linear map is kept. All are cut into tiles of 16 outputs, one after the
// other; within a tile, what belongs to one step along the inputs lies together, output by output.
enum class Format : int32_t {
    f32 = 0,   // [K][16] float
    bf16 = 1,  // [K / 2][16][2] bfloat16
    q4 = 2,    // for each 32 inputs: [16] half scales, [16] half offsets, [4][16] words of 8 nibbles:
               // the low ones of its bytes are the first four inputs
    q8 = 3,    // for each 32 inputs: [16] half scales, [8][16] words of 4 signed bytes
    q5 = 4,    // as q4, and then [16] words of fifth bits: those of byte j are the lowest ones of the
               // nibbles' bytes j, of the first four inputs, the next four and so on
    q6 = 5,    // as q4, but the halves are scales of the first 16 inputs and of the others, and then
               // [2][16] words of fifth and sixth bits of 16 inputs each; 32 is meant as 0
    b12 = 6,   // bfloat16 without a loss in 12 bits; see below
};

constexpr int kNumFormats = 7;

// Weights of bfloat16 have few exponents: of 32 inputs of an output nearly all are within 16 of each
// other (Zhang et al., arXiv:2504.11651, code them by their frequency). So of each number a byte has
// the mantissa and the exponent's lowest bit, and half a byte the sign and three bits more of how far
// the exponent is above the least of the 16. A tile has
//   [K / 32][16] bytes, the least exponents of each 32 inputs; room up to a multiple of 64;
//   for each 32 inputs: [16][16][2] bytes, as bf16 has its numbers, and [8][16][2] bytes, whose low
//   halves belong to one pair of inputs and the high ones to the next;
//   the number of `Outside`, and these, as many as any tile has; room up to a multiple of 64.
// What is 0, and what is outside, is 0 in the first two, whatever the least exponent.
struct Outside {
    uint32_t input;
    uint16_t lane, bits;
};

constexpr int64_t room(int64_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

constexpr int64_t kBlockOfB12 = 768;

constexpr int64_t outsides_at(int64_t k) { return room(k / 2) + k / 32 * kBlockOfB12; }

constexpr int64_t kTile = 16;

// Bytes of 32 inputs of a tile.
constexpr int64_t block_bytes(Format format) {
    return format == Format::f32    ? 32 * 64
           : format == Format::bf16 ? 32 * 32
           : format == Format::q8   ? 32 + 512
           : format == Format::q4   ? 32 + 32 + 256
           : format == Format::q5   ? 32 + 32 + 256 + 64
           : format == Format::q6   ? 32 + 32 + 256 + 128
                                    : kBlockOfB12;
}

// Bytes of one tile of a weight with K inputs; of b12, of whose tiles none has more outside.
constexpr int64_t tile_bytes(Format format, int64_t k, int64_t num_outside) {
    return format == Format::b12
               ? outsides_at(k) + room((1 + num_outside) * static_cast<int64_t>(sizeof(Outside)))
               : k / 32 * block_bytes(format);
}

constexpr bool has_offsets(Format format) { return format == Format::q4 || format == Format::q5; }

// What becomes of a tile of products.
enum class Ending : int32_t {
    set = 0,    // y = product + bias
    add = 1,    // y += product + bias
    gated = 2,  // of two tiles: y = silu(first) * second
};

struct Linear {
    const uint8_t* weight;
    const float* bias;  // [N], or null
    int64_t n, k;       // n is a multiple of 16, k of 32
    Format format;
    int64_t tile_size;  // bytes
};

// Of one sequence, the rows that are computed and what they see.
struct Span {
    int64_t first_row, num_rows;   // rows of the batch
    int64_t num_keys;              // that the last of them sees; each before it one less
    const int64_t* pages;          // those of the sequence
};

struct Heads {
    int64_t num_heads, num_kv_heads, dim;
    int64_t page_size;
    int64_t head_step, page_step;  // from one head of keys, and one page, to the next, in numbers
    bool is_bf16;                  // the pages
    bool in_order;                 // one thread goes through all heads of keys, one after the other
};

// Query heads that go through the keys together; more of one head of keys are not supported.
constexpr int64_t kMaxQueriesTogether = 48;
constexpr int64_t kMaxHeadDim = 256;  // and a multiple of 16

// Keys whose sums are made by themselves, from a multiple of it on, and joined with those before: so
// those of one text can be made by several threads, and come to the same however that is.
constexpr int64_t kStretch = 512;

// Numbers that a stretch comes to for a query head: weighted sums of values, the largest score, the
// sum of weights, and room to the next.
constexpr int64_t stretch_size(int64_t dim) { return dim + 16; }

// What rows are that are multiplied with a weight.
enum class Input : int32_t {
    f32 = 0,
    bf16 = 1,
    i16 = 2,  // of each 32 numbers the largest is 32,767 times their scale
    i8 = 3,   // of each 32 numbers the second largest is 127 times their scale; see `Bytes32`
};

constexpr int64_t size_of(Input input) {
    return input == Input::f32 ? 4 : input == Input::i8 ? 1 : 2;
}

// What belongs to 32 inputs of 8 bits. The largest of them has more bits: what is kept with the others
// is what is left of it modulo 16. It would otherwise cost them theirs where it stands out, and models
// have channels that always do (Dettmers et al., arXiv:2208.07339).
struct Bytes32 {
    float scale;
    float sum;          // of what they mean
    uint32_t sixteens;  // of the largest in its byte of four inputs, 0 in the other three
    int32_t place;      // of these four in a block of nibbles: bytes to their words, and 4 where they
                        // are the low halves of bytes
};

// Where the fifth bits of these four are in the bytes that have them.
inline int fifth_of(const Bytes32& block) { return block.place / 64 * 2 + (block.place & 4 ? 0 : 1); }

struct Rows {
    const void* x;  // [rows][ldx]
    int64_t ldx;
    Input input;
    // For each row and 32 of its inputs: of i16, their scale; of i8, `Bytes32`; of f32, for weights
    // with offsets, their sum.
    const float* sums;
};

constexpr int64_t num_sums(Input input, int64_t k) { return k / 32 * (input == Input::i8 ? 4 : 1); }

inline const Bytes32* bytes_of(const float* sums) { return reinterpret_cast<const Bytes32*>(sums); }

struct Kernels {
    const char* name;
    bool has_b12;
    Input takes[kNumFormats];  // for weights of each format
    Input exact[kNumFormats];  // the same where nothing is rounded that need not be

    // y[rows][ldy] for the tiles first_tile <= t < last_tile.
    void (*multiply)(const Linear&, const Rows&, int64_t rows, float* y, int64_t ldy,
                     int64_t first_tile, int64_t last_tile, Ending);
    // The sums of each 32 of `n` numbers.
    void (*sum_blocks)(const float* x, int64_t n, float* out);
    // out[i] = x[i] / rms(x) * weight, as float or bfloat16.
    void (*normalize)(const float* x, const float* weight, float epsilon, int64_t n, void* out,
                      bool to_bf16);
    void (*round)(const float* x, int64_t n, uint16_t* out);
    // To 16 bits, to the nearest, with the scales [n / 32].
    void (*quantise)(const float* x, int64_t n, int16_t* out, float* scales);
    // To 8 bits, to the nearest, with [n / 32] of what belongs to them.
    void (*quantise_bytes)(const float* x, int64_t n, int8_t* out, Bytes32* blocks);
    // Turns pairs (i, i + dim / 2) of a head by the angles whose cosines and sines are given
    // [dim / 2].
    void (*turn)(float* head, int64_t dim, const float* cosines, const float* sines);
    // Attention of the rows first <= r < last of a span, for one head of keys and values.
    void (*attend)(const Heads&, const Span&, int64_t kv_head, int64_t first, int64_t last,
                   const float* queries, int64_t ldq, const void* keys, const void* values,
                   float* out, int64_t ldo);
    // Of one stretch only: what it comes to for query head h of row r of the span goes to
    // parts[(r * num_heads + h) * stretch_size(dim)].
    void (*attend_stretch)(const Heads&, const Span&, int64_t kv_head, int64_t first, int64_t last,
                           int64_t stretch, const float* queries, int64_t ldq, const void* keys,
                           const void* values, float* parts);
    // Attention of one query head, of what the stretches in their order come to, `step` apart.
    void (*conclude)(const Heads&, const float* parts, int64_t step, int64_t num_stretches,
                     float* out);
    // out[i] = x[i] where `mask` is not 0, else -inf.
    void (*allow)(const float* x, const uint8_t* mask, int64_t n, float* out);
    // The largest of n numbers; NaN if any is.
    float (*peak)(const float* x, int64_t n);
    // out[i] = exp((x[i] - peak) / temperature) * 2^bits, to the nearest integer, ties to even.
    void (*weigh)(const float* x, int64_t n, float peak, double temperature, int bits,
                  int64_t* out);
    // The sum of exp(x[i] - peak) of at most some hundred numbers, none above `peak`, in single
    // precision.
    float (*total)(const float* x, int64_t n, float peak);
};

extern const Kernels kernels_of_base, kernels_of_avx2, kernels_of_avx512, kernels_of_avx512_vnni,
    kernels_of_avx512_bf16;

}  // namespace palmette
