// A set of byte values.
#pragma once

#include <array>
#include <cstdint>

namespace palmette {

struct ByteSet {
    std::array<std::uint64_t, 4> words{};

    static ByteSet all() { return {{~0ULL, ~0ULL, ~0ULL, ~0ULL}}; }

    static ByteSet of(std::uint8_t byte) {
        ByteSet set;
        set.add(byte);
        return set;
    }

    static ByteSet range(int first, int last) {
        ByteSet set;
        for (int byte = first; byte <= last; ++byte) set.add(static_cast<std::uint8_t>(byte));
        return set;
    }

    void add(std::uint8_t byte) { words[byte >> 6] |= 1ULL << (byte & 63); }

    bool contains(std::uint8_t byte) const { return words[byte >> 6] >> (byte & 63) & 1; }

    bool any() const { return (words[0] | words[1] | words[2] | words[3]) != 0; }

    bool intersects(const ByteSet& other) const { return (*this & other).any(); }

    bool operator==(const ByteSet& other) const { return words == other.words; }

    ByteSet operator&(const ByteSet& other) const {
        ByteSet set;
        for (int i = 0; i < 4; ++i) set.words[i] = words[i] & other.words[i];
        return set;
    }

    ByteSet operator|(const ByteSet& other) const {
        ByteSet set;
        for (int i = 0; i < 4; ++i) set.words[i] = words[i] | other.words[i];
        return set;
    }

    ByteSet operator~() const {
        ByteSet set;
        for (int i = 0; i < 4; ++i) set.words[i] = ~words[i];
        return set;
    }

    int count() const {
        int total = 0;
        for (auto word : words) total += __builtin_popcountll(word);
        return total;
    }

    // The lowest byte of a set that is not empty.
    std::uint8_t lowest() const {
        int i = 0;
        while (!words[i]) ++i;
        return static_cast<std::uint8_t>(64 * i + __builtin_ctzll(words[i]));
    }

    // The byte that a reader would expect: a letter, a digit, something printable.
    std::uint8_t plainest() const;

    template <class Function>
    void for_each(Function function) const {
        for (int i = 0; i < 4; ++i) {
            for (auto word = words[i]; word; word &= word - 1) {
                function(static_cast<std::uint8_t>(64 * i + __builtin_ctzll(word)));
            }
        }
    }
};

inline std::uint8_t ByteSet::plainest() const {
    static const std::array<ByteSet, 4> preferred = [] {
        ByteSet printable = range(0x21, 0x7E);
        printable = printable & ~of('\\') & ~of('"');
        return std::array<ByteSet, 4>{
            range('a', 'z'), range('0', '9'), range('A', 'Z'), printable};
    }();
    for (const auto& each : preferred) {
        const ByteSet common = *this & each;
        if (common.any()) return common.lowest();
    }
    return lowest();
}

}  // namespace palmette
