#include "recipe.hpp"

#include <algorithm>
#include <unordered_map>

#include "lexemes.hpp"

namespace palmette {

std::unique_ptr<Recipe> Recipe::of(const Store& store, Term* root) {
    // What a term is made of is older than it, so that by age each comes after its items.
    std::unordered_map<const Term*, std::uint32_t> index;
    std::vector<Term*> terms;
    std::vector<Term*> pending{root};
    while (!pending.empty()) {
        Term* term = pending.back();
        pending.pop_back();
        if (!index.emplace(term, 0).second) continue;
        if (is_context_free(term->kind)) return nullptr;
        if (term->kind == Kind::kTable && term->depth != 0) return nullptr;
        terms.push_back(term);
        for (std::uint32_t i = 0; i < term->num_items; ++i) pending.push_back(term->item(i));
    }
    std::sort(terms.begin(), terms.end(),
              [](const Term* a, const Term* b) { return a->serial < b->serial; });
    for (std::uint32_t i = 0; i < terms.size(); ++i) index[terms[i]] = i;
    auto recipe = std::make_unique<Recipe>();
    for (Term* term : terms) {
        Lexemes::learn_structure(term);
        Step step{};
        step.structure = term->structure;
        step.kind = term->kind;
        step.is_character = term->is_character;
        step.known_empty = term->known_empty;
        step.shortest_length = term->shortest_length;
        if (term->shortest) step.shortest = *term->shortest;
        step.bits = term->bits;
        step.low = term->low;
        step.high = term->high;
        // Nothing is made of "anything": stores have it.
        const std::uint32_t num_items = term == store.anything() ? 0 : term->num_items;
        for (std::uint32_t i = 0; i < num_items; ++i) step.items.push_back(index[term->item(i)]);
        if (term->kind == Kind::kWords) {
            for (Count i = term->low; i < term->high; ++i) step.words.emplace_back(term->suffix(i));
        }
        if (term->kind == Kind::kTable) {
            step.accepting = term->table->accepting;
            step.moves = term->table->moves;
        }
        recipe->steps_.push_back(std::move(step));
    }
    return recipe;
}

std::size_t Recipe::size() const {
    std::size_t num_steps = steps_.size();
    for (const Step& step : steps_) {
        std::size_t num_bytes = 0;
        for (const auto& word : step.words) num_bytes += word.size();
        std::size_t num_moves = 0;
        for (const auto& each : step.moves) num_moves += each.size();
        num_steps += num_bytes / 64 + step.words.size() / 4 + num_moves / 2;
        if (step.shortest) num_steps += step.shortest->size() / 256;
    }
    return num_steps;
}

Term* Recipe::follow(Store& store) const {
    std::vector<Term*> made;
    made.reserve(steps_.size());
    std::vector<Term*> items;
    for (const Step& step : steps_) {
        items.clear();
        for (auto index : step.items) items.push_back(made[index]);
        Term* term = make(store, step, items);
        if (step.is_character) store.mark_character(term);
        if (term->known_empty < 0) term->known_empty = step.known_empty;
        if (term->shortest_length == kUnknown) term->shortest_length = step.shortest_length;
        if (!term->structure.is_known()) term->structure = step.structure;
        if (!term->shortest && step.shortest) {
            term->shortest = std::make_unique<std::string>(*step.shortest);
        }
        made.push_back(term);
    }
    return made.back();
}

Term* Recipe::make(Store& store, const Step& step, const std::vector<Term*>& items) {
    switch (step.kind) {
        case Kind::kEmpty:
            return store.empty();
        case Kind::kBytes:
            return store.byte_set(step.bits);
        case Kind::kWords:
            return step.words.size() == 1 ? store.literal(step.words[0]) : store.words(step.words);
        case Kind::kSequence:
            return store.sequence(items[0], items[1]);
        case Kind::kAlternation:
            return store.alternation(items);
        case Kind::kRepeat:
            return store.repeat(items[0], step.low, step.high);
        case Kind::kBoth:
            return store.both(items);
        case Kind::kNot:
            return items.empty() ? store.anything() : store.complement(items[0]);
        case Kind::kLexeme:
            return store.lexeme(items[0]);
        case Kind::kTable:
            return store.table(step.accepting, step.moves);
        default:
            return store.epsilon();
    }
}

}  // namespace palmette
