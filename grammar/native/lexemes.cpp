#include "lexemes.hpp"

#include <algorithm>
#include <unordered_set>

namespace palmette {

namespace {

constexpr std::size_t kExplored = 1000;      // terms
constexpr Count kBytesPerCharacter = 6;      // at most, in the shortest of its spellings
constexpr Count kFewWords = 16;

bool excludes_finitely(const Term* term) {
    return term->kind == Kind::kNot && term->item()->is_finite;
}

// Learn about a term and, first, about its items; without recursion, for deep terms.
template <class Known, class Learn>
void settle(Term* term, Known is_known, Learn learn) {
    std::vector<Term*> pending{term};
    while (!pending.empty()) {
        Term* top = pending.back();
        if (is_known(top)) {
            pending.pop_back();
            continue;
        }
        const std::size_t before = pending.size();
        for (std::uint32_t i = 0; i < top->num_items; ++i) {
            if (!is_known(top->item(i))) pending.push_back(top->item(i));
        }
        if (pending.size() > before) continue;
        learn(top);
        pending.pop_back();
    }
}

Term* end_of(Term* term) {
    while (term->kind == Kind::kSequence) term = term->item(1);
    return term;
}

std::vector<Term*> ends_of(const std::vector<Term*>& counters) {
    std::vector<Term*> ends;
    for (Term* counter : counters) {
        for (Term* each : Alternatives(counter)) ends.push_back(end_of(each));
    }
    return ends;
}

bool is_open(const Term* end) { return end->low == 0 && end->high == kUnbounded; }

}  // namespace

// Clamping

Term* Lexemes::clamp(Term* term, Count num_bytes) {
    if (!term->clamped) term->clamped = clamp_whole(term, num_bytes);
    return term->clamped;
}

Term* Lexemes::clamp_whole(Term* term, Count num_bytes) {
    const Store::Descent descent(store_);
    if (term->kind == Kind::kLexeme) return store_.lexeme(clamp_whole(term->item(), num_bytes));
    if (term->kind == Kind::kAlternation) {
        std::vector<Term*> items;
        for (Term* item : Alternatives(term)) items.push_back(clamp_whole(item, num_bytes));
        return store_.alternation(items);
    }
    auto elements = spine_of(term);
    bool is_same = true;
    for (Term*& element : elements) {
        Term* clamped = clamp_element(element, num_bytes);
        is_same &= clamped == element;
        element = clamped;
    }
    return is_same ? term : store_.sequence(elements.data(), elements.size());
}

Term* Lexemes::clamp_element(Term* term, Count num_bytes) {
    if (term->kind == Kind::kBoth) return clamp_both(term, num_bytes);
    if (term->kind != Kind::kRepeat || term->item()->nullable) return term;
    const Count high = term->high <= num_bytes ? term->high : kUnbounded;
    return store_.repeat(term->item(), std::min(term->low, num_bytes + 1), high);
}

// What else is asked for can be completed within `detour` characters, wherever a prefix ends. A
// maximum that is further off than that can neither be met nor make it impossible.
Term* Lexemes::clamp_both(Term* term, Count num_bytes) {
    auto [others, counters] = store_.split_counters(term);
    if (counters.empty() || !others) return term;
    const auto ends = ends_of(counters);
    if (std::all_of(ends.begin(), ends.end(),
                    [](const Term* end) { return end->high == kUnbounded; })) {
        return term;
    }
    const auto far = detour(others);
    if (!far) return term;
    std::vector<Term*> items{others};
    for (Term* counter : counters) items.push_back(without_end(counter, add(num_bytes, *far)));
    return store_.both(items);
}

Term* Lexemes::without_end(Term* term, Count far) {
    if (term->kind == Kind::kAlternation) {
        std::vector<Term*> items;
        for (Term* item : Alternatives(term)) items.push_back(without_end(item, far));
        return store_.alternation(items);
    }
    auto elements = spine_of(term);
    Term*& counter = elements.back();
    if (counter->high != kUnbounded && counter->high >= far) {
        counter = store_.repeat(counter->item(), counter->low, kUnbounded);
    }
    return store_.sequence(elements.data(), elements.size());
}

// A prefix that can be completed with the excluded words can be completed without them: any
// characters may follow, so some lead away from all of them.
std::optional<std::pair<Term*, Term*>> Lexemes::without_exclusion(Term* lexeme) {
    if (lexeme->kind != Kind::kLexeme || !lexeme->is_searched) return std::nullopt;
    auto elements = spine_of(lexeme->item());
    Term** searched = nullptr;
    for (Term*& element : elements) {
        if (!element->is_searched) continue;
        if (searched) return std::nullopt;
        searched = &element;
    }
    if (!searched || (*searched)->kind != Kind::kBoth) return std::nullopt;
    auto [others, counters] = store_.split_counters(*searched);
    if (counters.size() != 1 || !others || !excludes_finitely(others)) return std::nullopt;
    for (const Term* end : ends_of(counters)) {
        if (!is_open(end)) return std::nullopt;
    }
    *searched = others->item();
    Term* excluded = store_.sequence(elements.data(), elements.size());
    *searched = counters[0];
    Term* base = store_.sequence(elements.data(), elements.size());
    return std::make_pair(store_.lexeme(base), excluded);
}

// Until the closing byte has come, any number of characters that is not too large can be completed.
std::optional<std::pair<Term*, Count>> Lexemes::without_counter(Term* lexeme) {
    if (lexeme->kind != Kind::kLexeme || lexeme->is_searched) return std::nullopt;
    auto elements = spine_of(lexeme->item());
    const std::size_t count = elements.size();
    if (count < 2) return std::nullopt;
    const Term* close = elements[count - 1];
    const bool is_byte =
        close->kind == Kind::kBytes ||
        (close->kind == Kind::kWords && close->high - close->low == 1 &&
         close->suffix(close->low).size() == 1);
    Term*& counter = elements[count - 2];
    if (!is_byte || counter->kind != Kind::kRepeat || !counter->item()->is_character ||
        is_open(counter)) {
        return std::nullopt;
    }
    const Count most = counter->high == kUnbounded ? kMost : counter->high;
    counter = store_.repeat(counter->item(), 0, kUnbounded);
    return std::make_pair(store_.lexeme(store_.sequence(elements.data(), count)), most);
}

std::optional<std::pair<Term*, Term*>> Lexemes::without_words(Term* lexeme) {
    Term* inner = lexeme->kind == Kind::kLexeme ? lexeme->item() : lexeme;
    if (inner->kind != Kind::kBoth) return std::nullopt;
    Term* excluded = nullptr;
    std::vector<Term*> others;
    for (std::uint32_t i = 0; i < inner->num_items; ++i) {
        Term* item = inner->item(i);
        if (item->kind != Kind::kNot) {
            others.push_back(item);
            continue;
        }
        const Kind kind = item->item()->kind;
        if (excluded || (kind != Kind::kWords && kind != Kind::kEpsilon)) return std::nullopt;
        excluded = item->item();
    }
    if (!excluded) return std::nullopt;
    return std::make_pair(store_.lexeme(store_.both(others)), excluded);
}

// Structure

const Structure& Lexemes::structure(Term* term) {
    settle(
        term, [](const Term* each) { return each->structure.is_known(); },
        [this](Term* each) {
            store_.spend();
            learn_structure(each);
        });
    return term->structure;
}

void Lexemes::learn_structure(Term* term) {
    if (!term->structure.is_known()) term->structure = describe(term);
}

Structure Lexemes::structure_of(WordList& list) {
    if (!list.structure.is_known()) {
        Digest digest;
        for (const auto& word : list.words) digest.add(word);
        list.structure = digest.finish();
    }
    return list.structure;
}

Structure Lexemes::structure_of(Table& table) {
    if (!table.structure.is_known()) {
        Digest digest;
        for (std::size_t state = 0; state < table.moves.size(); ++state) {
            digest.add(table.accepting[state] ? 1 : 0);
            digest.add(table.moves[state].size());
            for (const auto& move : table.moves[state]) {
                for (auto word : move.bits.words) digest.add(word);
                digest.add(move.after);
            }
        }
        table.structure = digest.finish();
    }
    return table.structure;
}

Structure Lexemes::describe(Term* term) {
    Digest digest;
    digest.add(static_cast<std::uint64_t>(term->kind));
    if (term->kind == Kind::kBytes) {
        for (auto word : term->bits.words) digest.add(word);
        return digest.finish();
    }
    if (term->kind == Kind::kWords && term->high - term->low <= kFewWords) {
        // The same whichever list it comes from.
        digest.add(0);
        for (Count i = term->low; i < term->high; ++i) digest.add(term->suffix(i));
        return digest.finish();
    }
    if (term->kind == Kind::kWords) {
        digest.add(1);
        digest.add(structure_of(*term->words));
    } else if (term->kind == Kind::kTable) {
        digest.add(structure_of(*term->table));
    }
    for (Count number : {term->low, term->high, Count{term->depth}}) {
        digest.add(static_cast<std::uint64_t>(number));
    }
    if (term->kind == Kind::kAlternation || term->kind == Kind::kBoth) {
        std::vector<Structure> items;
        for (std::uint32_t i = 0; i < term->num_items; ++i) {
            items.push_back(term->item(i)->structure);
        }
        std::sort(items.begin(), items.end());
        for (const Structure& item : items) digest.add(item);
    } else {
        for (std::uint32_t i = 0; i < term->num_items; ++i) digest.add(term->item(i)->structure);
    }
    return digest.finish();
}

// Detours

std::optional<Count> Lexemes::detour(Term* term) {
    if (!term->has_detour) {
        if (term->is_searched) {
            const auto found = searched_detour(term);
            term->detour = found ? *found : kUnknown;
            term->has_detour = true;
        } else {
            settle(
                term, [](const Term* each) { return each->has_detour; },
                [this](Term* each) { learn_detour(each); });
        }
    }
    return term->detour == kUnknown ? std::nullopt : std::optional<Count>(term->detour);
}

std::optional<Count> Lexemes::searched_detour(Term* term) {
    const Store::Descent descent(store_);
    if (term->kind == Kind::kLexeme) return detour(term->item());
    if (term->kind == Kind::kSequence) {
        Count longest = 0;
        Count after = 0;
        const auto elements = spine_of(term);
        for (auto at = elements.rbegin(); at != elements.rend(); ++at) {
            const auto inside = detour(*at);
            if (!inside) return std::nullopt;
            longest = std::max(longest, add(*inside, after));
            after = add(after, store_.min_bytes(*at));
        }
        return longest;
    }
    if (term->kind == Kind::kBoth) {
        auto [others, counters] = store_.split_counters(term);
        if (!counters.empty() && others) return counted_detour(others, counters);
    }
    return explored_detour(term);
}

// As without the counters, unless the end of one is closer than that, so that a text of fewer but
// longer characters is needed.
std::optional<Count> Lexemes::counted_detour(Term* others, const std::vector<Term*>& counters) {
    const auto ends = ends_of(counters);
    if (excludes_finitely(others) && std::all_of(ends.begin(), ends.end(), is_open)) {
        // Finish the character that has begun, and add one that leads away from every word.
        return 4 * kBytesPerCharacter;
    }
    std::optional<Count> far;
    if (std::all_of(ends.begin(), ends.end(), [](const Term* end) { return end->low == 0; })) {
        far = detour(others);
    }
    if (!far) {
        for (const Term* end : ends) {
            if (end->high != kUnbounded && (!far || end->high < *far)) far = end->high;
        }
    }
    if (!far) return std::nullopt;
    return multiply(add(*far, 2), kBytesPerCharacter);
}

void Lexemes::learn_detour(Term* term) {
    const auto inner = [term](std::uint32_t index) {
        return std::max(term->item(index)->detour, Count{0});
    };
    Count longest = 0;
    if (term->kind == Kind::kWords) {
        for (Count i = term->low; i < term->high; ++i) {
            const auto& word = term->words->words[static_cast<std::size_t>(i)];
            longest = std::max(longest, static_cast<Count>(word.size()));
        }
    } else if (term->kind == Kind::kTable) {
        const auto& distances = term->table->distances;
        longest = *std::max_element(distances.begin(), distances.end());
    } else if (term->kind == Kind::kSequence) {
        longest = std::max(add(inner(0), store_.min_bytes(term->item(1))), inner(1));
    } else if (term->kind == Kind::kRepeat) {
        const Count others = std::max(term->low - 1, Count{0});
        longest = add(inner(0), multiply(others, store_.min_bytes(term->item())));
    } else {
        for (std::uint32_t i = 0; i < term->num_items; ++i) longest = std::max(longest, inner(i));
    }
    term->detour = longest;
    term->has_detour = true;
}

// The longest of the shortest ways out, over everything that can be reached.
std::optional<Count> Lexemes::explored_detour(Term* term) {
    std::unordered_map<Term*, std::vector<Term*>> arrivals{{term, {}}};
    std::vector<Term*> pending{term};
    while (!pending.empty() && arrivals.size() <= kExplored) {
        Term* here = pending.back();
        pending.pop_back();
        store_.spend();
        for (const Pair& pair : store_.parts(here)) {
            const auto [place, is_new] = arrivals.try_emplace(pair.after);
            if (is_new) pending.push_back(pair.after);
            place->second.push_back(here);
        }
    }
    Count longest = kUnknown;
    if (pending.empty()) {
        std::unordered_set<Term*> done;
        for (const auto& each : arrivals) {
            if (each.first->nullable) done.insert(each.first);
        }
        std::vector<Term*> level(done.begin(), done.end());
        while (!level.empty()) {
            ++longest;
            std::vector<Term*> next;
            for (Term* each : level) {
                for (Term* before : arrivals[each]) {
                    if (done.insert(before).second) next.push_back(before);
                }
            }
            level.swap(next);
        }
    }
    for (const auto& each : arrivals) {
        if (!each.first->is_searched) continue;
        each.first->detour = longest;
        each.first->has_detour = true;
    }
    return longest == kUnknown ? std::nullopt : std::optional<Count>(longest);
}

}  // namespace palmette
