// What an object or array is made of, one part at a time, as terms.
//
// The twin of `palmette.grammar.unfold`. A term of kind OBJECT or ARRAY is what may follow at a
// place: from the comma before the next part, or the closing bracket, to the end. A term of kind
// MEMBER is the rest of a declared member whose key has begun, and all that follows it: one of the
// keys keys[low:high], from byte `depth` on.
//
// Where parts must not come twice, a term of kind CAPTURE is the rest of such a part, of which `text`
// is read, and all that follows: the texts that came go with the place, so there are as many terms as
// texts. Masks are made without them, as far as that goes: `lenient` forgets the text that is being
// read. A second part after it could be that text again, so there the way ends in a CAPTURE without
// derivatives (a barrier), and the few tokens that lead beyond it are tried one by one.
#include <algorithm>
#include <functional>
#include <queue>
#include <set>
#include <tuple>

#include "hash.hpp"
#include "store.hpp"

namespace palmette {

namespace {

std::uint64_t hash_of_place(Kind kind, const Where* where) {
    return mix(hash_of(kind), reinterpret_cast<std::uintptr_t>(where));
}

}  // namespace

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
    const std::uint64_t hash = hash_of_place(Kind::kObject, where);
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
    return keep_member(moves, here, low, high, depth);
}

Term* Store::keep_member(ObjectMoves& moves, const Where& place, Count low, Count high,
                         std::uint32_t depth) {
    const Where* where = moves.keep(place);
    std::uint64_t hash = hash_of_place(Kind::kMember, where);
    hash = mix(mix(hash, static_cast<std::uint64_t>(low)), static_cast<std::uint64_t>(high));
    hash = mix(hash, depth);
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
            moves, where, place ? items_at(moves, where, *place) : std::vector<Term*>());
    }
    auto& moves = static_cast<ObjectMoves&>(*term->moves);
    if (term->kind == Kind::kMember) return keys(moves, where, term->low, term->high, term->depth);
    std::vector<Term*> options{
        member(moves, where, 0, static_cast<Count>(moves.keys().size()), 0)};
    for (std::size_t index = 0; index < moves.names().size(); ++index) {
        const std::int64_t place = -1 - static_cast<std::int64_t>(index);
        Term* name = moves.names()[index];
        if (!moves.is_distinct()) {
            options.push_back(sequence(name, after_key(moves, where, place)));
        } else if (!moves.offers(where, place).empty()) {
            options.push_back(unrepeated(moves, where, place, less(name, where)));
        }
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

std::vector<Term*> Store::items_at(ArrayMoves& moves, const Where& where, std::int64_t place) {
    if (!moves.is_distinct()) return values_at(moves, where, place);
    std::vector<Term*> items;
    for (const auto& [choice, after] : moves.offers(where, place)) {
        Term* value = less(alternation(choice->values), where);
        items.push_back(unrepeated(moves, after, place, value));
    }
    return items;
}

// What may stand at a place, with what follows.
std::vector<Term*> Store::values_at(Moves& moves, const Where& where, std::int64_t place) {
    std::vector<Term*> values;
    for (const auto& [choice, after] : moves.offers(where, place)) {
        values.push_back(sequence(alternation(choice->values), at_or_barrier(moves, after)));
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

Term* Store::after_key(Moves& moves, const Where& where, std::int64_t place) {
    return sequence(moves.marks().colon, alternation(values_at(moves, where, place)));
}

// Parts that must not come twice

Term* Store::capture(Moves& moves, const Where& place_, std::int64_t place, Term* rest,
                     const std::string& text) {
    if (is_empty(rest)) return empty_;
    if (rest->kind == Kind::kEpsilon) return after_text(moves, place_.with_text(text), place);
    return keep_capture(moves, place_, place, rest, text);
}

Term* Store::keep_capture(Moves& moves, const Where& place_, std::int64_t place, Term* rest,
                          const std::string& text) {
    const Where* where = moves.keep(place_);
    std::uint64_t hash = hash_of_place(Kind::kCapture, where);
    hash = mix(mix(hash, static_cast<std::uint64_t>(place)), rest->serial);
    hash = mix(hash, std::hash<std::string>()(text));
    return intern(
        hash,
        [&](const Term* other) {
            return other->kind == Kind::kCapture && other->where == where && other->low == place &&
                   other->item() == rest && *other->text == text;
        },
        [&] {
            Term* term = make(Kind::kCapture, hash, false);
            term->set_items(&rest, 1);
            term->moves = &moves;
            term->where = where;
            term->low = place;
            term->text = std::make_unique<std::string>(text);
            return term;
        });
}

// A part that must not come twice, and what follows; `where` and `place` as in a CAPTURE.
Term* Store::unrepeated(Moves& moves, const Where& where, std::int64_t place, Term* rest) {
    if (is_empty(rest)) return empty_;
    if (where.forgotten != 0) return capture(moves, where, place, rest, "");
    return sequence(rest, after_text(moves, where.with_forgotten(1), place));
}

// What follows a part that must not come twice. `where` is the place after an item, but that before
// a name, whose value is still to come.
Term* Store::after_text(Moves& moves, const Where& where, std::int64_t place) {
    const bool is_array = dynamic_cast<ArrayMoves*>(&moves) != nullptr;
    return is_array ? at_or_barrier(moves, where) : after_key(moves, where, place);
}

// What may follow at a place; a barrier if a forgotten text decides whether more may come.
Term* Store::at_or_barrier(Moves& moves, const Where& where) {
    if (!moves.is_distinct() || where.forgotten != 1) return at(&moves, where);
    bool is_sure = false;
    std::vector<Term*> values;
    if (auto* array = dynamic_cast<ArrayMoves*>(&moves)) {
        const auto place = array->place(where);
        is_sure = !place;
        if (place) {
            for (const auto& offer : moves.offers(where, *place)) {
                const auto& more = offer.first->values;
                values.insert(values.end(), more.begin(), more.end());
            }
        }
    } else {
        auto& object = static_cast<ObjectMoves&>(moves);
        const auto num_keys = static_cast<Count>(object.keys().size());
        is_sure = !object.candidates(where, 0, num_keys).empty();
        for (std::size_t i = 0; i < object.names().size(); ++i) {
            if (!moves.offers(where, -1 - static_cast<std::int64_t>(i)).empty()) {
                values.push_back(object.names()[i]);
            }
        }
    }
    if (values.empty() || is_sure) return at(&moves, where);
    std::set<std::string> texts;
    for (Term* value : values) {
        for (auto& text : first_texts(less(value, where), 2)) texts.insert(std::move(text));
    }
    return texts.size() > 1 ? at(&moves, where) : keep_capture(moves, where, 0, epsilon_, "");
}

Term* Store::lenient(Term* term) {
    if (!term->is_exact) return term;
    const Descent descent(*this);
    if (term->kind == Kind::kAlternation) {
        std::vector<Term*> items;
        for (Term* item : Alternatives(term)) items.push_back(lenient(item));
        return alternation(items);
    }
    if (term->kind == Kind::kSequence) {
        Term* head = term->item(0);
        Term* tail = term->item(1);
        return sequence(lenient(head), head->nullable ? lenient(tail) : tail);
    }
    Moves& moves = *term->moves;
    if (term->kind == Kind::kCapture) {
        return sequence(term->item(), after_text(moves, term->where->with_forgotten(1), term->low));
    }
    const Where where = term->where->with_forgotten(0);
    if (term->kind != Kind::kMember) return at(&moves, where);
    return keep_member(static_cast<ObjectMoves&>(moves), where, term->low, term->high, term->depth);
}

// Each byte by itself, for each makes another text.
Pairs Store::derive_capture(Term* term) {
    Pairs pairs;
    if (term->is_barrier) return pairs;
    Moves& moves = *term->moves;
    const Where where = *term->where;
    Term* rest = term->item();
    for (const Pair& pair : parts(rest)) {
        Term* after = pair.after;
        pair.bits.for_each([&](std::uint8_t byte) {
            const std::string text = *term->text + static_cast<char>(byte);
            pairs.push_back(
                {ByteSet::of(byte), capture(moves, where, term->low, after, text)});
        });
    }
    if (rest->nullable) {
        const KeptPairs inner = form(after_text(moves, where.with_text(*term->text), term->low));
        pairs.insert(pairs.end(), inner.begin(), inner.end());
    }
    return pairs;
}

Term* Store::step(Term* term, std::uint8_t byte) {
    const Descent descent(*this);
    spend();
    if (!term->is_capturing) {
        for (const Pair& pair : parts(term)) {
            if (pair.bits.contains(byte)) return pair.after;
        }
        return empty_;
    }
    if (term->kind == Kind::kAlternation) {
        std::vector<Term*> items;
        for (Term* item : Alternatives(term)) items.push_back(step(item, byte));
        return alternation(items);
    }
    if (term->kind == Kind::kSequence) {
        Term* tail = term->item(1);
        Term* after = sequence(step(term->item(0), byte), tail);
        if (!term->item(0)->nullable) return after;
        Term* options[] = {after, step(tail, byte)};
        return alternation(options, 2);
    }
    Moves& moves = *term->moves;
    const Where where = *term->where;
    Term* rest = term->item();
    Term* more = step(rest, byte);
    Term* after =
        capture(moves, where, term->low, more, *term->text + static_cast<char>(byte));
    if (!rest->nullable) return after;
    Term* beyond = after_text(moves, where.with_text(*term->text), term->low);
    Term* options[] = {after, step(beyond, byte)};
    return alternation(options, 2);
}

Term* Store::less(Term* value, const Where& where) {
    if (!where.seen) return value;
    std::vector<std::string> within;
    for (const auto& text : where.seen->texts) {
        spend();
        if (accepts(value, text)) within.push_back(text);
    }
    if (within.empty()) return value;
    std::vector<Term*> items;
    for (Term* item : Alternatives(value)) {
        std::vector<std::string> excluded;
        for (const auto& text : within) {
            if (accepts(item, text)) excluded.push_back(text);
        }
        if (excluded.empty()) {
            items.push_back(item);
            continue;
        }
        Term* others = complement(words(std::move(excluded)));
        const bool is_lexeme = item->kind == Kind::kLexeme;
        Term* rest = both({is_lexeme ? item->item() : item, others});
        items.push_back(is_lexeme ? lexeme(rest) : rest);
    }
    return alternation(items);
}

std::vector<std::string> Store::first_texts(Term* value, std::size_t count) {
    std::vector<std::string> texts;
    if (is_empty(value)) return texts;
    using Entry = std::tuple<Count, std::string, std::uint32_t, Term*>;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> queue;
    std::size_t num_bytes = 0;
    queue.emplace(min_bytes(value), "", value->serial, value);
    while (!queue.empty() && texts.size() < count) {
        const auto [length, text, serial, term] = queue.top();
        queue.pop();
        if (length == static_cast<Count>(text.size()) && term->nullable) texts.push_back(text);
        spend();
        for (const Pair& pair : parts(term)) {
            Term* after = pair.after;
            const Count longer = add(static_cast<Count>(text.size()) + 1, min_bytes(after));
            // Each of them begins a text, so that no more than `count` are needed.
            std::size_t num_begun = 0;
            pair.bits.for_each([&](std::uint8_t byte) {
                if (num_begun++ >= count) return;
                queue.emplace(longer, text + static_cast<char>(byte), after->serial, after);
                hold(text.size());
                num_bytes += text.size();
            });
        }
    }
    held_ -= num_bytes;
    return texts;
}

// Cheapest completions

std::vector<Term*> Store::shortest_steps(Term* term) {
    Moves& moves = *term->moves;
    const Where where = *term->where;
    if (term->kind == Kind::kCapture) {
        if (term->item() == epsilon_) return {at(&moves, where)};
        return unrepeated_steps(moves, where, term->low, term->item(), *term->text);
    }
    if (!moves.is_distinct() || term->kind == Kind::kMember) return {shortest_step(term)};
    const auto next = moves.step(where);
    const bool is_object = term->kind == Kind::kObject;
    if (!next || (is_object && next->place >= 0)) return {shortest_step(term)};
    Term* value = is_object ? static_cast<ObjectMoves&>(moves)
                                  .names()[static_cast<std::size_t>(-1 - next->place)]
                            : alternation(next->choice->values);
    auto steps = unrepeated_steps(moves, is_object ? where : next->after, next->place,
                                  less(value, where), "");
    Term* before = where.is_first ? moves.marks().blank : moves.marks().comma;
    for (Term*& step : steps) step = sequence(before, step);
    return steps;
}

std::vector<Term*> Store::unrepeated_steps(Moves& moves, const Where& where, std::int64_t place,
                                           Term* rest, const std::string& text) {
    // Of as many texts one has not come before.
    const std::size_t num_needed = 1 + static_cast<std::size_t>(std::max(where.forgotten, 0));
    const auto ends = first_texts(rest, num_needed);
    std::vector<Term*> steps;
    if (ends.size() < num_needed) return steps;
    for (const auto& end : ends) {
        Term* after = cheapest_after(moves, where.with_text(text + end), place);
        steps.push_back(sequence(literal(end), after));
    }
    return steps;
}

// What follows a part that must not come twice, without a choice; see `after_text`.
Term* Store::cheapest_after(Moves& moves, const Where& where, std::int64_t place) {
    if (dynamic_cast<ArrayMoves*>(&moves)) return at(&moves, where);
    const Choice* best = nullptr;
    Count least = 0;
    Where then;
    for (auto& [choice, after] : moves.offers(where, place)) {
        const Count num_bytes = add(choice->num_bytes, moves.min_bytes(after).value_or(0));
        if (best && num_bytes >= least) continue;
        best = choice;
        least = num_bytes;
        then = std::move(after);
    }
    if (!best) throw TooComplex("an object cannot be completed");
    return sequence(moves.marks().colon, sequence(best->values[0], at(&moves, then)));
}

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
