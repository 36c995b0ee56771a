// A regular term as plain data, from which another store can make it again.
//
// The twin of `palmette.grammar.recipes`. What many grammars have in common is worked out once; what
// is known of its terms, whether they are empty, how long their shortest strings are and what their
// structure is, comes along.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "store.hpp"

namespace palmette {

class Recipe {
  public:
    // The recipe of a term of a store that was never swept; none if it is not regular, or a place
    // in the middle of an automaton.
    static std::unique_ptr<Recipe> of(const Store& store, Term* term);

    // How much memory it takes, in steps of the ordinary size.
    std::size_t size() const;

    // The term in a store with the same alphabet.
    Term* follow(Store& store) const;

  private:
    struct Step {
        Kind kind;
        bool is_character;
        std::int8_t known_empty;
        Structure structure;
        Count shortest_length;
        std::optional<std::string> shortest;
        ByteSet bits;
        Count low;
        Count high;
        std::vector<std::uint32_t> items;  // indices of steps before
        std::vector<std::string> words;
        std::vector<bool> accepting;
        std::vector<std::vector<Table::Move>> moves;
    };

    static Term* make(Store& store, const Step& step, const std::vector<Term*>& items);

    std::vector<Step> steps_;
};

}  // namespace palmette
