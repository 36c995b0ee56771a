// Which tokens a state allows, computed once per state by walking the vocabulary's trie.
//
// The twin of `palmette.grammar.mask`: where a state begins with a lexeme, most of the vocabulary is
// decided inside it, whatever follows. That part is computed once per vocabulary (`SharedMasks`),
// with the nodes at which the lexeme can be left, and only from those the walk goes on.
#pragma once

#include <list>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "automaton.hpp"
#include "lexemes.hpp"
#include "token_set.hpp"

namespace palmette {

// What a lexeme decides by itself, over one vocabulary.
struct Body {
    TokenSet inside;               // tokens that end inside it or at its end
    std::vector<NodeIndex> exits;  // nodes at which it may be over; those with children come first
    std::size_t num_open_exits = 0;

    // Whether it was one.
    bool drop_exit(NodeIndex node);

    std::size_t num_bytes() const;
};

// The tokens a state allows, stop tokens left out, and where they lead.
struct Mask {
    TokenSet tokens;
    std::vector<Term*> ends;  // where tokens lead that leave a lexeme or meet none
    std::vector<std::pair<Term*, Term*>> bodies;  // (lexeme, what follows)
    std::vector<Token> doubtful;  // left out, to be tried with what was forgotten
    double worst = -1;                            // memo of the planner; below 0: unknown
    std::list<Term*>::iterator place;             // among the masks in the order of their use

    std::size_t num_bytes() const;
};

// The tokens that lead beyond the nodes of a walk that ended in a barrier (see `unfold.cpp`); sorted.
std::vector<Token> tokens_below(const Vocabulary& vocabulary, const std::vector<NodeIndex>& nodes);

// Those of the tokens that are allowed, with the terms that they lead to.
std::vector<std::pair<Token, Term*>> try_tokens(Automaton& automaton, const Vocabulary& vocabulary,
                                                Term* term, const std::vector<Token>& tokens);

// Bodies by structure, shared by every grammar over one vocabulary.
class SharedMasks {
  public:
    explicit SharedMasks(std::size_t max_bytes) : max_bytes_(max_bytes) {}

    std::size_t num_bodies() const { return bodies_.size(); }

    std::shared_ptr<const Body> get(const Structure& structure);
    void put(const Structure& structure, std::shared_ptr<const Body> body);

  private:
    struct Entry {
        std::shared_ptr<const Body> body;
        std::list<Structure>::iterator place;
    };

    std::size_t max_bytes_;
    std::size_t num_bytes_ = 0;
    std::unordered_map<Structure, Entry, Structure::Hash> bodies_;
    std::list<Structure> order_;  // oldest first
};

// Masks of one grammar's states, cached within a limit.
class MaskBuilder {
  public:
    MaskBuilder(const Vocabulary& vocabulary, Automaton& automaton,
                std::shared_ptr<SharedMasks> shared, std::size_t max_bytes);

    // The tokens after which the text can still be completed.
    Mask& mask_of(Term* term) {
        if (!term->mask) return build_and_keep(term);
        if (std::next(term->mask->place) != order_.end()) {
            order_.splice(order_.end(), order_, term->mask->place);
        }
        return *term->mask;
    }

    std::size_t num_bytes() const { return num_bytes_; }

    // Forget every mask; the terms have lost theirs in a sweep.
    void clear();

  private:
    static constexpr std::size_t kBodiesAtHand = 256;

    Mask& build_and_keep(Term* term);
    std::unique_ptr<Mask> build(Term* term);
    // The mask of a term made from that of its lenient form.
    std::unique_ptr<Mask> with_doubtful(Term* term, Term* lenient);
    std::shared_ptr<const Body> body_of(Term* head);
    std::shared_ptr<const Body> walk_body(Term* head);
    std::shared_ptr<const Body> narrow_body(Term* head, Term* base, Term* excluded);
    std::shared_ptr<const Body> counted_body(Term* head, Term* base, Count most);
    std::shared_ptr<const Body> body_without(Term* head, Term* base, Term* words);
    void order_exits(Body& body) const;
    // Call `visit(child, after, byte)` for each child of a node that a byte of the term leads to.
    template <class Visit>
    void for_each_child(NodeIndex node, Term* term, Visit visit);

    const Vocabulary& vocabulary_;
    Automaton& automaton_;
    Store& store_;
    Lexemes lexemes_;
    std::shared_ptr<SharedMasks> shared_;
    std::size_t max_bytes_;
    std::size_t num_bytes_ = 0;
    std::list<Term*> order_;  // terms that have a mask, the one used longest ago first
    std::unordered_map<Term*, std::shared_ptr<const Body>> at_hand_;
};

}  // namespace palmette
