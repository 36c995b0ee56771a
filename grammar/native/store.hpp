// Makes terms, keeps equal ones equal, derives them, and answers questions about them.
//
// The twin of `palmette.grammar.term_store`: method by method the same algorithms, so that both
// machines give the same answers. Nothing here knows Python. A term lives until a sweep finds that
// nothing pinned leads to it; references to terms stay valid in between.
#pragma once

#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "arena.hpp"
#include "errors.hpp"
#include "moves.hpp"
#include "term.hpp"

namespace palmette {

struct Limits {
    Count max_states;
    Count max_terms;
    Count max_alternatives;
    double mask_seconds;
    std::size_t mask_cache_bytes;
};

class Store {
  public:
    // `pause` is called now and then in long work, so that others may run; it may throw.
    Store(Limits limits, ByteSet alphabet, std::function<void()> pause);
    ~Store();
    Store(const Store&) = delete;
    Store& operator=(const Store&) = delete;

    Term* empty() const { return empty_; }

    Term* epsilon() const { return epsilon_; }

    Term* anything() const { return anything_; }

    const Limits& limits() const { return limits_; }

    // Terms that are kept now.
    std::size_t size() const { return terms_.size() - free_.size(); }

    // Terms that were made since the last sweep.
    std::size_t num_new() const { return size() - num_survivors_; }

    // About how much memory was taken since the last sweep, in terms of the ordinary size: a term
    // may have many alternatives, moves or texts.
    std::size_t load() const { return num_new() + held_ / kBytesPerTerm; }

    // About how much memory it takes.
    std::size_t num_bytes() const;

    // Count memory that terms take beyond the ordinary.
    void hold(std::size_t num_bytes) { held_ += num_bytes; }

    // Drop what nothing pinned leads to, and everything that was derived.
    void sweep();

    // Time

    // Give what follows in this thread `seconds`; past them, TooComplex.
    void start_clock(double seconds);

    // What follows in this thread has no more than is left of the time of `other`.
    void share_clock(Store& other);

    // Raises TooComplex if the terms take more than the limits allow.
    void check_size() const;

    // Look at the clock, which begins to run if it has not, and at what the terms take.
    void look();

    // Count work, and look now and then.
    void spend(std::size_t work = 1) {
        work_ += work;
        if (work_ >= kWorkPerLook) look();
    }

    // Making terms

    Term* byte_set(const ByteSet& bits);
    Term* literal(std::string_view text);
    bool can_spell(std::string_view text) const;
    Term* words(std::vector<std::string> words);
    // What a deterministic automaton accepts from its state 0 on; `moves` have disjoint sets.
    Term* table(std::vector<bool> accepting, std::vector<std::vector<Table::Move>> moves);
    Term* sequence(Term* const* terms, std::size_t count);
    Term* sequence(Term* first, Term* second);
    Term* alternation(Term* const* terms, std::size_t count);
    Term* alternation(const std::vector<Term*>& terms);
    Term* repeat(Term* term, Count low, Count high);
    Term* both(Term* const* terms, std::size_t count);
    Term* both(const std::vector<Term*>& terms);
    Term* complement(Term* term);
    Term* lexeme(Term* term);
    Term* call(Rule* rule);
    // The objects of a shape; empty if there are none.
    Term* object(Members shape);
    // The arrays of a shape; empty if there are none.
    Term* array(const Items& shape);
    Rule* adopt(std::unique_ptr<Rule> rule);

    // Derivatives

    // Disjoint byte sets, and for each the non-empty term that follows.
    KeptPairs parts(Term* term);
    // Byte sets, which may overlap, and for each a term that may follow, perhaps empty.
    KeptPairs form(Term* term);
    Term* body_of(Rule& rule);
    Term* shortest_of(Rule& rule);
    // A place in an object or array, or a capture, as a cheapest next part with what follows it.
    // Where a text was forgotten there are several, and the longest of them is meant; none: it
    // cannot be told.
    std::vector<Term*> shortest_steps(Term* term);
    // The term with the texts forgotten that are being read; itself if there are none.
    Term* lenient(Term* term);
    // The term after one byte, empty if it is not allowed: quick where texts are taken note of.
    Term* step(Term* term, std::uint8_t byte);
    // The same, found without what follows other bytes if that is not known yet.
    Term* after(Term* term, std::uint8_t byte);

    // Questions

    bool is_empty(Term* term);
    Count min_bytes(Term* term);
    const std::string& shortest(Term* term);
    bool accepts(Term* term, std::string_view text);
    // An intersection without its counters of characters, or null if nothing is left; and these.
    std::pair<Term*, std::vector<Term*>> split_counters(Term* term);
    Term* mark_character(Term* term);

    // Bounded recursion: one of these lives on each level.
    class Descent {
      public:
        explicit Descent(Store& store) : store_(store) {
            if (++store_.depth_ > kMaxDepth) {
                --store_.depth_;
                throw nested_too_deeply();
            }
        }
        ~Descent() { --store_.depth_; }
        Descent(const Descent&) = delete;
        Descent& operator=(const Descent&) = delete;

      private:
        Store& store_;
    };

    void pin(Term* term) { ++term->pins; }

    void unpin(Term* term) { --term->pins; }

    std::uint32_t next_stamp() { return ++stamp_; }

    // Memory for what is known about terms until a sweep.
    Arena& memos() { return memos_; }

    const std::vector<std::unique_ptr<Rule>>& rules() const { return rules_; }

    // Called for each rule that a sweep forgets, before it is gone.
    std::function<void(Rule&)> forget_rule;
    // Called for each term that has a handle when the store is gone.
    std::function<void(Term&)> orphan;

  private:
    static constexpr std::size_t kWorkPerLook = 512;
    static constexpr std::size_t kShortWord = 256;
    static constexpr std::size_t kBytesPerTerm = 1024;
    // Of the Python objects of a grammar, and of those that a rule, an object or an array is made
    // of with what is worked out of them; measured.
    static constexpr std::size_t kBytesPerStore = 12 * 1024;
    static constexpr std::size_t kBytesPerStructure = 4 * 1024;
    // A term of ordinary size has no more items or moves.
    static constexpr std::size_t kFew = 8;
    // Texts of terms on the way to a long one are as many bytes together as its length squared.
    static constexpr std::size_t kLongestOnTheWay = 4096;
    static constexpr int kMaxDepth = 1500;
    static constexpr std::size_t kLongestText = std::size_t{1} << 24;

    enum class Fact { kLength, kText };

    // A place of the hash table; the hash is kept here so that other terms need not be looked at.
    struct Slot {
        std::uint64_t hash;
        Term* term;
    };

    // Alternatives, and what they come to once those that begin alike are one.
    struct Shared {
        std::vector<Term*> items;
        Term* result;
    };

    template <class Equal, class Fill>
    Term* intern(std::uint64_t hash, Equal equal, Fill fill);
    Term* make(Kind kind, std::uint64_t hash, bool nullable);
    void mark_texts(Term* term) const;
    void finish(Term* term);
    Count lower_bound(const Term* term) const;
    void insert(Term* term);
    void grow_table(std::size_t capacity);
    Term* of_items(Kind kind, bool nullable, Term* const* items, std::uint32_t count, Count low,
                   Count high);

    Term* words_of(std::vector<std::string> sorted);
    Term* words(WordList* words, Count low, Count high, std::uint32_t depth);
    Term* pair(Term* head, Term* tail);
    Term* row(Table* table, std::uint32_t state);
    // What the alternatives come to, with each once: the whole answer, or the alternatives.
    Term* gather(Term* const* terms, std::size_t count, std::vector<Term*>& items);
    Term* alternation_of(const std::vector<Term*>& items);
    Term* share_heads(std::vector<Term*> items);

    Term* start_of(Moves& moves, Term* open);
    Term* at(Moves* moves, const Where& where);
    Term* member(ObjectMoves& moves, const Where& where, Count low, Count high,
                 std::uint32_t depth);
    Term* keep_member(ObjectMoves& moves, const Where& where, Count low, Count high,
                      std::uint32_t depth);
    // The rest of a part that must not come twice, of which `text` is read.
    Term* capture(Moves& moves, const Where& where, std::int64_t place, Term* rest,
                  const std::string& text);
    Term* keep_capture(Moves& moves, const Where& where, std::int64_t place, Term* rest,
                       const std::string& text);
    Term* at_or_barrier(Moves& moves, const Where& where);
    Term* cheapest_after(Moves& moves, const Where& where, std::int64_t place);
    Term* unrepeated(Moves& moves, const Where& where, std::int64_t place, Term* rest);
    Term* after_text(Moves& moves, const Where& where, std::int64_t place);
    Pairs derive_capture(Term* term);
    std::vector<Term*> unrepeated_steps(Moves& moves, const Where& where, std::int64_t place,
                                        Term* rest, const std::string& text);
    // The regular term without the texts that a place has seen; each of its lexemes stays one.
    Term* less(Term* value, const Where& where);
    // The first strings of a regular term, short ones first, equally long ones by their bytes.
    std::vector<std::string> first_texts(Term* value, std::size_t count);
    Term* unfold(Term* term);
    Term* more_or_close(Moves& moves, const Where& where, const std::vector<Term*>& parts);
    std::vector<Term*> items_at(ArrayMoves& moves, const Where& where, std::int64_t place);
    std::vector<Term*> values_at(Moves& moves, const Where& where, std::int64_t place);
    Term* keys(ObjectMoves& moves, const Where& where, Count low, Count high, std::uint32_t depth);
    Term* after_key(Moves& moves, const Where& where, std::int64_t place);
    Term* shortest_step(Term* term);
    Term* step_over(Moves& moves, const Where& where, Term* part, const Step& step);
    struct BestMember {
        std::uint32_t place;
        const Choice* choice;
        Where after;
        Count num_bytes;
    };
    BestMember best_member(ObjectMoves& moves, const Term& term);

    void settle_form(Term* term);
    template <class Function>
    void for_each_beginning(Term* term, Function function);
    Pairs derive(Term* term);
    void collect_after(Term* term, std::uint8_t byte, std::vector<Term*>& found, int depth);
    Pairs derive_words(Term* term);
    Pairs derive_sequence(Term* term);
    Pairs derive_both(Term* term);
    KeptPairs determinise(KeptPairs form);
    KeptPairs keep(const Pairs& pairs);

    bool decide_empty(Term* term);
    bool search_empty(Term* term);
    // Whether it is empty even without its counters, and a shortest string, if one is known so.
    std::pair<bool, std::unique_ptr<std::string>> without_counters(Term* term);
    void settle_non_empty(Term* term, Fact fact);
    static bool is_known(const Term* term, Fact fact);
    void learn(Term* term, Fact fact);
    void search_shortest(Term* term);
    bool counts_characters(Term* term);
    const std::unordered_set<Term*>& parts_of_characters();

    Limits limits_;
    ByteSet alphabet_;
    std::function<void()> pause_;

    Arena slots_;               // of terms
    Arena memos_;               // emptied by a sweep
    std::vector<Term*> terms_;  // every slot that was ever in use
    std::vector<Term*> free_;
    std::vector<Slot> table_;
    std::size_t num_interned_ = 0;
    std::size_t num_survivors_ = 0;
    std::size_t held_ = 0;  // bytes, since the last sweep
    std::uint32_t next_serial_ = 1;
    std::uint32_t stamp_ = 0;
    std::vector<std::unique_ptr<WordList>> word_lists_;
    std::vector<std::unique_ptr<Table>> tables_;
    std::vector<std::unique_ptr<Moves>> moves_;
    std::vector<std::unique_ptr<Rule>> rules_;
    std::unordered_map<std::uint64_t, std::vector<Shared>> shared_;  // by hash of the items
    std::vector<Term*> characters_;
    std::unordered_set<Term*> character_parts_;
    bool has_character_parts_ = false;

    double seconds_ = std::numeric_limits<double>::infinity();
    double deadline_ = -1;  // below 0: the clock has not been looked at
    double last_pause_ = -1;
    std::chrono::steady_clock::time_point looked_at_;
    std::size_t work_ = 0;
    int depth_ = 0;

    Term* empty_;
    Term* epsilon_;
    Term* anything_;
};

template <class Equal, class Fill>
Term* Store::intern(std::uint64_t hash, Equal equal, Fill fill) {
    const std::size_t bits = table_.size() - 1;
    for (std::size_t at = hash & bits; table_[at].term; at = (at + 1) & bits) {
        if (table_[at].hash == hash && equal(table_[at].term)) return table_[at].term;
    }
    Term* term = fill();
    finish(term);
    insert(term);
    spend();
    return term;
}

}  // namespace palmette
