// One interned node of the algebra of languages, with the memos that the machine keeps about it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "byte_classes.hpp"
#include "byte_set.hpp"
#include "count.hpp"
#include "structure.hpp"

namespace palmette {

class Moves;
struct Mask;
struct Term;
struct Where;

// The same numbers as `palmette.grammar.terms.Kind`, which says what each of them means.
enum class Kind : std::uint8_t {
    kEmpty = 0,
    kEpsilon = 1,
    kBytes = 2,
    kWords = 3,
    kSequence = 4,
    kAlternation = 5,
    kRepeat = 6,
    kBoth = 7,
    kNot = 8,
    kLexeme = 9,
    kCall = 10,
    kTable = 11,
    kObject = 12,
    kArray = 13,
    kMember = 14,
    kCapture = 15,
};

// A sorted list of distinct words.
struct WordList {
    explicit WordList(std::vector<std::string> sorted) : words(std::move(sorted)) {}

    std::vector<std::string> words;
    Structure structure;      // memo of `Lexemes`
    bool is_marked = false;       // by a sweep
};

// A deterministic automaton each of whose states can be completed, in `distances` bytes at least.
struct Table {
    struct Move {
        ByteSet bits;
        std::uint32_t after;

        bool operator==(const Move& other) const {
            return bits == other.bits && after == other.after;
        }
    };

    std::vector<bool> accepting;
    std::vector<std::vector<Move>> moves;
    std::vector<Count> distances;
    Structure structure;      // memo of `Lexemes`
    bool is_marked = false;       // by a sweep
};

// A part of a grammar that is built when it is first needed, by whoever made it.
struct Rule {
    Rule(std::string name, bool nullable, Count min_bytes)
        : name(std::move(name)), nullable(nullable), min_bytes(min_bytes) {}
    virtual ~Rule() = default;

    virtual Term* build() = 0;
    virtual Term* make_shortest() = 0;

    std::string name;
    bool nullable;
    Count min_bytes;
    Term* body = nullptr;
    Term* shortest = nullptr;
    bool is_marked = false;
};

// A set of bytes, and what may follow one of them.
struct Pair {
    ByteSet bits;
    Term* after;

    bool operator==(const Pair& other) const { return bits == other.bits && after == other.after; }
};

using Pairs = std::vector<Pair>;

// Pairs that a store keeps until its next sweep.
struct KeptPairs {
    const Pair* first = nullptr;
    std::uint32_t count = 0;

    const Pair* begin() const { return first; }

    const Pair* end() const { return first + count; }

    std::size_t size() const { return count; }

    bool empty() const { return !count; }

    const Pair& operator[](std::size_t index) const { return first[index]; }
};

// For each byte the index of the pair that it leads to, or `kNoPair`.
struct DenseRow {
    static constexpr std::uint8_t kNoPair = 255;
    std::uint8_t pair[256];
};

// Laid out by cache lines, for the terms of a grammar that was not used for a while are far away.
struct alignas(64) Term {
    // What tells it from others, and how it combines with them.
    Kind kind = Kind::kEmpty;
    bool nullable = false;
    bool is_searched = false;  // whether it is empty cannot be read off its shape
    bool is_regular = true;    // holds no call, object or array
    bool is_finite = true;     // obviously has a limited number of strings
    // Of parts that must not come twice, see `unfold.cpp`.
    bool is_capturing = false;  // takes note of the next bytes
    bool is_exact = false;      // knows all the texts that came
    bool is_barrier = false;    // may go on with a part of which it is not known whether it came
    std::uint32_t serial = 0;
    std::uint32_t num_items = 0;
    Term* few_items[2] = {nullptr, nullptr};
    std::unique_ptr<Term*[]> many_items;
    std::uint64_t hash = 0;
    Count floor = 0;                // no string is shorter; cheaply had
    std::int8_t known_empty = -1;   // 1, 0, or -1: unknown
    bool is_character = false;
    bool is_marked = false;         // by a sweep
    // Memos here and below; those that hold terms are dropped by a sweep.
    bool is_state = false;    // counted as a state of the automaton
    bool has_form = false;
    bool has_parts = false;
    bool is_waiting = false;  // for what its form is made of
    bool has_row = false;     // its parts are states too

    // Where it leads.
    KeptPairs form;
    KeptPairs parts;
    const DenseRow* dense = nullptr;
    ByteClasses loops = 0;          // with a row: those whose bytes all lead back to it
    Term* passed_after = nullptr;   // where the byte led that was last stepped by without a row
    std::uint32_t stamp = 0;        // of the last walk that ended here
    std::uint8_t passed_byte = 0;
    std::uint8_t num_passed = 0;    // bytes that were stepped by without a row
    bool has_detour = false;

    // What terms without items are made of.
    Count low = 0;            // repetitions, the first word or key, the place of a capture
    Count high = kUnbounded;  // repetitions, or past the last word or key
    std::uint32_t depth = 0;  // bytes of words or keys that are behind, or the state of the table
    std::uint32_t pins = 0;   // from outside the store: it survives sweeps
    WordList* words = nullptr;
    Rule* rule = nullptr;
    Table* table = nullptr;
    Moves* moves = nullptr;        // of an object or array
    const Where* where = nullptr;  // the place in it

    ByteSet bits;
    std::unique_ptr<std::string> text;  // of a capture: what is read of it
    Term* clamped = nullptr;
    std::unique_ptr<Mask> mask;
    void* handle = nullptr;  // the Python object that stands for it, while there is one

    double num_tokens = -1;  // below 0: unknown
    std::unique_ptr<std::string> shortest;
    Count shortest_length = kUnknown;
    Count detour = kUnknown;
    Structure structure;

    Term();
    ~Term();
    Term(const Term&) = delete;
    Term& operator=(const Term&) = delete;

    Term* const* items() const { return many_items ? many_items.get() : few_items; }

    Term* item(std::uint32_t index = 0) const { return items()[index]; }

    void set_items(Term* const* from, std::uint32_t count) {
        num_items = count;
        Term** to = few_items;
        if (count > 2) {
            many_items.reset(new Term*[count]);
            to = many_items.get();
        }
        for (std::uint32_t i = 0; i < count; ++i) to[i] = from[i];
    }

    // What is left of a word of the list.
    std::string_view suffix(Count index) const {
        return std::string_view(words->words[static_cast<std::size_t>(index)]).substr(depth);
    }
};

// Whether it is a place in an object or array, unfolded one part at a time.
inline bool is_unfolded(Kind kind) {
    return kind == Kind::kObject || kind == Kind::kArray || kind == Kind::kMember;
}

inline bool is_context_free(Kind kind) {
    return kind == Kind::kCall || kind == Kind::kCapture || is_unfolded(kind);
}

// The elements of a sequence, or the term itself.
inline std::vector<Term*> spine_of(Term* term) {
    std::vector<Term*> elements;
    while (term->kind == Kind::kSequence) {
        elements.push_back(term->item(0));
        term = term->item(1);
    }
    elements.push_back(term);
    return elements;
}

// The items of an alternation, or the term itself.
struct Alternatives {
    explicit Alternatives(Term* term)
        : self(term), is_one(term->kind != Kind::kAlternation) {}

    Term* self;
    bool is_one;

    Term* const* begin() const { return is_one ? &self : self->items(); }

    Term* const* end() const { return is_one ? &self + 1 : self->items() + self->num_items; }
};

}  // namespace palmette
