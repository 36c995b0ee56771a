// Names for what regular terms are made of, the same in every store of the process.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace palmette {

// Equal for regular terms of equal structure; for others only if someone knows the key.
struct Structure {
    std::uint64_t low = 0;
    std::uint64_t high = 0;

    bool is_known() const { return (low | high) != 0; }

    bool operator==(const Structure& other) const { return low == other.low && high == other.high; }

    bool operator<(const Structure& other) const {
        return low != other.low ? low < other.low : high < other.high;
    }

    struct Hash {
        std::size_t operator()(const Structure& structure) const { return structure.low; }
    };
};

// SipHash-2-4 of 128 bits (Aumasson and Bernstein, 2012) over 64-bit words, with a key that is drawn
// when the process starts: no schema can be written so that its terms are taken for others.
class Digest {
  public:
    Digest();

    void add(std::uint64_t word) {
        ++num_words_;
        v3_ ^= word;
        round();
        round();
        v0_ ^= word;
    }

    void add(const Structure& structure) {
        add(structure.low);
        add(structure.high);
    }

    void add(std::string_view text) {
        add(text.size());
        for (std::size_t at = 0; at < text.size(); at += 8) {
            std::uint64_t word = 0;
            std::memcpy(&word, text.data() + at, text.size() - at < 8 ? text.size() - at : 8);
            add(word);
        }
    }

    Structure finish();

  private:
    static std::uint64_t rotate(std::uint64_t word, int bits) {
        return word << bits | word >> (64 - bits);
    }

    void round() {
        v0_ += v1_;
        v1_ = rotate(v1_, 13) ^ v0_;
        v0_ = rotate(v0_, 32);
        v2_ += v3_;
        v3_ = rotate(v3_, 16) ^ v2_;
        v0_ += v3_;
        v3_ = rotate(v3_, 21) ^ v0_;
        v2_ += v1_;
        v1_ = rotate(v1_, 17) ^ v2_;
        v2_ = rotate(v2_, 32);
    }

    std::uint64_t v0_, v1_, v2_, v3_;
    std::uint64_t num_words_ = 0;
};

}  // namespace palmette
