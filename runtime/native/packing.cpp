#include "packing.hpp"

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

// -8 times a half, exactly: the exponent grows by three, and what is subnormal doubles thrice. A
// half that is too large for that becomes the largest there is.
uint16_t times_minus_8(uint16_t bits) {
    const uint16_t sign = static_cast<uint16_t>((bits & 0x8000) ^ 0x8000);
    uint32_t magnitude = bits & 0x7fff;
    for (int i = 0; i < 3; ++i) {
        magnitude = magnitude < 0x400 ? magnitude * 2 : magnitude + 0x400;
        if (magnitude >= 0x7c00) magnitude = 0x7bff;
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

// Of a block the first 16 numbers are the low halves of its bytes, the others the high ones.
void pack_nibbles(Source source, const uint8_t* row, int64_t k, int64_t lane, uint8_t* tile) {
    const int64_t size = source == Source::q4_1 ? 20 : 18;
    for (int64_t b = 0; b < k / 32; ++b, row += size, tile += 320) {
        const uint16_t scale = word_at(row);
        const uint16_t offset = source == Source::q4_1 ? word_at(row + 2) : times_minus_8(scale);
        std::memcpy(tile + 2 * lane, &scale, 2);
        std::memcpy(tile + 32 + 2 * lane, &offset, 2);
        const uint8_t* bytes = row + size - 16;
        for (int quarter = 0; quarter < 4; ++quarter) {
            uint32_t word = 0;
            for (int i = 0; i < 8; ++i) {
                const int at = 8 * quarter + i;
                const uint32_t nibble = at < 16 ? bytes[at] & 15 : bytes[at - 16] >> 4;
                word |= nibble << (i % 4 * 8 + i / 4 * 4);
            }
            std::memcpy(tile + 64 + 64 * quarter + 4 * lane, &word, sizeof word);
        }
    }
}

void pack_bytes(const uint8_t* row, int64_t k, int64_t lane, uint8_t* tile) {
    for (int64_t b = 0; b < k / 32; ++b, row += 34, tile += 544) {
        std::memcpy(tile + 2 * lane, row, 2);
        for (int i = 0; i < 32; i += 4) std::memcpy(tile + 32 + 16 * i + 4 * lane, row + 2 + i, 4);
    }
}

}  // namespace

void pack(Source source, const uint8_t* from, const int64_t* rows, int64_t k, Format format,
          uint8_t* to, int64_t first_tile, int64_t last_tile) {
    const int64_t size = row_bytes(source, k);
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
        uint8_t* const out = to + tile * tile_bytes(format, k);
        for (int64_t lane = 0; lane < kTile; ++lane) {
            const uint8_t* row = from + rows[tile * kTile + lane] * size;
            if (source == Source::f32 || source == Source::bf16) {
                pack_numbers(source, row, k, format, lane, out);
            } else if (source == Source::q8_0) {
                pack_bytes(row, k, lane, out);
            } else {
                pack_nibbles(source, row, k, lane, out);
            }
        }
    }
}

void read_row(const Linear& linear, int64_t index, float* out) {
    const uint8_t* tile = linear.weight + index / kTile * tile_bytes(linear.format, linear.k);
    const int64_t lane = index % kTile;
    for (int64_t i = 0; i < linear.k; ++i) {
        if (linear.format == Format::f32) {
            std::memcpy(out + i, tile + 64 * i + 4 * lane, sizeof *out);
        } else if (linear.format == Format::bf16) {
            out[i] = from_bf16(word_at(tile + 64 * (i / 2) + 4 * lane + 2 * (i % 2)));
        } else if (linear.format == Format::q4) {
            const uint8_t* block = tile + i / 32 * 320;
            uint32_t word;
            std::memcpy(&word, block + 64 + i % 32 / 8 * 64 + 4 * lane, sizeof word);
            const auto nibble = static_cast<float>(word >> (i % 4 * 8 + i % 8 / 4 * 4) & 15);
            out[i] = from_half(word_at(block + 2 * lane)) * nibble +
                     from_half(word_at(block + 32 + 2 * lane));
        } else {
            const uint8_t* block = tile + i / 32 * 544;
            const auto byte = static_cast<int8_t>(block[32 + i % 32 / 4 * 64 + 4 * lane + i % 4]);
            out[i] = from_half(word_at(block + 2 * lane)) * static_cast<float>(byte);
        }
    }
}

}  // namespace palmette
