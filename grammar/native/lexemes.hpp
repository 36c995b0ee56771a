// What makes lexemes alike, so that masks can be shared, and how far it is out of one.
//
// The twin of `palmette.grammar.lexemes`.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "store.hpp"

namespace palmette {

class Lexemes {
  public:
    explicit Lexemes(Store& store) : store_(store) {}

    // A lexeme with the same strings' prefixes of up to `num_bytes` bytes, counters cut short.
    Term* clamp(Term* term, Count num_bytes);
    // The lexeme as it would be if a finite number of words were not excluded from it, and what is
    // excluded, if there is such an exclusion.
    std::optional<std::pair<Term*, Term*>> without_exclusion(Term* lexeme);
    // The lexeme with its counter of characters opened, and how many it allows at most, if it has
    // one that only a closing byte follows.
    std::optional<std::pair<Term*, Count>> without_counter(Term* lexeme);
    // The lexeme without its exclusion of words, and these, if it has one.
    std::optional<std::pair<Term*, Term*>> without_words(Term* lexeme);
    // Of a regular term.
    const Structure& structure(Term* term);
    // Learn the structure of a term whose items have theirs.
    static void learn_structure(Term* term);
    // At most how many bytes complete a regular term from anywhere inside it.
    std::optional<Count> detour(Term* term);

  private:
    Term* clamp_whole(Term* term, Count num_bytes);
    Term* clamp_element(Term* term, Count num_bytes);
    Term* clamp_both(Term* term, Count num_bytes);
    Term* without_end(Term* term, Count far);
    static Structure structure_of(WordList& list);
    static Structure structure_of(Table& table);
    static Structure describe(Term* term);
    std::optional<Count> searched_detour(Term* term);
    std::optional<Count> counted_detour(Term* others, const std::vector<Term*>& counters);
    std::optional<Count> explored_detour(Term* term);
    void learn_detour(Term* term);

    Store& store_;
};

}  // namespace palmette
