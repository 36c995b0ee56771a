// Stepping through a grammar: terms whose parts are known are its states.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "store.hpp"
#include "vocabulary.hpp"

namespace palmette {

class Automaton {
  public:
    explicit Automaton(Store& store) : store_(store) {}

    Store& store() { return store_; }

    std::size_t generation() const { return generation_; }

    std::size_t num_states() const { return num_states_; }

    // Drop everything if half of a limit is in use; the rest is room for one operation.
    bool trim();

    // Count a term that is not empty as a state.
    void enter(Term* term) {
        if (!term->is_state) count_state(term);
    }

    // The next state, null if the byte is not allowed.
    Term* step(Term* state, std::uint8_t byte) {
        if (!state->has_row) {
            if (state->is_capturing) return step_capturing(state, byte);
            fill_row(state);
        }
        if (state->dense) {
            const std::uint8_t index = state->dense->pair[byte];
            return index == DenseRow::kNoPair ? nullptr : state->parts[index].after;
        }
        for (const Pair& pair : state->parts) {
            if (pair.bits.contains(byte)) return pair.after;
        }
        return nullptr;
    }

    // The same for a state from which few bytes may ever be taken: nothing is found out about the
    // others before several were.
    Term* pass(Term* state, std::uint8_t byte) {
        if (state->has_row || state->is_capturing) return step(state, byte);
        if (state->passed_after && state->passed_byte == byte) return state->passed_after;
        if (state->num_passed == kManyPassed) return step(state, byte);
        Term* after = store_.after(state, byte);
        if (after == store_.empty()) return nullptr;
        enter(after);
        ++state->num_passed;
        state->passed_byte = byte;
        state->passed_after = after;
        return after;
    }

    Term* pass(Term* state, std::string_view text) {
        for (char each : text) {
            state = pass(state, static_cast<std::uint8_t>(each));
            if (!state) return nullptr;
        }
        return state;
    }

    Term* step(Term* state, std::string_view text) {
        for (char each : text) {
            state = step(state, static_cast<std::uint8_t>(each));
            if (!state) return nullptr;
        }
        return state;
    }

    // The moves of a state: disjoint byte sets, and for each the next state.
    KeptPairs moves(Term* state) {
        if (!state->has_row) fill_row(state);
        return state->parts;
    }

    bool accepts(Term* state, std::string_view text) {
        state = step(state, text);
        return state && state->nullable;
    }

    // Call `visit(node, state)` for every node below `node` that is reached alive from `state`, or
    // `visit_below(node, state)` once for all nodes below one, where all of them lead to `state`.
    template <class Visit, class VisitBelow>
    void walk(const Vocabulary& vocabulary, NodeIndex node, Term* state, Visit visit,
              VisitBelow visit_below) {
        if (node) {
            walk_below(vocabulary, node, state, visit, visit_below);
            return;
        }
        // The root has a child for most bytes, and few states allow most bytes.
        for (const Pair& pair : moves(state)) {
            pair.bits.for_each([&](std::uint8_t byte) {
                const NodeIndex child = vocabulary.root_child(byte);
                if (!child) return;
                visit(child, pair.after);
                walk_below(vocabulary, child, pair.after, visit, visit_below);
            });
        }
    }

  private:
    // The classes of bytes that lead from a state to itself.
    ByteClasses loops(Term* state) {
        if (!state->has_row && !state->is_capturing) fill_row(state);
        return state->loops;
    }

    template <class Visit, class VisitBelow>
    void walk_below(const Vocabulary& vocabulary, NodeIndex node, Term* state, Visit& visit,
                    VisitBelow& visit_below) {
        const Node* nodes = vocabulary.nodes();
        const ByteClasses* below = vocabulary.classes_below();
        const NodeIndex end = nodes[node].end;
        if (node + 1 == end) return;
        if (!(below[node] & ~loops(state))) {
            visit_below(node, state);
            return;
        }
        const std::size_t above = nodes[node].depth;
        if (stack_.size() < vocabulary.max_depth() + std::size_t{1}) {
            stack_.resize(vocabulary.max_depth() + std::size_t{1});
        }
        Term** stack = stack_.data();  // the state at each depth; nothing below walks again
        stack[0] = state;
        std::size_t num_visited = 0;
        for (NodeIndex at = node + 1; at < end;) {
            const Node& here = nodes[at];
            Term* after = step(stack[here.depth - above - 1], here.byte);
            if ((++num_visited & (kNodesPerWork - 1)) == 0) store_.spend();
            if (!after) {
                at = here.end;
                continue;
            }
            stack[here.depth - above] = after;
            visit(at, after);
            if (here.end != at + 1 && !(below[at] & ~loops(after))) {
                visit_below(at, after);
                at = here.end;
            } else {
                ++at;
            }
        }
    }

    static constexpr std::size_t kNodesPerWork = 64;
    static constexpr std::uint8_t kManyPassed = 4;

    void fill_row(Term* state);
    // Too many states to compute a row for each.
    Term* step_capturing(Term* state, std::uint8_t byte);
    void count_state(Term* term);

    Store& store_;
    std::size_t num_states_ = 1;  // the state from which nothing goes on is one
    std::size_t generation_ = 1;
    std::vector<Term*> stack_;
};

}  // namespace palmette
