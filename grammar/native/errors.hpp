// What can go wrong in the machine; the bindings raise the package's own errors for these.
#pragma once

#include <stdexcept>
#include <string>

namespace palmette {

// Going on would pass one of the limits: GrammarTooComplex.
struct TooComplex : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The vocabulary has no token to go on with: GrammarError.
struct NoWayOn : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline TooComplex nested_too_deeply() { return TooComplex("the grammar is nested too deeply"); }

}  // namespace palmette
