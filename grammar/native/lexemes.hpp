// What makes lexemes alike, so that masks can be shared, and how far it is out of one.
//
// The twin of `palmette.grammar.lexemes`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "store.hpp"

namespace palmette {

// Numbers of structures: equal exactly for regular terms of equal structure, of any store. What is
// forgotten to bound the memory gets a new number when it is met again, never one in use.
class Structures {
  public:
    std::uint64_t number_of(std::string description);

  private:
    static constexpr std::size_t kMaxBytes = std::size_t{16} << 20;
    static constexpr std::size_t kBytesPerEntry = 80;

    std::unordered_map<std::string, std::uint64_t> known_;
    std::size_t num_bytes_ = 0;
    std::uint64_t next_ = 1;
};

class Lexemes {
  public:
    explicit Lexemes(Store& store) : store_(store) {}

    // A lexeme with the same strings' prefixes of up to `num_bytes` bytes, counters cut short.
    Term* clamp(Term* term, Count num_bytes);
    // The lexeme as it would be if a finite number of words were not excluded from it, or null.
    Term* without_exclusion(Term* lexeme);
    // The lexeme with its counter of characters opened, and how many it allows at most, if it has
    // one that only a closing byte follows.
    std::optional<std::pair<Term*, Count>> without_counter(Term* lexeme);
    // The lexeme without its exclusion of words, and these, if it has one.
    std::optional<std::pair<Term*, Term*>> without_words(Term* lexeme);
    std::uint64_t structure(Term* term, Structures& structures);
    // At most how many bytes complete a regular term from anywhere inside it.
    std::optional<Count> detour(Term* term);

  private:
    Term* clamp_whole(Term* term, Count num_bytes);
    Term* clamp_element(Term* term, Count num_bytes);
    Term* clamp_both(Term* term, Count num_bytes);
    Term* without_end(Term* term, Count far);
    std::string describe(Term* term, Structures& structures);
    std::optional<Count> searched_detour(Term* term);
    std::optional<Count> counted_detour(Term* others, const std::vector<Term*>& counters);
    std::optional<Count> explored_detour(Term* term);
    void learn_detour(Term* term);

    Store& store_;
};

}  // namespace palmette
