// Making terms and keeping equal ones equal.
#include "store.hpp"

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "hash.hpp"
#include "mask.hpp"

namespace palmette {

namespace {

constexpr double kSecondsBetweenPauses = 0.001;
constexpr std::chrono::microseconds kBetweenLooks{500};

double thread_seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::uint64_t hash_text(std::uint64_t hash, std::string_view text) {
    hash = mix(hash, text.size());
    std::size_t at = 0;
    for (; at + 8 <= text.size(); at += 8) {
        std::uint64_t word;
        std::memcpy(&word, text.data() + at, 8);
        hash = mix(hash, word);
    }
    std::uint64_t rest = 0;
    if (at < text.size()) std::memcpy(&rest, text.data() + at, text.size() - at);
    return mix(hash, rest);
}

Term* head_of(Term* term) { return term->kind == Kind::kSequence ? term->item(0) : term; }

// Whether few alternatives are seen at once to begin with different terms.
bool have_heads_of_their_own(const std::vector<Term*>& items) {
    constexpr std::size_t kFewItems = 8;
    if (items.size() > kFewItems) return false;
    for (std::size_t i = 1; i < items.size(); ++i) {
        for (std::size_t j = 0; j < i; ++j) {
            if (head_of(items[i]) == head_of(items[j])) return false;
        }
    }
    return true;
}

template <class Kept>
void keep_marked(std::vector<std::unique_ptr<Kept>>& list) {
    list.erase(std::remove_if(list.begin(), list.end(),
                              [](const auto& each) { return !each->is_marked; }),
               list.end());
    for (const auto& each : list) each->is_marked = false;
}

}  // namespace

Term::Term() = default;
Term::~Term() = default;

Store::Store(Limits limits, ByteSet alphabet, std::function<void()> pause)
    : limits_(limits), alphabet_(alphabet), pause_(std::move(pause)) {
    grow_table(1024);
    const auto constant = [this](Kind kind, bool nullable) {
        Term* term = make(kind, hash_of(kind), nullable);
        finish(term);
        ++term->pins;
        insert(term);
        return term;
    };
    empty_ = constant(Kind::kEmpty, false);
    epsilon_ = constant(Kind::kEpsilon, true);
    empty_->known_empty = 1;
    anything_ = of_items(Kind::kNot, true, &empty_, 1, 0, kUnbounded);
    ++anything_->pins;
    anything_->known_empty = 0;
    anything_->is_searched = false;
    num_survivors_ = size();
}

Store::~Store() {
    if (orphan) {
        for (Term* term : terms_) {
            if (term->handle) orphan(*term);
        }
    }
    for (Term* term : terms_) term->~Term();
}

// Time

void Store::start_clock(double seconds) {
    seconds_ = seconds;
    work_ = 0;
    deadline_ = -1;
}

void Store::share_clock(Store& other) {
    if (other.deadline_ < 0) other.look();
    seconds_ = other.seconds_;
    deadline_ = other.deadline_;
    last_pause_ = other.last_pause_;
    looked_at_ = other.looked_at_;
    work_ = 0;
}

void Store::check_size() const {
    if (static_cast<Count>(load()) > limits_.max_terms) {
        throw TooComplex("the grammar needs more than " + std::to_string(limits_.max_terms) +
                         " terms at once");
    }
}

void Store::look() {
    work_ = 0;
    check_size();
    // Processor time passes no faster than this, which costs far less to read.
    const auto wall = std::chrono::steady_clock::now();
    if (deadline_ >= 0 && wall - looked_at_ < kBetweenLooks) return;
    looked_at_ = wall;
    const double now = thread_seconds();
    if (deadline_ < 0) {
        deadline_ = now + seconds_;
        last_pause_ = now;
    } else if (now > deadline_) {
        char text[96];
        std::snprintf(text, sizeof text, "the grammar needs more than %g s of work", seconds_);
        throw TooComplex(text);
    }
    if (now - last_pause_ > kSecondsBetweenPauses || now < last_pause_) {
        last_pause_ = now;
        pause_();
    }
}

// Interning

Term* Store::make(Kind kind, std::uint64_t hash, bool nullable) {
    Term* term;
    if (free_.empty()) {
        term = new (slots_.allocate<Term>(1)) Term;
        terms_.push_back(term);
    } else {
        term = free_.back();
        free_.pop_back();
    }
    term->kind = kind;
    term->hash = hash;
    term->nullable = nullable;
    term->serial = next_serial_++;
    return term;
}

void Store::finish(Term* term) {
    const Kind kind = term->kind;
    term->is_searched = kind == Kind::kBoth || kind == Kind::kNot;
    term->is_regular = !is_context_free(kind);
    term->is_finite = kind != Kind::kNot && kind != Kind::kTable && !is_context_free(kind) &&
                      !(kind == Kind::kRepeat && term->high == kUnbounded);
    for (std::uint32_t i = 0; i < term->num_items; ++i) {
        const Term* item = term->item(i);
        term->is_searched |= item->is_searched && kind != Kind::kCapture;
        term->is_regular &= item->is_regular;
        term->is_finite &= item->is_finite;
    }
    term->floor = lower_bound(term);
    if (term->num_items > kFew) hold(8 * (term->num_items - kFew));
    if (term->where) hold(term->where->num_bytes());
    if (term->text) hold(term->text->size());
    if (!term->is_regular) mark_texts(term);
}

void Store::mark_texts(Term* term) const {
    const auto take = [term](const Term* from) {
        term->is_capturing |= from->is_capturing;
        term->is_exact |= from->is_exact;
        term->is_barrier |= from->is_barrier;
    };
    if (term->kind == Kind::kSequence) {
        take(term->item(0));
        if (term->item(0)->nullable) take(term->item(1));
    } else if (term->kind == Kind::kAlternation) {
        for (std::uint32_t i = 0; i < term->num_items; ++i) take(term->item(i));
    } else if (term->where && term->moves->is_distinct()) {
        const int forgotten = term->where->forgotten;
        term->is_exact = forgotten < 0;
        term->is_capturing = term->kind == Kind::kCapture && forgotten < 0;
        term->is_barrier = term->kind == Kind::kCapture && forgotten == 1;
    }
}

Count Store::lower_bound(const Term* term) const {
    if (term->nullable) return 0;
    switch (term->kind) {
        case Kind::kSequence:
            return add(term->item(0)->floor, term->item(1)->floor);
        case Kind::kAlternation: {
            Count least = kMost;
            for (std::uint32_t i = 0; i < term->num_items; ++i) {
                least = std::min(least, term->item(i)->floor);
            }
            return least;
        }
        case Kind::kRepeat:
            return multiply(term->low, term->item()->floor);
        case Kind::kBoth: {
            Count most = 0;
            for (std::uint32_t i = 0; i < term->num_items; ++i) {
                most = std::max(most, term->item(i)->floor);
            }
            return most;
        }
        case Kind::kLexeme:
            return term->item()->floor;
        case Kind::kTable:
            return term->table->distances[term->depth];
        default:
            return term->kind == Kind::kEmpty ? 0 : 1;
    }
}

void Store::insert(Term* term) {
    if ((num_interned_ + 1) * 2 > table_.size()) grow_table(table_.size() * 2);
    const std::size_t bits = table_.size() - 1;
    std::size_t at = term->hash & bits;
    while (table_[at].term) at = (at + 1) & bits;
    table_[at] = {term->hash, term};
    ++num_interned_;
}

void Store::grow_table(std::size_t capacity) {
    std::vector<Slot> old(capacity);
    old.swap(table_);
    const std::size_t bits = capacity - 1;
    for (const Slot& slot : old) {
        if (!slot.term) continue;
        std::size_t at = slot.hash & bits;
        while (table_[at].term) at = (at + 1) & bits;
        table_[at] = slot;
    }
}

Term* Store::of_items(Kind kind, bool nullable, Term* const* items, std::uint32_t count,
                      Count low, Count high) {
    std::uint64_t hash = hash_of(kind);
    for (std::uint32_t i = 0; i < count; ++i) hash = mix(hash, items[i]->serial);
    if (kind == Kind::kRepeat) {
        hash = mix(mix(hash, static_cast<std::uint64_t>(low)), static_cast<std::uint64_t>(high));
    }
    return intern(
        hash,
        [&](const Term* other) {
            return other->kind == kind && other->num_items == count &&
                   std::equal(items, items + count, other->items()) &&
                   (kind != Kind::kRepeat || (other->low == low && other->high == high));
        },
        [&] {
            Term* term = make(kind, hash, nullable);
            term->set_items(items, count);
            term->low = low;
            term->high = high;
            return term;
        });
}

// Making terms

Term* Store::byte_set(const ByteSet& wanted) {
    const ByteSet bits = wanted & alphabet_;
    if (!bits.any()) return empty_;
    std::uint64_t hash = hash_of(Kind::kBytes);
    for (auto word : bits.words) hash = mix(hash, word);
    return intern(
        hash, [&](const Term* other) { return other->kind == Kind::kBytes && other->bits == bits; },
        [&] {
            Term* term = make(Kind::kBytes, hash, false);
            term->bits = bits;
            return term;
        });
}

bool Store::can_spell(std::string_view text) const {
    for (char each : text) {
        if (!alphabet_.contains(static_cast<std::uint8_t>(each))) return false;
    }
    return true;
}

Term* Store::literal(std::string_view text) {
    if (!can_spell(text)) return empty_;
    if (text.empty()) return epsilon_;
    return words_of({std::string(text)});
}

Term* Store::words(std::vector<std::string> listed) {
    listed.erase(std::remove_if(listed.begin(), listed.end(),
                                [this](const std::string& word) { return !can_spell(word); }),
                 listed.end());
    std::sort(listed.begin(), listed.end());
    listed.erase(std::unique(listed.begin(), listed.end()), listed.end());
    return words_of(std::move(listed));
}

// One of the words of a sorted list. A grammar in use asks for the same words without end, so the
// list is kept only if a term was made of it: nothing would begin a sweep for the others.
Term* Store::words_of(std::vector<std::string> sorted) {
    const auto count = static_cast<Count>(sorted.size());
    word_lists_.emplace_back(new WordList(std::move(sorted)));
    WordList* list = word_lists_.back().get();
    Term* term = words(list, 0, count, 0);
    if (term->words != list && word_lists_.back().get() == list) word_lists_.pop_back();
    return term;
}

Term* Store::words(WordList* words, Count low, Count high, std::uint32_t depth) {
    if (low == high) return empty_;
    const auto& first = words->words[static_cast<std::size_t>(low)];
    const bool nullable = first.size() == depth;
    if (high - low == 1 && nullable) return epsilon_;
    const auto make_it = [&](std::uint64_t hash) {
        Term* term = make(Kind::kWords, hash, nullable);
        term->words = words;
        term->low = low;
        term->high = high;
        term->depth = depth;
        return term;
    };
    const auto is_short = [](const Term* term) {
        return term->high - term->low == 1 && term->suffix(term->low).size() <= kShortWord;
    };
    if (high - low == 1 && first.size() - depth <= kShortWord) {
        // The same term whichever list it comes from.
        const auto suffix = std::string_view(first).substr(depth);
        const std::uint64_t hash = hash_text(hash_of(Kind::kWords), suffix);
        return intern(
            hash,
            [&](const Term* other) {
                return other->kind == Kind::kWords && is_short(other) &&
                       other->suffix(other->low) == suffix;
            },
            [&] { return make_it(hash); });
    }
    std::uint64_t hash = mix(hash_of(Kind::kWords), reinterpret_cast<std::uintptr_t>(words));
    hash = mix(mix(mix(hash, static_cast<std::uint64_t>(low)), static_cast<std::uint64_t>(high)),
               depth);
    return intern(
        hash,
        [&](const Term* other) {
            return other->kind == Kind::kWords && !is_short(other) && other->words == words &&
                   other->low == low && other->high == high && other->depth == depth;
        },
        [&] { return make_it(hash); });
}

Term* Store::table(std::vector<bool> accepting, std::vector<std::vector<Table::Move>> moves) {
    const std::size_t num_states = accepting.size();
    spend(num_states);
    std::vector<std::vector<std::uint32_t>> arrivals(num_states);
    for (std::uint32_t state = 0; state < num_states; ++state) {
        for (auto& move : moves[state]) {
            move.bits = move.bits & alphabet_;
            if (move.bits.any()) arrivals[move.after].push_back(state);
        }
    }
    std::vector<Count> distances(num_states, kUnknown);
    std::vector<std::uint32_t> level;
    for (std::uint32_t state = 0; state < num_states; ++state) {
        if (!accepting[state]) continue;
        distances[state] = 0;
        level.push_back(state);
    }
    for (Count num_bytes = 1; !level.empty(); ++num_bytes) {
        std::vector<std::uint32_t> next;
        for (auto state : level) {
            for (auto before : arrivals[state]) {
                if (distances[before] != kUnknown) continue;
                distances[before] = num_bytes;
                next.push_back(before);
            }
        }
        level.swap(next);
    }
    if (distances[0] == kUnknown) return empty_;
    for (auto& each : moves) {
        each.erase(std::remove_if(each.begin(), each.end(),
                                  [&](const Table::Move& move) {
                                      return !move.bits.any() || distances[move.after] == kUnknown;
                                  }),
                   each.end());
    }
    for (const auto& known : tables_) {
        if (known->accepting == accepting && known->moves == moves) return row(known.get(), 0);
    }
    tables_.emplace_back(new Table);
    Table* table = tables_.back().get();
    table->accepting = std::move(accepting);
    table->moves = std::move(moves);
    table->distances = std::move(distances);
    return row(table, 0);
}

Term* Store::row(Table* table, std::uint32_t state) {
    if (table->moves[state].empty()) return epsilon_;
    std::uint64_t hash = mix(hash_of(Kind::kTable), reinterpret_cast<std::uintptr_t>(table));
    hash = mix(hash, state);
    return intern(
        hash,
        [&](const Term* other) {
            return other->kind == Kind::kTable && other->table == table && other->depth == state;
        },
        [&] {
            Term* term = make(Kind::kTable, hash, table->accepting[state]);
            term->table = table;
            term->depth = state;
            return term;
        });
}

Term* Store::sequence(Term* const* terms, std::size_t count) {
    if (!count) return epsilon_;
    Term* result = terms[count - 1];  // not taken apart: it may be a stack of any depth
    for (std::size_t i = count - 1; i-- > 0;) {
        if (terms[i]->kind != Kind::kSequence) {
            result = pair(terms[i], result);
            continue;
        }
        const auto spine = spine_of(terms[i]);
        for (auto at = spine.rbegin(); at != spine.rend(); ++at) result = pair(*at, result);
    }
    return result;
}

Term* Store::sequence(Term* first, Term* second) {
    if (first->kind != Kind::kSequence) return pair(first, second);
    constexpr std::size_t kFewElements = 16;
    Term* elements[kFewElements];
    std::size_t count = 0;
    Term* last = first;
    for (; last->kind == Kind::kSequence && count < kFewElements; last = last->item(1)) {
        elements[count++] = last->item(0);
    }
    Term* result = last->kind == Kind::kSequence ? sequence(last, second) : pair(last, second);
    while (count) result = pair(elements[--count], result);
    return result;
}

Term* Store::pair(Term* head, Term* tail) {
    if (head->kind == Kind::kEmpty || tail->kind == Kind::kEmpty) return empty_;
    if (head->kind == Kind::kEpsilon) return tail;
    if (tail->kind == Kind::kEpsilon) return head;
    if (head == anything_ &&
        (tail == head || (tail->kind == Kind::kSequence && tail->item(0) == head))) {
        return tail;
    }
    if (head->kind == Kind::kRepeat && head->high == kUnbounded) {
        // x* x* is x*: what an ambiguous grammar would otherwise pile up.
        Term* after = tail->kind == Kind::kSequence ? tail->item(0) : tail;
        if (after->kind == Kind::kRepeat && after->high == kUnbounded &&
            after->item() == head->item()) {
            if (head->low == 0) return tail;
            if (after->low == 0) return tail == after ? head : pair(head, tail->item(1));
        }
    }
    Term* items[] = {head, tail};
    return of_items(Kind::kSequence, head->nullable && tail->nullable, items, 2, 0, kUnbounded);
}

Term* Store::alternation(const std::vector<Term*>& terms) {
    return alternation(terms.data(), terms.size());
}

Term* Store::alternation(Term* const* terms, std::size_t count) {
    std::vector<Term*> items;
    Term* known = gather(terms, count, items);
    if (known) return known;
    if (std::all_of(items.begin(), items.end(), [](const Term* item) { return item->is_regular; })) {
        return alternation_of(items);
    }
    return share_heads(std::move(items));
}

Term* Store::gather(Term* const* terms, std::size_t count, std::vector<Term*>& items) {
    ByteSet bits;
    bool has_epsilon = false;
    bool has_nullable = false;
    for (std::size_t i = 0; i < count; ++i) {
        for (Term* item : Alternatives(terms[i])) {
            if (item->kind == Kind::kBytes) {
                bits = bits | item->bits;
            } else if (item == anything_) {
                return item;
            } else if (item == epsilon_) {
                has_epsilon = true;
            } else if (item->kind != Kind::kEmpty) {
                has_nullable |= item->nullable;
                items.push_back(item);
            }
        }
    }
    if (bits.any()) items.push_back(byte_set(bits));
    if (has_epsilon && !has_nullable) items.push_back(epsilon_);
    if (items.empty()) return empty_;
    if (items.size() > 1) {
        std::sort(items.begin(), items.end(),
                  [](const Term* a, const Term* b) { return a->serial < b->serial; });
        items.erase(std::unique(items.begin(), items.end()), items.end());
    }
    if (items.size() == 1) return items[0];
    if (static_cast<Count>(items.size()) > limits_.max_alternatives) {
        throw TooComplex("more than " + std::to_string(limits_.max_alternatives) +
                         " alternatives at one place");
    }
    return nullptr;
}

Term* Store::alternation_of(const std::vector<Term*>& items) {
    if (items.size() == 1) return items[0];
    const bool nullable =
        std::any_of(items.begin(), items.end(), [](const Term* item) { return item->nullable; });
    return of_items(Kind::kAlternation, nullable, items.data(),
                    static_cast<std::uint32_t>(items.size()), 0, kUnbounded);
}

// Alternatives that begin with the same term share it: X s | X t is X (s | t), so that an ambiguous
// grammar has few stacks, as in the graph-structured ones of GLR parsers (Tomita, 1987). Regular
// ones are left as they are: their automaton is small anyway. Stacks may be deep, so what follows a
// shared head is seen to in a frame of its own.
Term* Store::share_heads(std::vector<Term*> first) {
    struct Frame {
        std::vector<Term*> items;
        std::uint64_t hash = 0;
        std::vector<std::pair<Term*, std::vector<Term*>>> groups;  // (head, what may follow it)
        std::size_t next = 0;
        std::vector<Term*> made;
    };
    std::vector<Frame> frames;
    Term* answer = nullptr;
    const auto begin = [&](std::vector<Term*> items) {
        // What they come to where that is known or plain; else there is one frame more.
        if (have_heads_of_their_own(items)) return alternation_of(items);
        std::unordered_map<Term*, std::size_t> index;
        Frame frame;
        bool is_shared = false;
        for (Term* item : items) {
            Term* head = head_of(item);
            Term* tail = item == head ? epsilon_ : item->item(1);
            const auto [at, is_new] = index.emplace(head, frame.groups.size());
            if (is_new) {
                frame.groups.emplace_back(head, std::vector<Term*>());
            } else {
                is_shared = true;
            }
            frame.groups[at->second].second.push_back(tail);
        }
        if (!is_shared) return alternation_of(items);
        for (const Term* item : items) frame.hash = mix(frame.hash, item->serial);
        for (const Shared& known : shared_[frame.hash]) {
            if (known.items == items) return known.result;
        }
        frame.items = std::move(items);
        frames.push_back(std::move(frame));
        return static_cast<Term*>(nullptr);
    };
    answer = begin(std::move(first));
    while (!frames.empty()) {
        Frame& frame = frames.back();
        if (answer) {
            frame.made.push_back(pair(frame.groups[frame.next - 1].first, answer));
            answer = nullptr;
        }
        if (frame.next == frame.groups.size()) {
            std::vector<Term*> items;
            answer = gather(frame.made.data(), frame.made.size(), items);
            if (!answer) answer = alternation_of(items);
            shared_[frame.hash].push_back({std::move(frame.items), answer});
            frames.pop_back();
            spend();
            continue;
        }
        auto& [head, tails] = frame.groups[frame.next++];
        const bool is_regular =
            head->is_regular && std::all_of(tails.begin(), tails.end(),
                                            [](const Term* tail) { return tail->is_regular; });
        if (tails.size() == 1 || is_regular) {
            for (Term* tail : tails) frame.made.push_back(pair(head, tail));
            continue;
        }
        std::vector<Term*> items;
        answer = gather(tails.data(), tails.size(), items);
        if (!answer) answer = begin(std::move(items));
    }
    return answer;
}

Term* Store::repeat(Term* term, Count low, Count high) {
    if (high == 0 || term->kind == Kind::kEpsilon) return epsilon_;
    if (term->kind == Kind::kEmpty) return low == 0 ? epsilon_ : empty_;
    if (low == 1 && high == 1) return term;
    const bool is_endless = term->kind == Kind::kRepeat && term->high == kUnbounded;
    if (term->nullable) {
        low = 0;
        if (is_endless && high == kUnbounded) return term;
    }
    if (is_endless && term->low == 0 && high == kUnbounded) return term;
    return of_items(Kind::kRepeat, low == 0, &term, 1, low, high);
}

Term* Store::both(const std::vector<Term*>& terms) { return both(terms.data(), terms.size()); }

Term* Store::both(Term* const* terms, std::size_t count) {
    std::vector<Term*> items;
    for (std::size_t i = 0; i < count; ++i) {
        const bool is_both = terms[i]->kind == Kind::kBoth;
        Term* const* from = is_both ? terms[i]->items() : &terms[i];
        const std::uint32_t num = is_both ? terms[i]->num_items : 1;
        for (std::uint32_t j = 0; j < num; ++j) {
            if (from[j]->kind == Kind::kEmpty) return empty_;
            if (from[j] != anything_) items.push_back(from[j]);
        }
    }
    if (items.empty()) return anything_;
    std::sort(items.begin(), items.end(),
              [](const Term* a, const Term* b) { return a->serial < b->serial; });
    items.erase(std::unique(items.begin(), items.end()), items.end());
    if (items.size() == 1) return items[0];
    bool nullable = true;
    bool has_epsilon = false;
    bool is_bytes = true;
    ByteSet bits = ByteSet::all();
    for (const Term* item : items) {
        nullable &= item->nullable;
        has_epsilon |= item->kind == Kind::kEpsilon;
        if (item->kind == Kind::kBytes) {
            bits = bits & item->bits;
        } else {
            is_bytes = false;
        }
    }
    if (has_epsilon) return nullable ? epsilon_ : empty_;
    if (is_bytes) return byte_set(bits);
    return of_items(Kind::kBoth, nullable, items.data(), static_cast<std::uint32_t>(items.size()),
                    0, kUnbounded);
}

Term* Store::complement(Term* term) {
    if (term->kind == Kind::kEmpty) return anything_;
    if (term->kind == Kind::kNot) return term->item();
    return of_items(Kind::kNot, !term->nullable, &term, 1, 0, kUnbounded);
}

Term* Store::lexeme(Term* term) {
    switch (term->kind) {
        case Kind::kEmpty:
        case Kind::kEpsilon:
        case Kind::kBytes:
        case Kind::kWords:
        case Kind::kLexeme:
            return term;
        default:
            return of_items(Kind::kLexeme, term->nullable, &term, 1, 0, kUnbounded);
    }
}

Term* Store::call(Rule* rule) {
    const std::uint64_t hash = mix(hash_of(Kind::kCall), reinterpret_cast<std::uintptr_t>(rule));
    return intern(
        hash, [&](const Term* other) { return other->kind == Kind::kCall && other->rule == rule; },
        [&] {
            Term* term = make(Kind::kCall, hash, rule->nullable);
            term->rule = rule;
            return term;
        });
}

Rule* Store::adopt(std::unique_ptr<Rule> rule) {
    rules_.push_back(std::move(rule));
    return rules_.back().get();
}

std::size_t Store::num_bytes() const {
    return kBytesPerStore + slots_.num_bytes() + memos_.num_bytes() + table_.capacity() * sizeof(Slot) +
           terms_.capacity() * sizeof(Term*) + (moves_.size() + rules_.size()) * kBytesPerStructure +
           held_;
}

// Sweeping

void Store::sweep() {
    std::vector<Term*> pending;
    std::unordered_set<const Where*> wheres;  // that are in use
    for (Term* term : terms_) {
        if (term->pins || term->handle) pending.push_back(term);
    }
    for (Term* term : characters_) pending.push_back(term);
    while (!pending.empty()) {
        Term* term = pending.back();
        pending.pop_back();
        if (!term || term->is_marked) continue;
        term->is_marked = true;
        for (std::uint32_t i = 0; i < term->num_items; ++i) pending.push_back(term->item(i));
        if (term->words) term->words->is_marked = true;
        if (term->table) term->table->is_marked = true;
        if (term->moves) {
            wheres.insert(term->where);
            if (!term->moves->is_marked) {
                term->moves->is_marked = true;
                term->moves->for_each_term([&](Term* each) { pending.push_back(each); });
            }
        }
        if (term->rule) {
            term->rule->is_marked = true;
            pending.push_back(term->rule->body);
            pending.push_back(term->rule->shortest);
        }
    }
    free_.clear();
    std::fill(table_.begin(), table_.end(), Slot{});
    num_interned_ = 0;
    for (Term* term : terms_) {
        if (!term->is_marked) {
            term->~Term();
            new (term) Term();
            free_.push_back(term);
            continue;
        }
        term->is_marked = false;
        term->is_state = term->has_row = false;
        term->loops = 0;
        term->num_passed = 0;
        term->passed_after = nullptr;
        term->has_form = term->has_parts = false;
        term->form = term->parts = KeptPairs();
        term->dense = nullptr;
        term->clamped = nullptr;
        term->mask.reset();
        term->num_tokens = -1;
        insert(term);
    }
    memos_.clear();
    num_survivors_ = size();
    held_ = 0;
    std::vector<std::unique_ptr<Rule>> kept;
    std::vector<std::unique_ptr<Rule>> forgotten;
    for (auto& rule : rules_) {
        if (!rule->is_marked && forget_rule) forget_rule(*rule);
        (rule->is_marked ? kept : forgotten).push_back(std::move(rule));
    }
    rules_.swap(kept);
    for (const auto& rule : rules_) rule->is_marked = false;
    keep_marked(word_lists_);
    keep_marked(tables_);
    keep_marked(moves_);
    for (const auto& moves : moves_) {
        moves->forget([&](const Where* where) { return wheres.count(where) != 0; });
    }
    shared_.clear();
    character_parts_.clear();
    has_character_parts_ = false;
}

}  // namespace palmette
