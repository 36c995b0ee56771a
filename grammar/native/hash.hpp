// Hashes of what terms and places are made of.
#pragma once

#include <cstdint>

#include "term.hpp"

namespace palmette {

inline std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
    hash ^= value + 0x9E3779B97F4A7C15ULL + (hash << 6) + (hash >> 2);
    hash *= 0xBF58476D1CE4E5B9ULL;
    return hash ^ (hash >> 29);
}

inline std::uint64_t hash_of(Kind kind) {
    return mix(0x2545F4914F6CDD1DULL, static_cast<std::uint64_t>(kind));
}

}  // namespace palmette
