// What may come next in an object or an array, and how cheaply it can be completed.
//
// The twin of `palmette.grammar.moves`; `palmette.grammar.structures` says what the shapes mean.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "count.hpp"
#include "term.hpp"

namespace palmette {

class Store;

// How many parts of a kind there must be at least, and may be at most.
struct Counter {
    Count low = 0;
    Count high = kUnbounded;

    bool operator==(const Counter& other) const { return low == other.low && high == other.high; }
};

using Left = std::vector<Counter>;          // of the counters that matter: what is left of them
using Came = std::vector<std::uint64_t>;    // bits of declared members; without zeros at its end
using CounterIndices = std::vector<std::uint32_t>;

struct Part {
    Term* value;
    CounterIndices counters;
};

struct Member {
    std::string key;
    std::vector<Part> parts;
    bool is_required;
};

struct Names {
    Term* name;
    std::vector<Part> parts;
};

struct Punctuation {
    Term* blank;
    Term* comma;
    Term* colon;
    Term* open;
    Term* close;
};

struct Members {
    Punctuation marks;
    std::vector<Member> members;
    std::vector<Names> names;
    std::vector<Counter> counters;
    Count min_members = 0;
    Count max_members = kUnbounded;
    bool is_any_order = false;
    bool has_distinct_names = false;
};

struct Items {
    Punctuation marks;
    std::vector<std::vector<Part>> prefix;
    std::vector<Part> rest;
    std::vector<Counter> counters;
    Count min_items = 0;
    Count max_items = kUnbounded;
    bool is_unique = false;
};

// Texts that must not come again.
struct Seen {
    std::set<std::string> texts;
    std::size_t hash = 0;
};

// A place between two parts of an object or array.
struct Where {
    std::uint32_t place = 0;  // places before it are decided; 0 throughout in any order
    Came came;                // in any order: the declared members that came
    Left left;
    bool is_first = false;
    std::shared_ptr<const Seen> seen;  // null: none
    // Of texts that came besides, but are not remembered, the number: only while masks are made.
    // -1: all are remembered.
    int forgotten = -1;

    bool operator==(const Where& other) const {
        return place == other.place && is_first == other.is_first &&
               forgotten == other.forgotten && came == other.came && left == other.left &&
               has_same_texts(other);
    }

    bool has_seen(const std::string& text) const { return seen && seen->texts.count(text); }

    Where with_text(const std::string& text) const;

    // Beyond those of an ordinary one.
    std::size_t num_bytes() const {
        return 8 * came.size() + 16 * left.size() + (seen ? 100 * seen->texts.size() : 0);
    }

    Where with_forgotten(int number) const {
        Where where = *this;
        where.forgotten = number;
        return where;
    }

    bool has_same_texts(const Where& other) const {
        if (seen == other.seen) return true;
        return seen && other.seen && seen->hash == other.seen->hash &&
               seen->texts == other.seen->texts;
    }
};

// Parts for one place that move the same counters; the first value is the cheapest.
struct Choice {
    std::vector<Term*> values;
    CounterIndices counters;
    Count num_bytes;  // of the cheapest, with its name and a comma
};

// The next part of a cheapest completion, `times` times over.
struct Step {
    std::int64_t place;  // of a declared member or of the prefix; else -1 - index of the filler
    const Choice* choice;
    Count times;
    Where after;
};

// The moves of one object or array. `places` are the declared members or the places of the prefix,
// `fillers` what may come without end: undeclared members, or the rest of an array.
class Moves {
  public:
    using Cost = std::optional<Count>;

    Moves(Store& store, const Punctuation& marks, Counter total, const std::vector<Counter>& more);
    virtual ~Moves() = default;
    Moves(const Moves&) = delete;
    Moves& operator=(const Moves&) = delete;

    const Punctuation& marks() const { return marks_; }

    Where start() const;
    // Whether nothing more has to come.
    bool may_close(const Where& where) const;
    // Whether the fillers, or all items, must not come twice.
    bool is_distinct() const { return is_distinct_; }

    // The length of a shortest completion, if there is one; a lower bound where parts must not come
    // twice.
    Cost min_bytes(const Where& where);
    // The first part of a cheapest completion; none to close.
    std::optional<Step> step(const Where& where);
    // The choices for a place (numbered as in `Step`) after which all can be completed.
    std::vector<std::pair<const Choice*, Where>> offers(const Where& where, std::int64_t place);

    // The one copy of a place, which lives until a sweep in which no term has it.
    const Where* keep(const Where& where);

    // For sweeps: every term that it holds, and what it may forget.
    template <class Function>
    void for_each_term(Function function) const {
        for (Term* term : {marks_.blank, marks_.comma, marks_.colon, marks_.open, marks_.close}) {
            function(term);
        }
        for (Term* term : names_) function(term);
        for (const auto* list : {&places_, &fillers_}) {
            for (const auto& choices : *list) {
                for (const Choice& choice : choices) {
                    for (Term* value : choice.values) function(value);
                }
            }
        }
    }

    template <class Marked>
    void forget(Marked is_in_use) {
        known_.clear();
        for (auto at = wheres_.begin(); at != wheres_.end();) {
            at = is_in_use(at->get()) ? std::next(at) : wheres_.erase(at);
        }
        index_wheres();
    }

    bool is_marked = false;  // by a sweep

  protected:
    struct State {
        std::uint32_t place = 0;
        std::uint32_t given_up = 0;  // groups of fillers, past all places
        Came came;
        Left left;

        bool operator==(const State& other) const {
            return place == other.place && given_up == other.given_up && came == other.came &&
                   left == other.left;
        }
    };

    struct StateHash {
        std::size_t operator()(const State& state) const;
    };

    struct Group {
        std::uint32_t filler;
        const Choice* choice;
    };

    using Way = std::pair<Count, State>;

    std::vector<Choice> choices(const std::vector<Part>& parts, Count overhead);
    // Call once the places and fillers are in.
    void finish();
    Cost cost(const State& state);
    Cost direct_filler_cost(std::uint32_t given_up, const Left& left, bool& is_plain) const;

    // Whether a certain part has to come, whatever the counters say.
    virtual bool must_go_on(const Where& where) const = 0;
    // The first place that has to be filled, or the number of places.
    virtual std::uint32_t next_due(const Where& where) const = 0;
    virtual bool may_fill(const Where& where) const = 0;
    // Where one is after the part at `place` (none: after a filler).
    virtual Where after(const Where& where, std::optional<std::uint32_t> place,
                        Left left) const = 0;
    virtual State state_of(const Where& where) const = 0;
    // The cost where it is plain to see.
    virtual Cost direct_cost(const State& state, bool& is_plain) = 0;
    virtual bool may_skip(std::uint32_t place, const Came& came) const = 0;
    virtual bool may_take(std::uint32_t place, const Came& came) const = 0;

    // Maxima that what is still to come cannot reach are as good as none.
    Left settled(std::uint32_t index, const Came& came, Left left) const;

    std::uint32_t num_places() const { return static_cast<std::uint32_t>(places_.size()); }

    Store& store_;
    Punctuation marks_;
    std::vector<Term*> names_;
    std::vector<std::vector<Choice>> places_;
    std::vector<std::vector<Choice>> fillers_;
    Count close_bytes_ = 0;
    Count comma_bytes_ = 0;
    Count first_bytes_ = 0;  // what the first part takes more than another
    bool is_total_only_ = false;
    bool is_distinct_ = false;
    std::vector<Group> groups_;  // of fillers, cheapest first

  private:
    struct Direct {
        const Group* group;
        Count times;
    };

    static constexpr std::size_t kMostKnown = std::size_t{1} << 17;

    // The cost past all places if only one counter lacks something, and no two groups that move it
    // are kept short by the same maximum: the cheapest groups, each as often as it may come.
    Cost greedy_cost(std::uint32_t given_up, const Left& left, bool& is_plain) const;
    std::optional<Direct> direct(std::uint32_t given_up, const Left& left) const;
    Step filler_step(const Where& where, const Left& left);
    std::vector<Way> ways(const State& state) const;
    State beyond(std::uint32_t place, const Came& came, Left left) const;
    std::optional<State> use(std::uint32_t group, const Left& left) const;
    // Without the group, and without the maxima that no other can reach any more.
    State give_up(std::uint32_t group, Left left) const;
    void index_wheres();

    std::vector<std::int32_t> place_of_;  // of each counter in `Where::left`, -1: does not matter
    Left counters_;
    std::unordered_map<State, Cost, StateHash> known_;
    std::vector<Came> movers_;         // by counter: the places that may move it
    std::vector<bool> is_movable_;     // by counter: whether a filler moves it
    std::vector<std::vector<bool>> moved_from_;  // by group: the counters it and later ones move
    std::vector<std::unique_ptr<Where>> wheres_;
    std::unordered_multimap<std::size_t, const Where*> index_;
};

class ObjectMoves : public Moves {
  public:
    ObjectMoves(Store& store, Members shape);

    const std::vector<std::string>& keys() const { return keys_; }

    // The member of a key, by their order.
    std::uint32_t place_of_key(std::size_t index) const { return sorted_places_[index]; }

    const std::string& key_of(std::uint32_t place) const { return key_of_[place]; }

    const std::vector<Term*>& names() const { return names_; }

    bool is_any_order() const { return is_any_order_; }

    Count comma_bytes() const { return comma_bytes_; }

    // The members with a key out of keys[low:high] that may come next.
    std::vector<std::uint32_t> candidates(const Where& where, Count low, Count high);

  protected:
    bool must_go_on(const Where& where) const override;
    std::uint32_t next_due(const Where& where) const override;
    bool may_fill(const Where& where) const override;
    Where after(const Where& where, std::optional<std::uint32_t> place, Left left) const override;
    State state_of(const Where& where) const override;
    Cost direct_cost(const State& state, bool& is_plain) override;
    bool may_skip(std::uint32_t place, const Came& came) const override;
    bool may_take(std::uint32_t place, const Came& came) const override;

  private:
    std::optional<std::uint32_t> next_required(const Where& where) const;
    std::uint32_t last_ahead(const Where& where) const;
    // Bytes and number of the required members from `place` on that have not come.
    std::pair<Count, Count> required_cost(std::uint32_t place, const Came& came) const;
    // Bytes of the `count` cheapest members that do not have to come.
    Cost optional_cost(std::uint32_t place, const Came& came, Count count);

    bool is_any_order_;
    std::vector<bool> is_required_;
    std::vector<std::uint32_t> required_;
    std::vector<std::string> key_of_;
    std::vector<std::uint32_t> sorted_places_;  // the members in the order of their keys
    std::vector<std::string> keys_;
    std::vector<Count> cheapest_;
    std::vector<Count> bytes_from_;  // of the required members from each on
    std::vector<std::uint32_t> optional_by_cost_;
};

class ArrayMoves : public Moves {
  public:
    ArrayMoves(Store& store, const Items& shape);

    // The place for `offers` that comes next, if there is one.
    std::optional<std::int64_t> place(const Where& where) const;

  protected:
    bool must_go_on(const Where&) const override { return false; }

    std::uint32_t next_due(const Where&) const override { return num_places(); }

    bool may_fill(const Where& where) const override { return where.place == num_places(); }

    Where after(const Where& where, std::optional<std::uint32_t> place, Left left) const override;
    State state_of(const Where& where) const override;
    Cost direct_cost(const State& state, bool& is_plain) override;

    bool may_skip(std::uint32_t, const Came&) const override { return false; }

    bool may_take(std::uint32_t, const Came&) const override { return true; }

  private:
    std::vector<Count> bytes_before_;  // of the cheapest items at the first places
};

}  // namespace palmette
