// A compiled grammar, and where texts stand in it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "mask.hpp"
#include "planner.hpp"

namespace palmette {

// What all matchers of one grammar share. Used by one operation at a time.
class Grammar {
  public:
    Grammar(std::shared_ptr<const Vocabulary> vocabulary, std::shared_ptr<SharedMasks> shared,
            Store& store, Term* start);
    ~Grammar();
    Grammar(const Grammar&) = delete;
    Grammar& operator=(const Grammar&) = delete;

    const Vocabulary& vocabulary() const { return *vocabulary_; }

    Store& store() { return store_; }

    Automaton& automaton() { return automaton_; }

    MaskBuilder& masks() { return masks_; }

    Planner& planner() { return planner_; }

    Term* start() const { return start_; }

    std::size_t num_bytes() const { return store_.num_bytes() + masks_.num_bytes(); }

    // Begin one operation: on the clock, and with room for it.
    void begin();

    // Tokens of a short complete text, stop token left out: a budget of as many suffices.
    double shortest_length();

  private:
    std::shared_ptr<const Vocabulary> vocabulary_;
    Store& store_;
    Term* start_;
    Automaton automaton_;
    MaskBuilder masks_;
    Planner planner_;
    double shortest_length_ = -1;  // below 0: unknown
};

// Follows one text, token by token.
class Matcher {
  public:
    explicit Matcher(Grammar& grammar);
    Matcher(const Matcher& other);
    Matcher& operator=(const Matcher&) = delete;
    ~Matcher();

    std::size_t num_tokens() const { return positions_.size() - 1; }

    // The number of the term at which the text stands, or stood `back` tokens ago.
    std::uint32_t state(std::size_t back) const {
        return positions_[positions_.size() - 1 - back].term->serial;
    }

    bool is_complete() const { return here().term->nullable && !here().has_stopped; }

    bool has_stopped() const { return here().has_stopped; }

    // The rest belongs into an operation of the grammar.

    bool is_finished();
    // Take the token if it is allowed; false, and nothing changes, if it is not.
    bool accept(Token token);
    void rollback(std::size_t num_tokens);
    // Set `row[t]`, bytes of 0 or 1, or bit t, to whether token t may come next.
    void fill_bools(std::uint8_t* row, std::size_t num_rows, const Count* budget);
    void fill_bits(std::uint32_t* words, std::size_t num_words, const Count* budget);
    std::vector<Token> forced_tokens(std::size_t limit);
    std::string forced_bytes(std::size_t limit);
    // What may come next that joins the end of `tail` in one token; sorted, `limit` at most.
    std::vector<std::string> extensions(std::string_view tail, std::size_t limit);
    // Whether at most `budget` more tokens complete the text.
    bool can_complete(double budget);

  private:
    // Tokens that complete the text: from `first` on.
    struct Plan {
        std::shared_ptr<const std::vector<Token>> tokens;
        std::size_t first = 0;

        std::size_t size() const { return tokens->size() - first; }

        Token front() const { return (*tokens)[first]; }
    };

    struct Position {
        Term* term;
        Plan plan;
        bool has_stopped = false;
    };

    const Position& here() const { return positions_.back(); }

    template <class Row>
    void fill(Row row, const Count* budget);
    // Null where the mask is that of the state; else the tokens that are within the budget.
    const std::vector<Token>* within(Mask& mask, Count budget);

    Grammar& grammar_;
    std::vector<Position> positions_;
    std::vector<Token> scratch_;
};

}  // namespace palmette
