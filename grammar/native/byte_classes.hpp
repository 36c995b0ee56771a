// Classes of bytes that grammars tend to treat alike: each byte is in exactly one.
#pragma once

#include <array>
#include <cstdint>

#include "byte_set.hpp"

namespace palmette {

using ByteClasses = std::uint64_t;  // a set of them

constexpr int kNumByteClasses = 64;

// The bytes of each class: hexadecimal letters and the others of either case, digits, each other
// printable character by itself, and of the rest what UTF-8 tells apart.
inline const std::array<ByteSet, kNumByteClasses>& bytes_of_classes() {
    static const std::array<ByteSet, kNumByteClasses> classes = [] {
        std::array<ByteSet, kNumByteClasses> made{};
        std::size_t next = 0;
        ByteSet left = ByteSet::all();
        const auto add = [&](const ByteSet& bytes) {
            made[next++] = bytes;
            left = left & ~bytes;
        };
        const int ranges[][2] = {{'a', 'f'},   {'g', 'z'},   {'A', 'F'},   {'G', 'Z'},
                                 {'0', '9'},   {0x00, 0x08}, {0x09, 0x0A}, {0x0B, 0x1F},
                                 {0x80, 0x8F}, {0x90, 0x9F}, {0xA0, 0xBF}, {0xC2, 0xDF},
                                 {0xE1, 0xEC}, {0xF1, 0xF3}};
        for (const auto& range : ranges) add(ByteSet::range(range[0], range[1]));
        const ByteSet printable = left & ByteSet::range(0x20, 0x7E);
        printable.for_each([&](std::uint8_t byte) { add(ByteSet::of(byte)); });
        add(left);
        return made;
    }();
    return classes;
}

inline ByteClasses class_of(std::uint8_t byte) {
    static const std::array<std::uint8_t, 256> numbers = [] {
        std::array<std::uint8_t, 256> made{};
        for (std::uint8_t number = 0; number < kNumByteClasses; ++number) {
            bytes_of_classes()[number].for_each(
                [&](std::uint8_t each) { made[each] = number; });
        }
        return made;
    }();
    return ByteClasses{1} << numbers[byte];
}

// The classes all of whose bytes are in a set.
inline ByteClasses classes_within(const ByteSet& bytes) {
    ByteClasses within = 0;
    const auto& classes = bytes_of_classes();
    for (int number = 0; number < kNumByteClasses; ++number) {
        const ByteSet& each = classes[static_cast<std::size_t>(number)];
        if (each.any() && (each & bytes) == each) within |= ByteClasses{1} << number;
    }
    return within;
}

}  // namespace palmette
