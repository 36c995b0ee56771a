#include "grammar.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

namespace palmette {

Grammar::Grammar(std::shared_ptr<const Vocabulary> vocabulary, std::shared_ptr<SharedMasks> shared,
                 Store& store, Term* start)
    : vocabulary_(std::move(vocabulary)),
      store_(store),
      start_(start),
      automaton_(store),
      masks_(*vocabulary_, automaton_, std::move(shared), store.limits().mask_cache_bytes),
      planner_(*vocabulary_, automaton_) {
    store_.pin(start_);
}

Grammar::~Grammar() { store_.unpin(start_); }

void Grammar::begin() {
    if (automaton_.trim()) {
        masks_.clear();
        planner_.clear();
    }
    store_.start_clock(store_.limits().mask_seconds);
}

double Grammar::shortest_length() {
    if (shortest_length_ < 0) {
        const auto plan = planner_.plan(start_);
        const double length =
            plan ? static_cast<double>(plan->size()) : planner_.num_tokens(start_);
        if (std::isinf(length)) {
            throw TooComplex("the vocabulary cannot spell the shortest text");
        }
        shortest_length_ = length;
    }
    return shortest_length_;
}

Matcher::Matcher(Grammar& grammar) : grammar_(grammar) {
    grammar_.store().pin(grammar.start());
    positions_.push_back({grammar.start(), {}, false});
}

Matcher::Matcher(const Matcher& other) : grammar_(other.grammar_), positions_(other.positions_) {
    for (const Position& each : positions_) grammar_.store().pin(each.term);
}

Matcher::~Matcher() {
    for (const Position& each : positions_) grammar_.store().unpin(each.term);
}

bool Matcher::is_finished() {
    if (here().has_stopped) return true;
    return here().term->nullable && grammar_.automaton().moves(here().term).empty();
}

bool Matcher::accept(Token token) {
    const Position& here = positions_.back();
    if (here.has_stopped) return false;
    if (grammar_.vocabulary().is_stop_token(token)) {
        if (!here.term->nullable) return false;
        grammar_.store().pin(here.term);
        positions_.push_back({here.term, {}, true});
        return true;
    }
    const std::string_view text = grammar_.vocabulary().bytes_of(token);
    if (text.empty()) return false;
    grammar_.automaton().enter(here.term);
    Term* after = grammar_.automaton().pass(here.term, text);
    if (!after) return false;
    Plan plan;
    if (here.plan.tokens && here.plan.size() && here.plan.front() == token) {
        plan = {here.plan.tokens, here.plan.first + 1};
    }
    grammar_.store().pin(after);
    positions_.push_back({after, std::move(plan), false});
    return true;
}

void Matcher::rollback(std::size_t num_tokens) {
    for (; num_tokens; --num_tokens) {
        grammar_.store().unpin(positions_.back().term);
        positions_.pop_back();
    }
}

// `row` can be cleared, made equal to a set, and allow one token more.
template <class Row>
void Matcher::fill(Row row, const Count* budget) {
    if (here().has_stopped) {
        row.clear();
        return;
    }
    Mask& mask = grammar_.masks().mask_of(here().term);
    if (const auto* tokens = budget ? within(mask, *budget) : nullptr) {
        row.clear();
        for (Token token : *tokens) row.allow(token);
    } else {
        row.write(mask.tokens);
    }
    if (here().term->nullable) {
        for (Token token : grammar_.vocabulary().stop_tokens()) row.allow(token);
    } else if (!mask.tokens.count()) {
        throw NoWayOn("no token of the vocabulary continues the text");
    }
}

void Matcher::fill_bools(std::uint8_t* row, std::size_t num_rows, const Count* budget) {
    struct Bools {
        std::uint8_t* row;
        std::size_t num_rows;

        void clear() { std::memset(row, 0, num_rows); }

        void write(const TokenSet& tokens) { tokens.write_bools(row, num_rows); }

        void allow(Token token) { row[token] = 1; }
    };
    fill(Bools{row, num_rows}, budget);
}

void Matcher::fill_bits(std::uint32_t* words, std::size_t num_words, const Count* budget) {
    struct Bits {
        std::uint32_t* words;
        std::size_t num_words;

        void clear() { std::memset(words, 0, num_words * sizeof(std::uint32_t)); }

        void write(const TokenSet& tokens) { tokens.write_bits(words, num_words); }

        void allow(Token token) { words[token >> 5] |= std::uint32_t{1} << (token & 31); }
    };
    fill(Bits{words, num_words}, budget);
}

const std::vector<Token>* Matcher::within(Mask& mask, Count budget) {
    Planner& planner = grammar_.planner();
    if (static_cast<double>(budget - 1) >= planner.worst_after(mask)) return nullptr;
    Term* term = here().term;
    scratch_.clear();
    const auto& needs = planner.needs(term);
    const auto most = static_cast<float>(budget - 1);
    for (std::size_t token = 0; token < needs.size(); ++token) {
        if (needs[token] <= most) scratch_.push_back(static_cast<Token>(token));
    }
    Plan& plan = positions_.back().plan;
    if (!plan.tokens || static_cast<double>(plan.size()) > planner.num_tokens(term)) {
        auto made = planner.plan(term);
        plan = {};
        if (made) plan.tokens = std::make_shared<const std::vector<Token>>(std::move(*made));
    }
    if (!plan.tokens) return scratch_.empty() ? nullptr : &scratch_;
    if (plan.size() && (static_cast<Count>(plan.size()) <= budget || scratch_.empty())) {
        scratch_.push_back(plan.front());
    }
    return &scratch_;
}

std::vector<Token> Matcher::forced_tokens(std::size_t limit) {
    std::vector<Token> forced;
    if (here().has_stopped) return forced;
    Term* term = here().term;
    while (term && !term->nullable && forced.size() < limit) {
        const Token only = grammar_.masks().mask_of(term).tokens.only();
        if (only < 0) break;
        forced.push_back(only);
        term = grammar_.automaton().step(term, grammar_.vocabulary().bytes_of(only));
    }
    return forced;
}

std::string Matcher::forced_bytes(std::size_t limit) {
    std::string forced;
    if (here().has_stopped) return forced;
    Term* term = here().term;
    while (!term->nullable && forced.size() < limit) {
        const KeptPairs moves = grammar_.automaton().moves(term);
        if (moves.size() != 1 || moves[0].bits.count() != 1) break;
        forced.push_back(static_cast<char>(moves[0].bits.lowest()));
        term = moves[0].after;
    }
    return forced;
}

std::vector<std::string> Matcher::extensions(std::string_view tail, std::size_t limit) {
    std::set<std::string> found;
    if (here().has_stopped) return {};
    const Vocabulary& vocabulary = grammar_.vocabulary();
    Term* term = here().term;
    grammar_.automaton().enter(term);
    const std::size_t longest = std::min(tail.size(), std::size_t{vocabulary.max_depth()});
    for (std::size_t length = 1; length <= longest; ++length) {
        const NodeIndex node = vocabulary.find(tail.substr(tail.size() - length));
        if (!node) continue;
        std::size_t num_found = 0;
        const auto find = [&](NodeIndex at) {
            if (!vocabulary.node(at).has_token || num_found >= limit) return;
            ++num_found;
            found.insert(vocabulary.path(at).substr(length));
        };
        grammar_.automaton().walk(
            vocabulary, node, term, [&](NodeIndex at, Term*) { find(at); },
            [&](NodeIndex above, Term*) {
                for (NodeIndex at = above + 1; at < vocabulary.node(above).end; ++at) find(at);
            });
    }
    std::vector<std::string> sorted(found.begin(), found.end());
    if (sorted.size() > limit) sorted.resize(limit);
    return sorted;
}

bool Matcher::can_complete(double budget) {
    Planner& planner = grammar_.planner();
    if (planner.num_tokens(here().term) <= budget) return true;
    const auto plan = planner.plan(here().term);
    return plan && static_cast<double>(plan->size()) <= budget;
}

}  // namespace palmette
