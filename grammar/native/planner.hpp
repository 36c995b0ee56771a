// How many tokens complete a text, so that it can be kept within a budget.
//
// The twin of `palmette.grammar.budget`: every number is an upper bound that a list of tokens
// realises.
#pragma once

#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "automaton.hpp"
#include "lexemes.hpp"
#include "mask.hpp"

namespace palmette {

class Planner {
  public:
    Planner(const Vocabulary& vocabulary, Automaton& automaton);

    void clear();

    // Tokens that complete the text from here; infinite if the vocabulary has not the bytes.
    double num_tokens(Term* term);
    // At most so many tokens that complete it; none if they cannot be spelled or written down.
    std::optional<std::vector<Token>> plan(Term* term);
    // The most tokens that may be needed after any one token of the mask.
    double worst_after(Mask& mask);
    // For every token how many more complete the text after it; infinite if not allowed.
    const std::vector<float>& needs(Term* term);

  private:
    static constexpr std::size_t kJoinedText = 256;  // bytes that are split into tokens as a whole
    static constexpr Count kLongestText = 1 << 13;   // bytes of one element that is written out
    static constexpr std::size_t kLongestPlan = 1 << 16;  // elements
    static constexpr std::size_t kNeedsKept = 16;
    static constexpr std::size_t kDeepest = std::size_t{1} << 20;  // terms that wait for others
    static constexpr std::size_t kSpelledBytes = std::size_t{8} << 20;

    std::vector<Term*> needed_by(Term* term);
    double total(Term* term, const std::vector<Term*>& needed);
    const std::optional<std::vector<Token>>& spell(const std::string& text);
    std::optional<std::vector<std::string>> texts_of(Term* term);
    double detour(Term* lexeme);
    std::vector<float> compute_needs(Term* term);

    const Vocabulary& vocabulary_;
    Automaton& automaton_;
    Store& store_;
    Lexemes lexemes_;
    std::unordered_map<std::string, std::optional<std::vector<Token>>> spelled_;
    std::size_t spelled_bytes_ = 0;
    std::list<std::pair<Term*, std::vector<float>>> needs_;
};

}  // namespace palmette
