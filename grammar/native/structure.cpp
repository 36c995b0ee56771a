#include "structure.hpp"

#include <array>
#include <random>

namespace palmette {

namespace {

const std::array<std::uint64_t, 2>& key() {
    static const std::array<std::uint64_t, 2> drawn = [] {
        std::random_device device;
        const auto word = [&device] {
            return static_cast<std::uint64_t>(device()) << 32 | device();
        };
        return std::array<std::uint64_t, 2>{word(), word()};
    }();
    return drawn;
}

}  // namespace

Digest::Digest()
    : v0_(0x736F6D6570736575 ^ key()[0]),
      v1_(0x646F72616E646F6D ^ key()[1] ^ 0xEE),
      v2_(0x6C7967656E657261 ^ key()[0]),
      v3_(0x7465646279746573 ^ key()[1]) {}

Structure Digest::finish() {
    add(num_words_ << 59);  // their bytes, of which the highest byte of the last word tells
    Structure structure;
    v2_ ^= 0xEE;
    for (int i = 0; i < 4; ++i) round();
    structure.low = v0_ ^ v1_ ^ v2_ ^ v3_;
    v1_ ^= 0xDD;
    for (int i = 0; i < 4; ++i) round();
    structure.high = v0_ ^ v1_ ^ v2_ ^ v3_;
    return structure;
}

}  // namespace palmette
