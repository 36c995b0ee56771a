// What an object or array is made of, one part at a time, as terms.
//
// The twin of `palmette.grammar.unfold`. A term of kind OBJECT or ARRAY is what may follow at a
// place: from the comma before the next part, or the closing bracket, to the end. A term of kind
// MEMBER is the rest of a declared member whose key has begun, and all that follows it: one of the
// keys keys[low:high], from byte `depth` on.
#include <algorithm>

#include "store.hpp"

namespace palmette {

Term* Store::object(Members shape) {
    auto& members = shape.members;
    const auto is_unspelled = [this](const Member& member) { return !can_spell(member.key); };
    for (const Member& member : members) {
        if (member.is_required && is_unspelled(member)) return empty_;
    }
    members.erase(std::remove_if(members.begin(), members.end(), is_unspelled), members.end());
    Term* open = shape.marks.open;
    moves_.push_back(std::make_unique<ObjectMoves>(*this, std::move(shape)));
    return start_of(*moves_.back(), open);
}

Term* Store::array(const Items& shape) {
    moves_.push_back(std::make_unique<ArrayMoves>(*this, shape));
    return start_of(*moves_.back(), shape.marks.open);
}

Term* Store::start_of(Moves& moves, Term* open) {
    const Where start = moves.start();
    return moves.min_bytes(start) ? sequence(open, at(&moves, start)) : empty_;
}

Term* Store::at(Moves* moves, const Where& place) {
    const Where* where = moves->keep(place);
    const std::uint64_t hash = reinterpret_cast<std::uintptr_t>(where) * 0x9E3779B97F4A7C15ULL;
    return intern(
        hash,
        [&](const Term* other) {
            return (other->kind == Kind::kObject || other->kind == Kind::kArray) &&
                   other->where == where;
        },
        [&] {
            const bool is_object = dynamic_cast<ObjectMoves*>(moves) != nullptr;
            Term* term = make(is_object ? Kind::kObject : Kind::kArray, hash, false);
            term->moves = moves;
            term->where = where;
            return term;
        });
}

// Of the members with a key out of keys[low:high] only those that may come; empty if none may.
Term* Store::member(ObjectMoves& moves, const Where& place, Count low, Count high,
                    std::uint32_t depth) {
    const auto candidates = moves.candidates(place, low, high);
    if (candidates.empty()) return empty_;
    Where here = place;
    if (!moves.is_any_order()) {
        // What was left out before makes no odds.
        here.place = *std::min_element(candidates.begin(), candidates.end());
    }
    if (candidates.size() == 1) {
        const std::string_view key = moves.key_of(candidates[0]);
        return sequence(literal(key.substr(depth)), after_key(moves, here, candidates[0]));
    }
    here.is_first = false;
    const Where* where = moves.keep(here);
    std::uint64_t hash = reinterpret_cast<std::uintptr_t>(where) * 0x9E3779B97F4A7C15ULL;
    hash = (hash ^ static_cast<std::uint64_t>(low)) * 0xBF58476D1CE4E5B9ULL;
    hash = (hash ^ static_cast<std::uint64_t>(high)) * 0x94D049BB133111EBULL;
    hash = (hash ^ depth) * 0xBF58476D1CE4E5B9ULL;
    hash ^= hash >> 31;
    return intern(
        hash,
        [&](const Term* other) {
            return other->kind == Kind::kMember && other->where == where && other->low == low &&
                   other->high == high && other->depth == depth;
        },
        [&] {
            Term* term = make(Kind::kMember, hash, false);
            term->moves = &moves;
            term->where = where;
            term->low = low;
            term->high = high;
            term->depth = depth;
            return term;
        });
}

// The term with its next part spelled out.
Term* Store::unfold(Term* term) {
    const Where where = *term->where;
    if (term->kind == Kind::kArray) {
        auto& moves = static_cast<ArrayMoves&>(*term->moves);
        const auto place = moves.place(where);
        return more_or_close(
            moves, where, place ? values_at(moves, where, *place) : std::vector<Term*>());
    }
    auto& moves = static_cast<ObjectMoves&>(*term->moves);
    if (term->kind == Kind::kMember) return keys(moves, where, term->low, term->high, term->depth);
    std::vector<Term*> options{
        member(moves, where, 0, static_cast<Count>(moves.keys().size()), 0)};
    for (std::size_t index = 0; index < moves.names().size(); ++index) {
        const auto values = values_at(moves, where, -1 - static_cast<std::int64_t>(index));
        if (values.empty()) continue;
        Term* rest = sequence(moves.marks().colon, alternation(values));
        options.push_back(sequence(moves.names()[index], rest));
    }
    return more_or_close(moves, where, options);
}

Term* Store::more_or_close(Moves& moves, const Where& where, const std::vector<Term*>& parts) {
    const Punctuation& marks = moves.marks();
    Term* more = sequence(where.is_first ? marks.blank : marks.comma, alternation(parts));
    if (!moves.may_close(where)) return more;
    Term* options[] = {more, marks.close};
    return alternation(options, 2);
}

// What may stand at a place, with what follows.
std::vector<Term*> Store::values_at(Moves& moves, const Where& where, std::int64_t place) {
    std::vector<Term*> values;
    for (const auto& [choice, after] : moves.offers(where, place)) {
        values.push_back(sequence(alternation(choice->values), at(&moves, after)));
    }
    return values;
}

Term* Store::keys(ObjectMoves& moves, const Where& where, Count low, Count high,
                  std::uint32_t depth) {
    const auto& keys = moves.keys();
    std::vector<Term*> options;
    for (Count at = low; at < high;) {
        const std::string& first = keys[static_cast<std::size_t>(at)];
        if (first.size() == depth) {
            options.push_back(
                after_key(moves, where, moves.place_of_key(static_cast<std::size_t>(at))));
            ++at;
            continue;
        }
        const char byte = first[depth];
        const auto end =
            std::partition_point(keys.begin() + at, keys.begin() + high,
                                 [&](const std::string& key) { return key[depth] == byte; });
        const Count next = end - keys.begin();
        Term* rest = member(moves, where, at, next, depth + 1);
        options.push_back(sequence(byte_set(ByteSet::of(static_cast<std::uint8_t>(byte))), rest));
        at = next;
    }
    return alternation(options);
}

Term* Store::after_key(ObjectMoves& moves, const Where& where, std::uint32_t place) {
    return sequence(moves.marks().colon, alternation(values_at(moves, where, place)));
}

// Cheapest completions

Term* Store::shortest_step(Term* term) {
    const Where where = *term->where;
    if (term->kind == Kind::kMember) {
        auto& moves = static_cast<ObjectMoves&>(*term->moves);
        const BestMember best = best_member(moves, *term);
        const std::string_view key = moves.key_of(best.place);
        Term* parts[] = {literal(key.substr(term->depth)), moves.marks().colon,
                         best.choice->values[0], at(&moves, best.after)};
        return sequence(parts, 4);
    }
    const auto step = term->moves->step(where);
    if (!step) return term->moves->marks().close;
    Term* part = step->choice->values[0];
    if (term->kind == Kind::kObject) {
        auto& moves = static_cast<ObjectMoves&>(*term->moves);
        Term* name = step->place >= 0
                         ? literal(moves.key_of(static_cast<std::uint32_t>(step->place)))
                         : moves.names()[static_cast<std::size_t>(-1 - step->place)];
        part = sequence(name, sequence(moves.marks().colon, part));
    }
    return step_over(*term->moves, where, part, *step);
}

Term* Store::step_over(Moves& moves, const Where& where, Term* part, const Step& step) {
    const Punctuation& marks = moves.marks();
    Term* another = sequence(marks.comma, part);
    Term* first = where.is_first ? sequence(marks.blank, part) : another;
    Term* parts[] = {first, repeat(another, step.times - 1, step.times - 1),
                     at(&moves, step.after)};
    return sequence(parts, 3);
}

Store::BestMember Store::best_member(ObjectMoves& moves, const Term& term) {
    const Where where = *term.where;
    BestMember best{0, nullptr, {}, kMost};
    for (auto place : moves.candidates(where, term.low, term.high)) {
        for (auto& [choice, after] : moves.offers(where, place)) {
            const auto beyond = moves.min_bytes(after);
            if (!beyond) continue;
            const Count num_bytes =
                choice->num_bytes - moves.comma_bytes() - Count{term.depth} + *beyond;
            if (!best.choice || num_bytes < best.num_bytes) {
                best = {place, choice, std::move(after), num_bytes};
            }
        }
    }
    if (!best.choice) throw TooComplex("an object cannot be completed");
    return best;
}

}  // namespace palmette
