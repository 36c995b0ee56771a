#include "packing.hpp"

#include <cmath>
#include <cstring>

namespace palmette {

namespace {

float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint16_t word_at(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return bits;
}

float from_bf16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Moves the exponent by a product, which makes what is subnormal as a half normal.
float from_half(uint16_t bits) {
    const float magnitude =
        float_of(static_cast<uint32_t>(bits & 0x7fff) << 13) * 5.192296858534828e33f;
    return bits & 0x8000 ? -magnitude : magnitude;
}

// -(2^power) times a half, exactly: the exponent grows, and what is subnormal doubles. A half that
// is too large for that becomes the largest there is.
uint16_t times_minus(int power, uint16_t bits) {
    const uint16_t sign = static_cast<uint16_t>((bits & 0x8000) ^ 0x8000);
    uint32_t magnitude = bits & 0x7fff;
    for (int i = 0; i < power; ++i) {
        magnitude = magnitude < 0x400 ? magnitude * 2 : magnitude + 0x400;
        if (magnitude >= 0x7c00) magnitude = 0x7bff;
    }
    return static_cast<uint16_t>(sign | magnitude);
}

// To the nearest half, ties to even; what is too large for one becomes the largest there is.
uint16_t to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    uint32_t magnitude;
    if (bits < 0x38800000) {  // 2^-14, below which halves are multiples of 2^-24
        magnitude = static_cast<uint32_t>(std::lrint(float_of(bits) * 16777216.0f));
    } else {
        magnitude = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10);
        if (magnitude > 0x7bff) magnitude = 0x7bff;
    }
    return static_cast<uint16_t>(sign | magnitude);
}

void pack_numbers(Source source, const uint8_t* row, int64_t k, Format format, int64_t lane,
                  uint8_t* tile) {
    for (int64_t i = 0; i < k; ++i) {
        if (source == Source::bf16 && format == Format::bf16) {
            std::memcpy(tile + 64 * (i / 2) + 4 * lane + 2 * (i % 2), row + 2 * i, 2);
            continue;
        }
        float value;
        if (source == Source::bf16) {
            value = from_bf16(word_at(row + 2 * i));
        } else {
            std::memcpy(&value, row + 4 * i, sizeof value);
        }
        if (format == Format::f32) {
            std::memcpy(tile + 64 * i + 4 * lane, &value, sizeof value);
        } else {
            const uint16_t bits = to_bf16(value);
            std::memcpy(tile + 64 * (i / 2) + 4 * lane + 2 * (i % 2), &bits, sizeof bits);
        }
    }
}

// 32 numbers of a row as bfloat16.
void read_bf16(Source source, const uint8_t* row, int64_t first, uint16_t* out) {
    if (source == Source::bf16) {
        std::memcpy(out, row + 2 * first, 64);
        return;
    }
    float values[32];
    std::memcpy(values, row + 4 * first, sizeof values);
    for (int i = 0; i < 32; ++i) out[i] = to_bf16(values[i]);
}

int exponent_of(uint16_t bits) { return bits >> 7 & 255; }

// The least exponent that 32 numbers of b12 may have, so that their largest has its own.
int lowest_exponent(const uint16_t* numbers) {
    int most = 0;
    for (int i = 0; i < 32; ++i) most = exponent_of(numbers[i]) > most ? exponent_of(numbers[i]) : most;
    return most > 15 ? most - 15 : 0;
}

// Whether it is not 0 but below all that have these exponents, or the one that would mean 0.
bool is_outside(uint16_t bits, int lowest) {
    return lowest > 0 && (bits & 0x7fff) != 0 && (bits & 0x7fff) <= lowest << 7;
}

void pack_12_bits(Source source, const uint8_t* row, int64_t k, int64_t lane, uint8_t* tile) {
    uint64_t count;
    std::memcpy(&count, tile + outsides_at(k), sizeof count);
    for (int64_t b = 0; b < k / 32; ++b) {
        uint16_t numbers[32];
        read_bf16(source, row, 32 * b, numbers);
        const int lowest = lowest_exponent(numbers);
        tile[16 * b + lane] = static_cast<uint8_t>(lowest);
        uint8_t* const block = tile + room(k / 2) + b * kBlockOfB12;
        for (int i = 0; i < 32; ++i) {
            uint16_t bits = numbers[i];
            if (is_outside(bits, lowest)) {
                const Outside one{static_cast<uint32_t>(32 * b + i), static_cast<uint16_t>(lane), bits};
                std::memcpy(tile + outsides_at(k) + (1 + count++) * sizeof one, &one, sizeof one);
                bits = 0;
            }
            const int above = (bits & 0x7fff) == 0 ? 0 : exponent_of(bits) - lowest;
            const int half = bits >> 15 << 3 | above >> 1;
            const int64_t at = 2 * lane + i % 2;
            block[32 * (i / 2) + at] = static_cast<uint8_t>((bits & 127) | (above & 1) << 7);
            block[512 + 32 * (i / 4) + at] |= static_cast<uint8_t>(half << (i % 4 / 2 * 4));
        }
    }
    std::memcpy(tile + outsides_at(k), &count, sizeof count);
}

float from_12_bits(const uint8_t* tile, int64_t k, int64_t lane, int64_t input) {
    const uint8_t* const block = tile + room(k / 2) + input / 32 * kBlockOfB12;
    const int64_t i = input % 32, at = 2 * lane + i % 2;
    const int half = block[512 + 32 * (i / 4) + at] >> (i % 4 / 2 * 4) & 15;
    const int size = block[32 * (i / 2) + at] | (half & 7) << 8;
    const int number = size == 0 ? 0 : size + (tile[16 * (input / 32) + lane] << 7);
    return from_bf16(static_cast<uint16_t>(number | half >> 3 << 15));
}

// What 32 numbers of a row come to, of all sources whose blocks have nibbles.
struct Block {
    uint16_t halves[2];  // scale and offset; of q6, the scales of both halves
    uint8_t numbers[32];
};

// The halves of bytes: those of low halves come first.
void read_nibbles(const uint8_t* bytes, uint8_t* numbers) {
    for (int i = 0; i < 16; ++i) {
        numbers[i] = bytes[i] & 15;
        numbers[i + 16] = bytes[i] >> 4;
    }
}

Block block_of_32(Source source, const uint8_t* from) {
    Block block;
    const bool has_offset = source == Source::q4_1 || source == Source::q5_1;
    const bool has_fifth = source == Source::q5_0 || source == Source::q5_1;
    block.halves[0] = word_at(from);
    block.halves[1] = has_offset ? word_at(from + 2) : times_minus(has_fifth ? 4 : 3, word_at(from));
    from += has_offset ? 4 : 2;
    read_nibbles(has_fifth ? from + 4 : from, block.numbers);
    for (int i = 0; i < 32 && has_fifth; ++i) block.numbers[i] |= (from[i / 8] >> i % 8 & 1) << 4;
    return block;
}

// Scales and offsets of 6 bits of eight blocks: the low ones of the first four, those of the others'
// offsets and scales in halves of bytes, and two bits each above the first.
struct SixBits {
    int scale, offset;
};

SixBits six_bits(const uint8_t* bytes, int64_t b) {
    if (b < 4) return {bytes[b] & 63, bytes[b + 4] & 63};
    return {(bytes[b + 4] & 15) | (bytes[b - 4] >> 6 << 4),
            (bytes[b + 4] >> 4) | (bytes[b] >> 6 << 4)};
}

// Block `b` of 32 of the eight in 256 numbers.
Block block_of_256(Source source, const uint8_t* from, int64_t b) {
    Block block;
    if (source == Source::q6_k) {
        const int64_t which = b % 4;  // of the 32 that share their bytes with others
        const uint8_t* const low = from + b / 4 * 64 + which % 2 * 32;
        const uint8_t* const high = from + 128 + b / 4 * 32;
        for (int i = 0; i < 32; ++i) {
            const int nibble = which < 2 ? low[i] & 15 : low[i] >> 4;
            block.numbers[i] = static_cast<uint8_t>(nibble | (high[i] >> 2 * which & 3) << 4);
        }
        const float scale = from_half(word_at(from + 208));
        for (int half = 0; half < 2; ++half) {
            const auto own = static_cast<int8_t>(from[192 + 2 * b + half]);
            block.halves[half] = to_half(scale * static_cast<float>(own));
        }
        return block;
    }
    const SixBits own = six_bits(from + 4, b);
    block.halves[0] = to_half(from_half(word_at(from)) * static_cast<float>(own.scale));
    block.halves[1] = to_half(-from_half(word_at(from + 2)) * static_cast<float>(own.offset));
    const bool has_fifth = source == Source::q5_k;
    const uint8_t* const bytes = from + (has_fifth ? 48 : 16) + b / 2 * 32;
    for (int i = 0; i < 32; ++i) {
        const int nibble = b % 2 ? bytes[i] >> 4 : bytes[i] & 15;
        const int fifth = has_fifth ? from[16 + i] >> b & 1 : 0;
        block.numbers[i] = static_cast<uint8_t>(nibble | fifth << 4);
    }
    return block;
}

void pack_nibbles(Source source, const uint8_t* row, int64_t k, Format format, int64_t lane,
                  uint8_t* tile) {
    const Stride stride = stride_of(source);
    for (int64_t b = 0; b < k / 32; ++b, tile += block_bytes(format)) {
        const int64_t each = stride.numbers / 32;
        const uint8_t* const from = row + b / each * stride.bytes;
        const Block block = each == 1 ? block_of_32(source, from) : block_of_256(source, from, b % each);
        std::memcpy(tile + 2 * lane, block.halves, 2);
        std::memcpy(tile + 32 + 2 * lane, block.halves + 1, 2);
        uint32_t words[6] = {};  // four of nibbles, and those of higher bits
        for (int four = 0; four < 8; ++four) {  // inputs at once, a byte each
            uint32_t numbers;
            std::memcpy(&numbers, block.numbers + 4 * four, sizeof numbers);
            words[four / 2] |= (numbers & 0x0f0f0f0f) << four % 2 * 4;
            if (format == Format::q5) words[4] |= (numbers >> 4 & 0x01010101) << four;
            if (format == Format::q6) words[4 + four / 4] |= (numbers >> 4 & 0x03030303) << four % 4 * 2;
        }
        const int64_t num_words = (block_bytes(format) - 64) / 64;
        for (int64_t word = 0; word < num_words; ++word)
            std::memcpy(tile + 64 + 64 * word + 4 * lane, words + word, sizeof *words);
    }
}

void pack_bytes(const uint8_t* row, int64_t k, int64_t lane, uint8_t* tile) {
    for (int64_t b = 0; b < k / 32; ++b, row += 34, tile += 544) {
        std::memcpy(tile + 2 * lane, row, 2);
        for (int i = 0; i < 32; i += 4) std::memcpy(tile + 32 + 16 * i + 4 * lane, row + 2 + i, 4);
    }
}

}  // namespace

int64_t count_outside(Source source, const uint8_t* from, const int64_t* rows, int64_t k) {
    int64_t count = 0;
    for (int64_t lane = 0; lane < kTile; ++lane) {
        const uint8_t* const row = from + rows[lane] * row_bytes(source, k);
        for (int64_t b = 0; b < k / 32; ++b) {
            uint16_t numbers[32];
            read_bf16(source, row, 32 * b, numbers);
            const int lowest = lowest_exponent(numbers);
            for (int i = 0; i < 32; ++i) count += is_outside(numbers[i], lowest);
        }
    }
    return count;
}

void pack(Source source, const uint8_t* from, const int64_t* rows, int64_t k, Format format,
          int64_t size, uint8_t* to, int64_t first_tile, int64_t last_tile) {
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
        uint8_t* const out = to + tile * size;
        if (format == Format::b12) std::memset(out, 0, static_cast<std::size_t>(size));
        for (int64_t lane = 0; lane < kTile; ++lane) {
            const uint8_t* row = from + rows[tile * kTile + lane] * row_bytes(source, k);
            if (format == Format::b12) {
                pack_12_bits(source, row, k, lane, out);
            } else if (source == Source::f32 || source == Source::bf16) {
                pack_numbers(source, row, k, format, lane, out);
            } else if (source == Source::q8_0) {
                pack_bytes(row, k, lane, out);
            } else {
                pack_nibbles(source, row, k, format, lane, out);
            }
        }
    }
}

void read_row(const Linear& linear, int64_t index, float* out) {
    const Format format = linear.format;
    const uint8_t* tile = linear.weight + index / kTile * linear.tile_size;
    const int64_t lane = index % kTile;
    if (format == Format::b12) {
        for (int64_t i = 0; i < linear.k; ++i) out[i] = from_12_bits(tile, linear.k, lane, i);
        const uint8_t* outside = tile + outsides_at(linear.k);
        uint64_t count;
        std::memcpy(&count, outside, sizeof count);
        for (uint64_t i = 0; i < count; ++i) {
            Outside one;
            std::memcpy(&one, outside += sizeof one, sizeof one);
            if (one.lane == lane) out[one.input] = from_bf16(one.bits);
        }
        return;
    }
    for (int64_t i = 0; i < linear.k; ++i) {
        const uint8_t* block = tile + i / 32 * block_bytes(format);
        const int64_t at = i % 32;
        if (format == Format::f32) {
            std::memcpy(out + i, tile + 64 * i + 4 * lane, sizeof *out);
        } else if (format == Format::bf16) {
            out[i] = from_bf16(word_at(tile + 64 * (i / 2) + 4 * lane + 2 * (i % 2)));
        } else if (format == Format::q8) {
            const auto byte = static_cast<int8_t>(block[32 + at / 4 * 64 + 4 * lane + at % 4]);
            out[i] = from_half(word_at(block + 2 * lane)) * static_cast<float>(byte);
        } else {
            const auto words = [&](int64_t word) {
                uint32_t bits;
                std::memcpy(&bits, block + 64 + 64 * word + 4 * lane, sizeof bits);
                return bits >> at % 4 * 8;
            };
            uint32_t number = words(at / 8) >> at % 8 / 4 * 4 & 15;
            if (format == Format::q5) number |= (words(4) >> at / 4 & 1) << 4;
            if (format == Format::q6) number |= (words(4 + at / 16) >> at % 16 / 4 * 2 & 3) << 4;
            const float first = from_half(word_at(block + 2 * lane));
            const float second = from_half(word_at(block + 32 + 2 * lane));
            out[i] = format == Format::q6
                         ? (at < 16 ? first : second) * (static_cast<float>(number) - 32.0f)
                         : first * static_cast<float>(number) + second;
        }
    }
}

}  // namespace palmette
