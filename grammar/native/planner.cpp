#include "planner.hpp"

#include <algorithm>
#include <limits>

namespace palmette {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

Planner::Planner(const Vocabulary& vocabulary, Automaton& automaton)
    : vocabulary_(vocabulary),
      automaton_(automaton),
      store_(automaton.store()),
      lexemes_(store_) {}

void Planner::clear() {
    spelled_.clear();
    spelled_bytes_ = 0;
    needs_.clear();
}

double Planner::num_tokens(Term* term) {
    if (term->num_tokens >= 0) return term->num_tokens;
    // Each term after those whose completions tell its own; stacks may be deep.
    struct Waiting {
        Term* term;
        std::optional<std::vector<Term*>> needed;
    };
    std::vector<Waiting> pending;
    pending.push_back({term, std::nullopt});
    while (!pending.empty()) {
        Term* here = pending.back().term;
        if (here->num_tokens >= 0) {
            pending.pop_back();
            continue;
        }
        if (pending.back().needed) {
            here->num_tokens = total(here, *pending.back().needed);
            pending.pop_back();
            continue;
        }
        store_.spend();
        if (pending.size() > kDeepest) throw nested_too_deeply();
        auto needed = needed_by(here);
        const std::size_t at = pending.size() - 1;
        for (Term* each : needed) {
            if (each->num_tokens < 0) pending.push_back({each, std::nullopt});
        }
        pending[at].needed = std::move(needed);
    }
    return term->num_tokens;
}

// The terms whose completions tell that of a term.
std::vector<Term*> Planner::needed_by(Term* term) {
    if (term->nullable || term->is_regular) return {};
    if (term->kind == Kind::kCall) return {store_.shortest_of(*term->rule)};
    if (is_unfolded(term->kind) || term->kind == Kind::kCapture) return store_.shortest_steps(term);
    std::vector<Term*> needed;
    for (std::uint32_t i = 0; i < term->num_items; ++i) {
        Term* item = term->item(i);
        if (term->kind != Kind::kAlternation || !store_.is_empty(item)) needed.push_back(item);
    }
    return needed;
}

double Planner::total(Term* term, const std::vector<Term*>& needed) {
    if (term->nullable) return 0;
    if (term->is_regular) {
        const Count num_bytes = store_.min_bytes(term);
        if (num_bytes > kLongestText) return static_cast<double>(num_bytes);
        const auto& tokens = spell(store_.shortest(term));
        return tokens ? static_cast<double>(tokens->size()) : kInfinity;
    }
    if (term->kind == Kind::kCall) return needed[0]->num_tokens;
    if (term->kind == Kind::kSequence) return needed[0]->num_tokens + needed[1]->num_tokens;
    if (term->kind == Kind::kRepeat) {
        return static_cast<double>(term->low) * needed[0]->num_tokens;
    }
    if (is_unfolded(term->kind) || term->kind == Kind::kCapture) {
        double most = needed.empty() ? kInfinity : 0;
        for (const Term* each : needed) most = std::max(most, each->num_tokens);
        return most;
    }
    double least = kInfinity;
    for (const Term* each : needed) least = std::min(least, each->num_tokens);
    return least;
}

const std::optional<std::vector<Token>>& Planner::spell(const std::string& text) {
    const auto known = spelled_.find(text);
    if (known != spelled_.end()) return known->second;
    store_.spend(1 + text.size() / 16);
    auto tokens = vocabulary_.fewest_tokens(text);
    spelled_bytes_ += 2 * text.size() + 64;
    if (spelled_bytes_ > kSpelledBytes) {
        spelled_.clear();
        spelled_bytes_ = 2 * text.size() + 64;
    }
    return spelled_.emplace(text, std::move(tokens)).first->second;
}

std::optional<std::vector<Token>> Planner::plan(Term* term) {
    const auto texts = texts_of(term);
    if (!texts) return std::nullopt;
    std::size_t num_bytes = 0;
    for (const auto& text : *texts) num_bytes += text.size();
    if (num_bytes <= kJoinedText) {
        std::string whole;
        for (const auto& text : *texts) whole += text;
        return vocabulary_.fewest_tokens(whole);
    }
    std::vector<Token> plan;
    for (const auto& text : *texts) {
        const auto& tokens = spell(text);
        if (!tokens) return std::nullopt;
        plan.insert(plan.end(), tokens->begin(), tokens->end());
    }
    return plan;
}

// The elements of a short complete text; none if one is too long to write out.
std::optional<std::vector<std::string>> Planner::texts_of(Term* term) {
    std::vector<std::string> texts;
    std::vector<Term*> pending{term};
    while (!pending.empty()) {
        if (texts.size() > kLongestPlan) return std::nullopt;
        store_.spend();
        term = pending.back();
        pending.pop_back();
        if (term->nullable) continue;
        if (term->is_regular) {
            if (store_.min_bytes(term) > kLongestText) return std::nullopt;
            texts.push_back(store_.shortest(term));
        } else if (term->kind == Kind::kSequence) {
            pending.push_back(term->item(1));
            pending.push_back(term->item(0));
        } else if (term->kind == Kind::kRepeat) {
            if (term->low > static_cast<Count>(kLongestPlan)) return std::nullopt;
            pending.insert(pending.end(), static_cast<std::size_t>(term->low), term->item());
        } else if (term->kind == Kind::kCall) {
            pending.push_back(store_.shortest_of(*term->rule));
        } else if (is_unfolded(term->kind) || term->kind == Kind::kCapture) {
            Term* longest = nullptr;
            for (Term* step : store_.shortest_steps(term)) {
                if (!longest || num_tokens(step) > num_tokens(longest)) longest = step;
            }
            if (!longest) return std::nullopt;
            pending.push_back(longest);
        } else {
            Term* best = nullptr;
            for (std::uint32_t i = 0; i < term->num_items; ++i) {
                Term* item = term->item(i);
                if (store_.is_empty(item)) continue;
                if (!best || num_tokens(item) < num_tokens(best)) best = item;
            }
            if (!best) return std::nullopt;
            pending.push_back(best);
        }
    }
    return texts;
}

double Planner::worst_after(Mask& mask) {
    if (mask.worst >= 0) return mask.worst;
    double worst = 0;
    if (!vocabulary_.spells_every_text()) {
        worst = kInfinity;  // a number of bytes is no bound on the number of tokens
    } else {
        for (Term* term : mask.ends) worst = std::max(worst, num_tokens(term));
        for (const auto& [lexeme, after] : mask.bodies) {
            worst = std::max(worst, detour(lexeme) + num_tokens(after));
        }
    }
    mask.worst = worst;
    return worst;
}

// At most how many tokens complete a lexeme after any one token.
double Planner::detour(Term* lexeme) {
    if (lexeme->is_searched) lexeme = lexemes_.clamp(lexeme, vocabulary_.max_depth());
    const auto num_bytes = lexemes_.detour(lexeme);
    return num_bytes ? static_cast<double>(*num_bytes) : kInfinity;
}

const std::vector<float>& Planner::needs(Term* term) {
    for (auto at = needs_.begin(); at != needs_.end(); ++at) {
        if (at->first == term) return at->second;
    }
    needs_.emplace_back(term, compute_needs(term));
    if (needs_.size() > kNeedsKept) needs_.pop_front();
    return needs_.back().second;
}

std::vector<float> Planner::compute_needs(Term* term) {
    std::vector<float> needs(vocabulary_.num_rows(), std::numeric_limits<float>::infinity());
    std::vector<std::pair<NodeIndex, Term*>> reached;
    std::vector<NodeIndex> barriers;
    Term* start = store_.lenient(term);
    automaton_.enter(start);
    if (start->is_barrier) barriers.push_back(0);
    std::vector<std::pair<NodeIndex, Term*>> reached_below;
    const auto visit = [&](NodeIndex node, Term* after) {
        if (after->is_barrier) barriers.push_back(node);
        if (vocabulary_.node(node).has_token) reached.emplace_back(node, after);
    };
    const auto visit_below = [&](NodeIndex node, Term* after) {
        if (after->is_barrier) barriers.push_back(node);
        reached_below.emplace_back(node, after);
    };
    automaton_.walk(vocabulary_, 0, start, visit, visit_below);
    for (const auto& [node, after] : reached) {
        const auto need = static_cast<float>(num_tokens(after));
        vocabulary_.for_each_token_at(
            node, [&](Token token) { needs[static_cast<std::size_t>(token)] = need; });
    }
    for (const auto& [node, after] : reached_below) {
        const auto need = static_cast<float>(num_tokens(after));
        vocabulary_.for_each_token_below(
            node, [&](Token token) { needs[static_cast<std::size_t>(token)] = need; });
    }
    if (!barriers.empty()) {
        const auto doubtful = tokens_below(vocabulary_, barriers);
        for (Token token : doubtful) {
            needs[static_cast<std::size_t>(token)] = std::numeric_limits<float>::infinity();
        }
        for (const auto& [token, after] : try_tokens(automaton_, vocabulary_, term, doubtful)) {
            needs[static_cast<std::size_t>(token)] = static_cast<float>(num_tokens(after));
        }
    }
    return needs;
}

}  // namespace palmette
