#include "automaton.hpp"

namespace palmette {

namespace {

constexpr std::size_t kFewPairs = 3;  // are searched as fast as a row is looked up

}  // namespace

bool Automaton::trim() {
    const Limits& limits = store_.limits();
    if (static_cast<Count>(num_states_) * 2 <= limits.max_states &&
        static_cast<Count>(store_.load()) * 2 <= limits.max_terms) {
        return false;
    }
    store_.sweep();
    num_states_ = 1;
    ++generation_;
    return true;
}

void Automaton::count_state(Term* term) {
    const Limits& limits = store_.limits();
    if (static_cast<Count>(num_states_) >= limits.max_states) {
        throw TooComplex("the grammar needs more than " + std::to_string(num_states_) +
                         " states at once");
    }
    store_.check_size();
    term->is_state = true;
    ++num_states_;
}

Term* Automaton::step_capturing(Term* state, std::uint8_t byte) {
    Term* after = store_.step(state, byte);
    if (after == store_.empty()) return nullptr;
    enter(after);
    return after;
}

void Automaton::fill_row(Term* state) {
    const KeptPairs pairs = store_.parts(state);
    for (const Pair& pair : pairs) {
        enter(pair.after);
        if (pair.after == state) state->loops = classes_within(pair.bits);
    }
    if (pairs.size() > kFewPairs && pairs.size() <= DenseRow::kNoPair) {
        auto* dense = new (store_.memos().allocate<DenseRow>(1)) DenseRow;
        for (auto& each : dense->pair) each = DenseRow::kNoPair;
        for (std::size_t i = 0; i < pairs.size(); ++i) {
            pairs[i].bits.for_each(
                [&](std::uint8_t byte) { dense->pair[byte] = static_cast<std::uint8_t>(i); });
        }
        state->dense = dense;
    }
    state->has_row = true;
}

}  // namespace palmette
