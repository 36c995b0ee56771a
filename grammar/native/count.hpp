// Numbers of bytes and repetitions: they stop at a bound that no text reaches.
#pragma once

#include <algorithm>
#include <cstdint>

namespace palmette {

using Count = std::int64_t;

constexpr Count kMost = Count{1} << 61;
constexpr Count kUnbounded = -1;  // of a maximum
constexpr Count kUnknown = -1;    // of a memo

inline Count add(Count a, Count b) { return std::min(a + b, kMost); }

inline Count multiply(Count a, Count b) {
    if (a == 0 || b == 0) return 0;
    return a > kMost / b ? kMost : a * b;
}

}  // namespace palmette
