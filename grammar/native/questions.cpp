// What is in a term: whether anything, what of it is shortest, and how far its counters go.
#include <algorithm>
#include <queue>
#include <tuple>
#include <unordered_map>

#include "store.hpp"

namespace palmette {

namespace {

std::string shortest_of_table(const Term& term) {
    const Table& table = *term.table;
    std::string text;
    for (auto state = term.depth; !table.accepting[state];) {
        const auto& moves = table.moves[state];
        const auto best = std::min_element(
            moves.begin(), moves.end(), [&](const Table::Move& a, const Table::Move& b) {
                return table.distances[a.after] < table.distances[b.after];
            });
        text.push_back(static_cast<char>(best->bits.plainest()));
        state = best->after;
    }
    return text;
}

}  // namespace

bool Store::is_empty(Term* term) {
    if (term->kind == Kind::kEmpty) return true;
    if (!term->is_searched) return false;
    if (term->known_empty < 0) {
        const bool is_it = decide_empty(term);
        term->known_empty = is_it ? 1 : 0;
    }
    return term->known_empty == 1;
}

bool Store::decide_empty(Term* term) {
    const Descent descent(*this);
    switch (term->kind) {
        case Kind::kSequence:
            for (Term* element : spine_of(term)) {
                if (is_empty(element)) return true;
            }
            return false;
        case Kind::kAlternation:
            for (Term* item : Alternatives(term)) {
                if (!is_empty(item)) return false;
            }
            return true;
        case Kind::kRepeat:
            return term->low > 0 && is_empty(term->item());
        case Kind::kLexeme:
            return is_empty(term->item());
        default:
            return search_empty(term);
    }
}

std::pair<bool, std::unique_ptr<std::string>> Store::without_counters(Term* term) {
    if (term->kind != Kind::kBoth) return {false, nullptr};
    auto [others, counters] = split_counters(term);
    if (counters.empty() || !others) return {false, nullptr};
    if (is_empty(others)) return {true, nullptr};
    const std::string& text = shortest(others);
    for (Term* counter : counters) {
        if (!accepts(counter, text)) return {false, nullptr};
    }
    return {false, std::make_unique<std::string>(text)};
}

bool Store::accepts(Term* term, std::string_view text) {
    spend(1 + text.size() / 16);
    for (char each : text) {
        Term* next = nullptr;
        for (const Pair& pair : parts(term)) {
            if (pair.bits.contains(static_cast<std::uint8_t>(each))) {
                next = pair.after;
                break;
            }
        }
        if (!next) return false;
        term = next;
    }
    return term->nullable;
}

// Best-first over the derivatives, towards those that may end soonest.
bool Store::search_empty(Term* term) {
    const auto known = without_counters(term);
    if (known.first || known.second) return known.first;
    std::unordered_map<Term*, Term*> reached_from{{term, nullptr}};
    // (floor, negated serial, term): of equal ones the newest first.
    using Entry = std::tuple<Count, std::int64_t, Term*>;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> queue;
    queue.emplace(term->floor, 0, term);
    while (!queue.empty()) {
        Term* here = std::get<2>(queue.top());
        queue.pop();
        spend();
        if (here->nullable || !here->is_searched || here->known_empty == 0) {
            for (Term* step = here; step; step = reached_from[step]) step->known_empty = 0;
            return false;
        }
        for (const Pair& pair : form(here)) {
            Term* after = pair.after;
            if (after->kind == Kind::kEmpty || after->known_empty == 1) continue;
            if (reached_from.emplace(after, here).second) {
                queue.emplace(after->floor, -static_cast<std::int64_t>(after->serial), after);
            }
        }
    }
    for (const auto& each : reached_from) each.first->known_empty = 1;
    return true;
}

// Lengths and texts of shortest strings

Count Store::min_bytes(Term* term) {
    if (term->shortest_length == kUnknown) settle_non_empty(term, Fact::kLength);
    return term->shortest_length;
}

const std::string& Store::shortest(Term* term) {
    if (!term->shortest) settle_non_empty(term, Fact::kText);
    return *term->shortest;
}

bool Store::is_known(const Term* term, Fact fact) {
    return fact == Fact::kText ? term->shortest != nullptr : term->shortest_length != kUnknown;
}

void Store::settle_non_empty(Term* term, Fact fact) {
    std::vector<Term*> pending{term};
    while (!pending.empty()) {
        Term* top = pending.back();
        const bool is_searched =
            top->nullable || top->kind == Kind::kBoth || top->kind == Kind::kNot ||
            top->kind == Kind::kCapture;
        if (!is_known(top, fact) && !is_searched) {
            const std::size_t before = pending.size();
            for (std::uint32_t i = 0; i < top->num_items; ++i) {
                Term* item = top->item(i);
                if (!is_known(item, fact) && !(item != term && is_empty(item))) {
                    pending.push_back(item);
                }
            }
            if (pending.size() > before) continue;
        }
        if (!is_known(top, fact)) {
            if ((top->kind == Kind::kBoth || top->kind == Kind::kNot) && !top->nullable) {
                search_shortest(top);
            }
            learn(top, fact);
        }
        pending.pop_back();
    }
}

void Store::learn(Term* term, Fact fact) {
    spend();
    if (fact == Fact::kLength) {
        Count length = 0;
        if (term->nullable) {
            length = 0;
        } else if (term->kind == Kind::kBytes) {
            length = 1;
        } else if (term->kind == Kind::kWords) {
            length = kMost;
            for (Count i = term->low; i < term->high; ++i) {
                length = std::min(length, static_cast<Count>(term->suffix(i).size()));
            }
        } else if (term->kind == Kind::kCall) {
            length = term->rule->min_bytes;
        } else if (term->kind == Kind::kTable) {
            length = term->floor;
        } else if (term->kind == Kind::kCapture) {
            const Descent descent(*this);
            for (Term* each : shortest_steps(term)) length = std::max(length, min_bytes(each));
        } else if (term->kind == Kind::kMember) {
            length = best_member(static_cast<ObjectMoves&>(*term->moves), *term).num_bytes;
        } else if (is_unfolded(term->kind)) {
            length = term->moves->min_bytes(*term->where).value_or(kMost);
        } else if (term->kind == Kind::kBoth || term->kind == Kind::kNot) {
            length = static_cast<Count>(term->shortest->size());
        } else if (term->kind == Kind::kSequence) {
            length = add(term->item(0)->shortest_length, term->item(1)->shortest_length);
        } else if (term->kind == Kind::kRepeat) {
            length = multiply(term->low, term->item()->shortest_length);
        } else {
            length = kMost;
            for (std::uint32_t i = 0; i < term->num_items; ++i) {
                const Count each = term->item(i)->shortest_length;
                if (each != kUnknown) length = std::min(length, each);
            }
        }
        term->shortest_length = length;
        return;
    }
    std::string text;
    if (term->nullable) {
        text = "";
    } else if (term->kind == Kind::kBytes) {
        text = std::string(1, static_cast<char>(term->bits.plainest()));
    } else if (term->kind == Kind::kWords) {
        auto best = term->suffix(term->low);
        for (Count i = term->low + 1; i < term->high; ++i) {
            const auto each = term->suffix(i);
            if (each.size() < best.size()) best = each;
        }
        text = std::string(best);
    } else if (term->kind == Kind::kBoth || term->kind == Kind::kNot) {
        return;  // found by the search
    } else if (term->kind == Kind::kTable) {
        text = shortest_of_table(*term);
    } else if (term->kind == Kind::kSequence) {
        text = *term->item(0)->shortest + *term->item(1)->shortest;
    } else if (term->kind == Kind::kRepeat) {
        const std::string& once = *term->item()->shortest;
        if (multiply(term->low, static_cast<Count>(once.size())) > Count{kLongestText}) {
            throw TooComplex("the shortest text of the grammar is too long to write out");
        }
        text.reserve(once.size() * static_cast<std::size_t>(term->low));
        for (Count i = 0; i < term->low; ++i) text += once;
    } else {
        const std::string* best = nullptr;
        for (std::uint32_t i = 0; i < term->num_items; ++i) {
            const auto& each = term->item(i)->shortest;
            if (each && (!best || each->size() < best->size())) best = each.get();
        }
        if (!best) throw TooComplex("a text is asked for that only calls of rules have");
        text = *best;
    }
    hold(text.size());
    term->shortest = std::make_unique<std::string>(std::move(text));
}

// Breadth-first over the derivatives; the terms on the way learn their own answers too.
void Store::search_shortest(Term* term) {
    if (term->shortest) return;
    auto known = without_counters(term);
    if (known.second) {
        term->shortest = std::move(known.second);
        return;
    }
    std::unordered_map<Term*, std::pair<Term*, std::uint8_t>> reached_from{{term, {nullptr, 0}}};
    std::queue<Term*> queue;
    queue.push(term);
    while (!queue.empty()) {
        Term* here = queue.front();
        queue.pop();
        spend();
        if (here->nullable) {
            std::string backwards;
            while (true) {
                here->shortest_length = static_cast<Count>(backwards.size());
                if (here == term || backwards.size() <= kLongestOnTheWay) {
                    here->shortest =
                        std::make_unique<std::string>(backwards.rbegin(), backwards.rend());
                    hold(backwards.size());
                }
                if (here == term) return;
                const auto& [before, byte] = reached_from[here];
                backwards.push_back(static_cast<char>(byte));
                here = before;
            }
        }
        for (const Pair& pair : parts(here)) {
            const bool is_new =
                reached_from.emplace(pair.after, std::make_pair(here, pair.bits.plainest())).second;
            if (is_new) queue.push(pair.after);
        }
    }
    throw TooComplex("a shortest text is asked for of what has none");
}

// Counters of characters

std::pair<Term*, std::vector<Term*>> Store::split_counters(Term* term) {
    std::vector<Term*> counters;
    std::vector<Term*> others;
    for (std::uint32_t i = 0; i < term->num_items; ++i) {
        (counts_characters(term->item(i)) ? counters : others).push_back(term->item(i));
    }
    return {others.empty() ? nullptr : both(others), counters};
}

bool Store::counts_characters(Term* term) {
    for (Term* each : Alternatives(term)) {
        // The end of it is looked at first, without a list: most terms count nothing.
        Term* last = each;
        while (last->kind == Kind::kSequence) last = last->item(1);
        if (last->kind != Kind::kRepeat || !last->item()->is_character) return false;
        while (each->kind == Kind::kSequence) {
            if (!parts_of_characters().count(each->item(0))) return false;
            each = each->item(1);
        }
    }
    return true;
}

Term* Store::mark_character(Term* term) {
    if (!term->is_character) {
        term->is_character = true;
        characters_.push_back(term);
        has_character_parts_ = false;
    }
    return term;
}

const std::unordered_set<Term*>& Store::parts_of_characters() {
    if (!has_character_parts_) {
        std::unordered_set<Term*> known;
        std::vector<Term*> pending(characters_);
        while (!pending.empty()) {
            Term* here = pending.back();
            pending.pop_back();
            for (const Pair& pair : form(here)) {
                for (Term* each : spine_of(pair.after)) {
                    if (known.insert(each).second) pending.push_back(each);
                }
            }
        }
        character_parts_ = std::move(known);
        has_character_parts_ = true;
    }
    return character_parts_;
}

}  // namespace palmette
