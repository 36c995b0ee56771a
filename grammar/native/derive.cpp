// Derivatives: what may come next, and what is left after it.
#include <algorithm>
#include <unordered_map>

#include "store.hpp"

namespace palmette {

namespace {

// What is wrong where a derivative waits for itself.
TooComplex circle(const std::vector<Term*>& pending, const Term* start) {
    bool is_inside = false;
    for (const Term* term : pending) {
        is_inside |= term == start;
        if (is_inside && term->is_waiting && term->rule) {
            return TooComplex(term->rule->name + " begins with itself");
        }
    }
    return nested_too_deeply();
}

// Leave each term once.
void merge(Pairs& pairs) {
    constexpr std::size_t kFew = 12;
    const bool is_short = pairs.size() <= kFew;
    std::unordered_map<Term*, std::size_t> index;
    std::size_t num_kept = 0;
    for (const Pair& pair : pairs) {
        std::size_t at = 0;
        if (is_short) {
            while (at < num_kept && pairs[at].after != pair.after) ++at;
        } else {
            at = index.emplace(pair.after, num_kept).first->second;
        }
        if (at < num_kept) {
            pairs[at].bits = pairs[at].bits | pair.bits;
        } else {
            pairs[num_kept++] = pair;
        }
    }
    pairs.erase(pairs.begin() + static_cast<std::ptrdiff_t>(num_kept), pairs.end());
}

Pairs pairs_of(KeptPairs kept) { return {kept.begin(), kept.end()}; }

bool operator==(const KeptPairs& kept, const Pairs& pairs) {
    return std::equal(kept.begin(), kept.end(), pairs.begin(), pairs.end());
}

}  // namespace

KeptPairs Store::keep(const Pairs& pairs) {
    if (pairs.size() > kFew) hold(sizeof(Pair) * (pairs.size() - kFew));
    return {memos_.copy(pairs.data(), pairs.size()), static_cast<std::uint32_t>(pairs.size())};
}

KeptPairs Store::parts(Term* term) {
    if (!term->has_parts) {
        term->parts = determinise(form(term));
        term->has_parts = true;
    }
    return term->parts;
}

KeptPairs Store::form(Term* term) {
    if (!term->has_form) settle_form(term);
    return term->form;
}

// The terms whose derivatives that of a sequence, alternation, repetition or call is made of.
template <class Function>
void Store::for_each_beginning(Term* term, Function function) {
    if (term->kind == Kind::kSequence) {
        function(term->item(0));
        if (term->item(0)->nullable) function(term->item(1));
    } else if (term->kind == Kind::kAlternation || term->kind == Kind::kRepeat) {
        for (std::uint32_t i = 0; i < term->num_items; ++i) function(term->item(i));
    } else if (term->kind == Kind::kCall) {
        function(body_of(*term->rule));
    }
}

// Derive a term after those that its derivative is made of; stacks may be deep.
void Store::settle_form(Term* term) {
    const Descent descent(*this);
    struct Pending : std::vector<Term*> {
        ~Pending() {
            for (Term* each : *this) each->is_waiting = false;
        }
    } pending;
    pending.push_back(term);
    while (!pending.empty()) {
        Term* top = pending.back();
        if (!top->has_form && !top->is_waiting) {
            const std::size_t before = pending.size();
            for_each_beginning(top, [&](Term* each) {
                if (!each->has_form) pending.push_back(each);
            });
            if (pending.size() > before) {
                top->is_waiting = true;
                for (std::size_t i = before; i < pending.size(); ++i) {
                    if (pending[i]->is_waiting) throw circle(pending, pending[i]);
                }
                continue;
            }
        }
        if (!top->has_form) {
            Pairs found = derive(top);
            merge(found);
            spend(found.size() / 16);
            top->form = keep(found);
            top->has_form = true;
        }
        top->is_waiting = false;
        pending.pop_back();
    }
}

Pairs Store::derive(Term* term) {
    const Descent descent(*this);
    spend();
    Pairs pairs;
    switch (term->kind) {
        case Kind::kBytes:
            pairs.push_back({term->bits, epsilon_});
            break;
        case Kind::kWords:
            return derive_words(term);
        case Kind::kSequence:
            return derive_sequence(term);
        case Kind::kAlternation:
            spend(term->num_items);
            for (std::uint32_t i = 0; i < term->num_items; ++i) {
                const KeptPairs inner = form(term->item(i));
                pairs.insert(pairs.end(), inner.begin(), inner.end());
            }
            break;
        case Kind::kRepeat: {
            Term* item = term->item();
            const Count high = term->high == kUnbounded ? kUnbounded : term->high - 1;
            Term* rest = repeat(item, std::max(term->low - 1, Count{0}), high);
            for (const Pair& pair : form(item)) {
                pairs.push_back({pair.bits, sequence(pair.after, rest)});
            }
            break;
        }
        case Kind::kBoth:
            return derive_both(term);
        case Kind::kNot: {
            ByteSet left = ByteSet::all();
            for (const Pair& pair : parts(term->item())) {
                left = left & ~pair.bits;
                pairs.push_back({pair.bits, complement(pair.after)});
            }
            if (left.any()) pairs.push_back({left, anything_});
            break;
        }
        case Kind::kLexeme:
            for (const Pair& pair : parts(term->item())) {
                pairs.push_back({pair.bits, lexeme(pair.after)});
            }
            break;
        case Kind::kCall:
            return pairs_of(form(body_of(*term->rule)));
        case Kind::kObject:
        case Kind::kArray:
        case Kind::kMember:
            return pairs_of(form(unfold(term)));
        case Kind::kCapture:
            return derive_capture(term);
        case Kind::kTable:
            for (const auto& move : term->table->moves[term->depth]) {
                pairs.push_back({move.bits, row(term->table, move.after)});
            }
            break;
        default:
            break;
    }
    return pairs;
}

Term* Store::after(Term* term, std::uint8_t byte) {
    if (term->has_parts || term->is_capturing) return step(term, byte);
    const Descent descent(*this);
    spend();
    std::vector<Term*> found;
    collect_after(term, byte, found, 0);
    std::size_t kept = 0;
    for (Term* each : found) {
        if (!each->is_searched || !is_empty(each)) found[kept++] = each;
    }
    found.resize(kept);
    if (found.empty()) return empty_;
    return kept == 1 ? found[0] : alternation(found);
}

// What `form` has for one byte.
void Store::collect_after(Term* term, std::uint8_t byte, std::vector<Term*>& found, int depth) {
    constexpr int kDeep = 32;  // stacks may be deeper, and rules begin with themselves
    if (term->has_form || depth > kDeep || term->kind == Kind::kCapture) {
        for (const Pair& pair : form(term)) {
            if (pair.bits.contains(byte)) found.push_back(pair.after);
        }
        return;
    }
    const auto collect_before = [&](Term* head, Term* tail) {
        std::vector<Term*> heads;
        collect_after(head, byte, heads, depth + 1);
        for (Term* each : heads) found.push_back(sequence(each, tail));
    };
    switch (term->kind) {
        case Kind::kBytes:
            if (term->bits.contains(byte)) found.push_back(epsilon_);
            break;
        case Kind::kWords: {
            const auto& words = term->words->words;
            const std::size_t at = term->depth;
            const auto first = words.begin() + term->low + (term->nullable ? 1 : 0);
            const auto wanted = static_cast<unsigned char>(byte);
            const auto low = std::partition_point(
                first, words.begin() + term->high, [&](const std::string& word) {
                    return static_cast<unsigned char>(word[at]) < wanted;
                });
            const auto high = std::partition_point(
                low, words.begin() + term->high, [&](const std::string& word) {
                    return static_cast<unsigned char>(word[at]) == wanted;
                });
            if (low != high) {
                found.push_back(this->words(term->words, low - words.begin(),
                                            high - words.begin(), term->depth + 1));
            }
            break;
        }
        case Kind::kSequence:
            collect_before(term->item(0), term->item(1));
            if (term->item(0)->nullable) collect_after(term->item(1), byte, found, depth + 1);
            break;
        case Kind::kAlternation:
            for (std::uint32_t i = 0; i < term->num_items; ++i) {
                collect_after(term->item(i), byte, found, depth + 1);
            }
            break;
        case Kind::kRepeat: {
            const Count high = term->high == kUnbounded ? kUnbounded : term->high - 1;
            collect_before(term->item(),
                           repeat(term->item(), std::max(term->low - 1, Count{0}), high));
            break;
        }
        case Kind::kBoth: {
            std::vector<Term*> afters;
            for (std::uint32_t i = 0; i < term->num_items; ++i) {
                afters.push_back(after(term->item(i), byte));
                if (afters.back() == empty_) return;
            }
            Term* common = both(afters);
            if (common != empty_) found.push_back(common);
            break;
        }
        case Kind::kNot:
            found.push_back(complement(after(term->item(), byte)));
            break;
        case Kind::kLexeme: {
            Term* inner = after(term->item(), byte);
            if (inner != empty_) found.push_back(lexeme(inner));
            break;
        }
        case Kind::kCall:
            collect_after(body_of(*term->rule), byte, found, depth + 1);
            break;
        case Kind::kObject:
        case Kind::kArray:
        case Kind::kMember:
            collect_after(unfold(term), byte, found, depth + 1);
            break;
        case Kind::kTable:
            for (const auto& move : term->table->moves[term->depth]) {
                if (move.bits.contains(byte)) found.push_back(row(term->table, move.after));
            }
            break;
        default:
            break;
    }
}

Pairs Store::derive_words(Term* term) {
    Pairs pairs;
    const auto& words = term->words->words;
    const auto depth = term->depth;
    Count at = term->low + (term->nullable ? 1 : 0);
    while (at < term->high) {
        const char byte = words[static_cast<std::size_t>(at)][depth];
        const auto end = std::partition_point(
            words.begin() + at, words.begin() + term->high,
            [&](const std::string& word) { return word[depth] == byte; });
        const Count next = end - words.begin();
        pairs.push_back({ByteSet::of(static_cast<std::uint8_t>(byte)),
                         this->words(term->words, at, next, depth + 1)});
        at = next;
    }
    return pairs;
}

Pairs Store::derive_sequence(Term* term) {
    Pairs pairs;
    Term* head = term->item(0);
    Term* tail = term->item(1);
    const KeptPairs outer = form(head);
    pairs.reserve(outer.size());
    for (const Pair& pair : outer) pairs.push_back({pair.bits, sequence(pair.after, tail)});
    if (head->nullable) {
        const KeptPairs inner = form(tail);
        pairs.insert(pairs.end(), inner.begin(), inner.end());
    }
    return pairs;
}

Pairs Store::derive_both(Term* term) {
    struct Common {
        ByteSet bits;
        std::vector<Term*> afters;
    };
    std::vector<Common> combined;
    for (const Pair& pair : parts(term->item(0))) combined.push_back({pair.bits, {pair.after}});
    for (std::uint32_t i = 1; i < term->num_items; ++i) {
        const KeptPairs others = parts(term->item(i));
        spend(combined.size() * others.size() / 16);
        std::vector<Common> more;
        for (const Common& known : combined) {
            for (const Pair& other : others) {
                const ByteSet bits = known.bits & other.bits;
                if (!bits.any()) continue;
                more.push_back({bits, known.afters});
                more.back().afters.push_back(other.after);
            }
        }
        combined.swap(more);
    }
    Pairs pairs;
    for (const Common& each : combined) {
        Term* after = both(each.afters);
        if (after != empty_) pairs.push_back({each.bits, after});
    }
    return pairs;
}

Term* Store::body_of(Rule& rule) {
    if (!rule.body) {
        const Descent descent(*this);
        rule.body = rule.build();
    }
    return rule.body;
}

Term* Store::shortest_of(Rule& rule) {
    if (!rule.shortest) {
        const Descent descent(*this);
        rule.shortest = rule.make_shortest();
    }
    return rule.shortest;
}

KeptPairs Store::determinise(KeptPairs form) {
    struct Part {
        ByteSet bits;
        std::vector<Term*> afters;
    };
    // The common case first: nothing overlaps and nothing is empty.
    ByteSet seen;
    bool is_plain = form.size() <= 8;
    for (std::size_t i = 0; is_plain && i < form.size(); ++i) {
        is_plain = !form[i].bits.intersects(seen) && !form[i].after->is_searched;
        seen = seen | form[i].bits;
    }
    if (is_plain) {
        return form;
    }
    seen = ByteSet();
    std::vector<Part> parts;
    for (const Pair& pair : form) {
        if (pair.after->is_searched && is_empty(pair.after)) continue;
        if (!pair.bits.intersects(seen)) {
            parts.push_back({pair.bits, {pair.after}});
            seen = seen | pair.bits;
            continue;
        }
        spend(parts.size() / 16);
        ByteSet left = pair.bits;
        const std::size_t num_parts = parts.size();
        for (std::size_t i = 0; i < num_parts && left.any(); ++i) {
            const ByteSet common = parts[i].bits & left;
            if (!common.any()) continue;
            if (common == parts[i].bits) {
                parts[i].afters.push_back(pair.after);
            } else {
                Part split{common, parts[i].afters};
                split.afters.push_back(pair.after);
                parts[i].bits = parts[i].bits & ~common;
                parts.push_back(std::move(split));
            }
            left = left & ~common;
        }
        if (left.any()) parts.push_back({left, {pair.after}});
        seen = seen | pair.bits;
    }
    Pairs pairs;
    for (const Part& part : parts) {
        Term* after = part.afters.size() == 1 ? part.afters[0] : alternation(part.afters);
        pairs.push_back({part.bits, after});
    }
    merge(pairs);
    return form == pairs ? form : keep(pairs);  // one copy is enough
}

}  // namespace palmette
