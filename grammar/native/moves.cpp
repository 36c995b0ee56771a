#include "moves.hpp"

#include <algorithm>
#include <map>
#include <numeric>

#include "hash.hpp"
#include "store.hpp"

namespace palmette {

namespace {

bool has_come(const Came& came, std::uint32_t place) {
    const std::size_t word = place >> 6;
    return word < came.size() && (came[word] >> (place & 63) & 1);
}

Came with(Came came, std::uint32_t place) {
    const std::size_t word = place >> 6;
    if (came.size() <= word) came.resize(word + 1);
    came[word] |= std::uint64_t{1} << (place & 63);
    return came;
}

// Only those from `place` on.
Came from(std::uint32_t place, const Came& came) {
    Came kept(came);
    for (std::size_t word = 0; word < kept.size() && word * 64 < place; ++word) {
        const std::uint32_t bits = place - static_cast<std::uint32_t>(word * 64);
        kept[word] = bits >= 64 ? 0 : kept[word] >> bits << bits;
    }
    while (!kept.empty() && !kept.back()) kept.pop_back();
    return kept;
}

bool lacks_something(const Left& left) {
    return std::any_of(left.begin(), left.end(), [](const Counter& each) { return each.low > 0; });
}

bool contains(const CounterIndices& counters, std::uint32_t counter) {
    return std::find(counters.begin(), counters.end(), counter) != counters.end();
}

// What is left after one part that moves these counters; none if one of them is full.
std::optional<Left> moved(Left left, const CounterIndices& counters) {
    for (auto counter : counters) {
        Counter& each = left[counter];
        if (each.high == 0) return std::nullopt;
        if (each.low) --each.low;
        if (each.high != kUnbounded) --each.high;
    }
    return left;
}

Left moved_by(Left left, const CounterIndices& counters, Count times) {
    for (auto counter : counters) {
        Counter& each = left[counter];
        each.low = std::max(each.low - times, Count{0});
        if (each.high != kUnbounded) each.high -= times;
    }
    return left;
}

std::int64_t last_lacking(const Left& left) {
    for (std::size_t counter = left.size(); counter-- > 0;) {
        if (left[counter].low) return static_cast<std::int64_t>(counter);
    }
    return -1;
}

std::size_t hash_of(std::uint64_t head, const Came& came, const Left& left) {
    std::size_t hash = mix(0x51ED270B, head);
    for (auto word : came) hash = mix(hash, word);
    for (const Counter& each : left) {
        hash = mix(hash, static_cast<std::uint64_t>(each.low));
        hash = mix(hash, static_cast<std::uint64_t>(each.high));
    }
    return hash;
}

std::size_t hash_of(const Where& where) {
    const std::size_t hash = hash_of(where.place * 2ULL + where.is_first, where.came, where.left);
    return mix(mix(hash, where.seen ? where.seen->hash : 0),
                    static_cast<std::uint64_t>(where.forgotten));
}

}  // namespace

Where Where::with_text(const std::string& text) const {
    if (has_seen(text)) return *this;
    auto more = seen ? std::make_shared<Seen>(*seen) : std::make_shared<Seen>();
    more->texts.insert(text);
    more->hash ^= mix(0x9E3779B9, std::hash<std::string>()(text));
    Where where = *this;
    where.seen = std::move(more);
    return where;
}

std::size_t Moves::StateHash::operator()(const State& state) const {
    return hash_of((std::uint64_t{state.place} << 32) + state.given_up, state.came, state.left);
}

Moves::Moves(Store& store, const Punctuation& marks, Counter total,
             const std::vector<Counter>& more)
    : store_(store), marks_(marks) {
    std::vector<Counter> all{total};
    all.insert(all.end(), more.begin(), more.end());
    is_total_only_ = true;
    for (std::size_t index = 0; index < all.size(); ++index) {
        if (all[index] == Counter()) {
            place_of_.push_back(-1);
            continue;
        }
        place_of_.push_back(static_cast<std::int32_t>(counters_.size()));
        counters_.push_back(all[index]);
        is_total_only_ &= index == 0;
    }
    close_bytes_ = store.min_bytes(marks.close);
    comma_bytes_ = store.min_bytes(marks.comma);
    first_bytes_ = store.min_bytes(marks.blank) - comma_bytes_;
}

void Moves::finish() {
    for (std::uint32_t filler = 0; filler < fillers_.size(); ++filler) {
        for (const Choice& choice : fillers_[filler]) groups_.push_back({filler, &choice});
    }
    std::stable_sort(groups_.begin(), groups_.end(), [](const Group& a, const Group& b) {
        return a.choice->num_bytes < b.choice->num_bytes;
    });
    for (std::uint32_t counter = 0; counter < counters_.size(); ++counter) {
        Came bits;
        for (std::uint32_t place = 0; place < places_.size(); ++place) {
            for (const Choice& choice : places_[place]) {
                if (!contains(choice.counters, counter)) continue;
                bits = with(std::move(bits), place);
                break;
            }
        }
        movers_.push_back(std::move(bits));
        is_movable_.push_back(std::any_of(groups_.begin(), groups_.end(), [&](const Group& group) {
            return contains(group.choice->counters, counter);
        }));
    }
    moved_from_.assign(groups_.size(), std::vector<bool>(counters_.size()));
    for (std::size_t group = groups_.size(); group-- > 0;) {
        if (group + 1 < groups_.size()) moved_from_[group] = moved_from_[group + 1];
        for (auto counter : groups_[group].choice->counters) moved_from_[group][counter] = true;
    }
}

std::vector<Choice> Moves::choices(const std::vector<Part>& parts, Count overhead) {
    std::vector<Choice> choices;
    std::map<CounterIndices, std::size_t> known;
    std::vector<std::vector<std::pair<Count, Term*>>> costed;
    for (const Part& part : parts) {
        CounterIndices counters;
        const auto move = [&](std::size_t index) {
            const auto place = place_of_[index];
            if (place >= 0) counters.push_back(static_cast<std::uint32_t>(place));
        };
        move(0);
        for (auto index : part.counters) move(index + 1);
        const auto [at, is_new] = known.emplace(counters, choices.size());
        if (is_new) {
            choices.push_back({{}, counters, 0});
            costed.emplace_back();
        }
        costed[at->second].emplace_back(store_.min_bytes(part.value), part.value);
    }
    for (std::size_t i = 0; i < choices.size(); ++i) {
        std::stable_sort(costed[i].begin(), costed[i].end(),
                         [](const auto& a, const auto& b) { return a.first < b.first; });
        for (const auto& each : costed[i]) choices[i].values.push_back(each.second);
        choices[i].num_bytes = add(costed[i][0].first, overhead);
    }
    return choices;
}

// Where one may go

Where Moves::start() const {
    Where where;
    where.left = settled(0, {}, counters_);
    where.is_first = true;
    return where;
}

bool Moves::may_close(const Where& where) const {
    return !lacks_something(where.left) && !must_go_on(where);
}

Moves::Cost Moves::min_bytes(const Where& where) {
    if (may_close(where)) return close_bytes_;
    const Cost beyond = cost(state_of(where));
    if (!beyond) return std::nullopt;
    return add(*beyond, close_bytes_ + (where.is_first ? first_bytes_ : 0));
}

std::optional<Step> Moves::step(const Where& where) {
    if (may_close(where)) return std::nullopt;
    State here = state_of(where);
    if (here.left.empty()) here.place = next_due(where);
    for (; here.place < num_places(); ++here.place) {
        const Cost least = cost(here);
        if (!may_take(here.place, here.came)) continue;
        for (const Choice& choice : places_[here.place]) {
            auto left = moved(here.left, choice.counters);
            if (!left) continue;
            const Cost rest = cost(beyond(here.place, here.came, *left));
            if (rest && least && add(choice.num_bytes, *rest) == *least) {
                return Step{here.place, &choice, 1, after(where, here.place, std::move(*left))};
            }
        }
    }
    return filler_step(where, here.left);
}

Step Moves::filler_step(const Where& where, const Left& left) {
    const Group* group = nullptr;
    Count times = 1;
    if (const auto found = direct(0, left)) {
        group = found->group;
        times = is_distinct_ ? 1 : found->times;
    } else {
        for (State state{num_places(), 0, {}, left}; state.given_up < groups_.size();) {
            const Cost least = cost(state);
            const auto used = use(state.given_up, state.left);
            const Cost rest = used ? cost(*used) : std::nullopt;
            const Group& here = groups_[state.given_up];
            if (rest && least && *least == add(*rest, here.choice->num_bytes)) {
                group = &here;
                break;
            }
            state = give_up(state.given_up, std::move(state.left));
        }
        if (!group) throw TooComplex("an object or array cannot be completed");
    }
    Left rest = moved_by(left, group->choice->counters, times);
    return {-1 - static_cast<std::int64_t>(group->filler), group->choice, times,
            after(where, std::nullopt, std::move(rest))};
}

std::vector<std::pair<const Choice*, Where>> Moves::offers(const Where& where,
                                                           std::int64_t place) {
    std::vector<std::pair<const Choice*, Where>> offered;
    if (place < 0 && !may_fill(where)) return offered;
    const auto& choices = place >= 0 ? places_[static_cast<std::size_t>(place)]
                                     : fillers_[static_cast<std::size_t>(-1 - place)];
    const auto filled =
        place >= 0 ? std::optional(static_cast<std::uint32_t>(place)) : std::nullopt;
    for (const Choice& choice : choices) {
        auto left = moved(where.left, choice.counters);
        if (!left) continue;
        Where next = after(where, filled, std::move(*left));
        if (min_bytes(next)) offered.emplace_back(&choice, std::move(next));
    }
    return offered;
}

Left Moves::settled(std::uint32_t index, const Came& came, Left left) const {
    for (std::uint32_t counter = 0; counter < left.size(); ++counter) {
        Counter& each = left[counter];
        if (each.high == kUnbounded || is_movable_[counter]) continue;
        Count num_ahead = 0;
        const Came ahead = from(index, movers_[counter]);
        for (std::size_t word = 0; word < ahead.size(); ++word) {
            const std::uint64_t gone = word < came.size() ? came[word] : 0;
            num_ahead += __builtin_popcountll(ahead[word] & ~gone);
        }
        if (num_ahead <= each.high) each.high = kUnbounded;
    }
    return left;
}

const Where* Moves::keep(const Where& where) {
    const std::size_t hash = hash_of(where);
    const auto [first, last] = index_.equal_range(hash);
    for (auto at = first; at != last; ++at) {
        if (*at->second == where) return at->second;
    }
    wheres_.push_back(std::make_unique<Where>(where));
    index_.emplace(hash, wheres_.back().get());
    return wheres_.back().get();
}

void Moves::index_wheres() {
    index_.clear();
    for (const auto& where : wheres_) index_.emplace(hash_of(*where), where.get());
}

// What it costs

Moves::Cost Moves::cost(const State& state) {
    const auto found = known_.find(state);
    if (found != known_.end()) return found->second;
    if (known_.size() > kMostKnown) known_.clear();
    std::vector<State> pending{state};
    while (!pending.empty()) {
        const State here = pending.back();
        if (known_.count(here)) {
            pending.pop_back();
            continue;
        }
        store_.spend(1 + here.came.size() / 8);
        store_.hold(200 + 8 * here.came.size() + 16 * here.left.size());
        bool is_plain = false;
        const Cost plain = direct_cost(here, is_plain);
        if (is_plain) {
            known_.emplace(here, plain);
            continue;
        }
        const auto all = ways(here);
        const std::size_t before = pending.size();
        for (const Way& way : all) {
            if (!known_.count(way.second)) pending.push_back(way.second);
        }
        if (pending.size() > before) continue;
        Cost least;
        for (const Way& way : all) {
            const Cost rest = known_.at(way.second);
            if (rest && (!least || add(way.first, *rest) < *least)) least = add(way.first, *rest);
        }
        known_.emplace(here, least);
    }
    return known_.at(state);
}

std::vector<Moves::Way> Moves::ways(const State& state) const {
    std::vector<Way> ways;
    if (state.place == num_places()) {
        // Past the places the order of what comes is free, so the last counter that lacks
        // something is seen to first, and with the cheapest groups first. One that was given up
        // does not come again until that counter has enough.
        if (state.given_up >= groups_.size()) return ways;
        ways.emplace_back(0, give_up(state.given_up, state.left));
        if (auto after = use(state.given_up, state.left)) {
            ways.emplace_back(groups_[state.given_up].choice->num_bytes, std::move(*after));
        }
        return ways;
    }
    if (may_take(state.place, state.came)) {
        for (const Choice& choice : places_[state.place]) {
            if (auto left = moved(state.left, choice.counters)) {
                ways.emplace_back(choice.num_bytes,
                                  beyond(state.place, state.came, std::move(*left)));
            }
        }
    }
    if (may_skip(state.place, state.came)) {
        ways.emplace_back(0, beyond(state.place, state.came, state.left));
    }
    return ways;
}

Moves::State Moves::beyond(std::uint32_t place, const Came& came, Left left) const {
    ++place;
    if (place == num_places()) return {place, 0, {}, std::move(left)};
    return {place, 0, from(place, came), std::move(left)};
}

Moves::State Moves::give_up(std::uint32_t group, Left left) const {
    ++group;
    const auto num_lacking = std::count_if(left.begin(), left.end(),
                                           [](const Counter& each) { return each.low > 0; });
    if (group < groups_.size() && num_lacking == 1) {
        for (std::size_t counter = 0; counter < left.size(); ++counter) {
            if (!moved_from_[group][counter]) left[counter].high = kUnbounded;
        }
    }
    return {num_places(), group, {}, std::move(left)};
}

std::optional<Moves::State> Moves::use(std::uint32_t group, const Left& left) const {
    const Choice& choice = *groups_[group].choice;
    const auto lacking = last_lacking(left);
    if (lacking < 0 || !contains(choice.counters, static_cast<std::uint32_t>(lacking))) {
        return std::nullopt;
    }
    auto after = moved(left, choice.counters);
    if (!after) return std::nullopt;
    const std::uint32_t given_up = last_lacking(*after) == lacking ? group : 0;
    return State{num_places(), given_up, {}, std::move(*after)};
}

// The filler that does all that is left, if only one counter lacks something and the cheapest that
// moves it can come often enough; and how often.
std::optional<Moves::Direct> Moves::direct(std::uint32_t given_up, const Left& left) const {
    std::int64_t lacking = -1;
    for (std::size_t counter = 0; counter < left.size(); ++counter) {
        if (!left[counter].low) continue;
        if (lacking >= 0) return std::nullopt;
        lacking = static_cast<std::int64_t>(counter);
    }
    if (lacking < 0) return std::nullopt;
    const Count times = left[static_cast<std::size_t>(lacking)].low;
    for (std::size_t i = given_up; i < groups_.size(); ++i) {
        const auto& counters = groups_[i].choice->counters;
        if (!contains(counters, static_cast<std::uint32_t>(lacking))) continue;
        bool is_full = false;
        bool has_room = true;
        for (auto counter : counters) {
            const Count high = left[counter].high;
            is_full |= high == 0;
            has_room &= high == kUnbounded || high >= times;
        }
        if (is_full) continue;
        if (!has_room) return std::nullopt;
        return Direct{&groups_[i], times};
    }
    return std::nullopt;
}

Moves::Cost Moves::direct_filler_cost(std::uint32_t given_up, const Left& left,
                                      bool& is_plain) const {
    is_plain = true;
    if (!lacks_something(left)) return 0;
    for (std::size_t i = 0; i < left.size(); ++i) {
        const Counter& each = left[i];
        if (!each.low) continue;
        if (!is_movable_[i] || (each.high != kUnbounded && each.low > each.high)) {
            return std::nullopt;
        }
    }
    return greedy_cost(given_up, left, is_plain);
}

Moves::Cost Moves::greedy_cost(std::uint32_t given_up, const Left& left, bool& is_plain) const {
    const auto num_lacking = std::count_if(left.begin(), left.end(),
                                           [](const Counter& each) { return each.low > 0; });
    is_plain = num_lacking == 1;
    if (!is_plain) return std::nullopt;
    const auto lacking = static_cast<std::uint32_t>(last_lacking(left));
    const Count times = left[lacking].low;
    Count missing = times;
    Count total = 0;
    CounterIndices are_short;
    for (std::size_t group = given_up; group < groups_.size(); ++group) {
        const Choice& choice = *groups_[group].choice;
        if (!contains(choice.counters, lacking)) continue;
        Count room = missing;
        for (auto counter : choice.counters) {
            const Count high = left[counter].high;
            if (high == kUnbounded || high >= times) continue;
            if (contains(are_short, counter)) {
                is_plain = false;
                return std::nullopt;
            }
            are_short.push_back(counter);
            room = std::min(room, high);
        }
        total = add(total, multiply(room, choice.num_bytes));
        missing -= room;
        if (!missing) return total;
    }
    return std::nullopt;
}

// Objects

namespace {

Counter total_of(const Members& shape) {
    Count num_required = 0;
    for (const Member& member : shape.members) num_required += member.is_required;
    Count most = shape.max_members;
    if (shape.names.empty() && most >= static_cast<Count>(shape.members.size())) most = kUnbounded;
    return {shape.min_members > num_required ? shape.min_members : 0, most};
}

Counter total_of(const Items& shape) {
    Count most = shape.max_items;
    if (shape.rest.empty() && most >= static_cast<Count>(shape.prefix.size())) most = kUnbounded;
    return {shape.min_items, most};
}

}  // namespace

ObjectMoves::ObjectMoves(Store& store, Members shape)
    : Moves(store, shape.marks, total_of(shape), shape.counters),
      is_any_order_(shape.is_any_order) {
    is_distinct_ = shape.has_distinct_names && !shape.names.empty();
    const Count colon = store.min_bytes(shape.marks.colon);
    for (std::uint32_t i = 0; i < shape.members.size(); ++i) {
        Member& member = shape.members[i];
        const Count overhead = static_cast<Count>(member.key.size()) + colon + comma_bytes_;
        places_.push_back(choices(member.parts, overhead));
        Count least = kMost;
        for (const Choice& choice : places_.back()) least = std::min(least, choice.num_bytes);
        cheapest_.push_back(least);
        is_required_.push_back(member.is_required);
        if (member.is_required) required_.push_back(i);
        key_of_.push_back(std::move(member.key));
    }
    for (const Names& names : shape.names) {
        names_.push_back(names.name);
        fillers_.push_back(
            choices(names.parts, add(store.min_bytes(names.name), colon + comma_bytes_)));
    }
    finish();
    sorted_places_.resize(key_of_.size());
    std::iota(sorted_places_.begin(), sorted_places_.end(), 0);
    std::stable_sort(sorted_places_.begin(), sorted_places_.end(),
                     [this](auto a, auto b) { return key_of_[a] < key_of_[b]; });
    for (auto place : sorted_places_) keys_.push_back(key_of_[place]);
    bytes_from_.assign(required_.size() + 1, 0);
    for (std::size_t at = required_.size(); at-- > 0;) {
        bytes_from_[at] = add(bytes_from_[at + 1], cheapest_[required_[at]]);
    }
    for (std::uint32_t place = 0; place < key_of_.size(); ++place) {
        if (!is_required_[place]) optional_by_cost_.push_back(place);
    }
    std::stable_sort(optional_by_cost_.begin(), optional_by_cost_.end(),
                     [this](auto a, auto b) { return cheapest_[a] < cheapest_[b]; });
}

// The first required member that has not come.
std::optional<std::uint32_t> ObjectMoves::next_required(const Where& where) const {
    if (is_any_order_) {
        for (auto place : required_) {
            if (!has_come(where.came, place)) return place;
        }
        return std::nullopt;
    }
    const auto at = std::lower_bound(required_.begin(), required_.end(), where.place);
    return at == required_.end() ? std::nullopt : std::optional(*at);
}

std::vector<std::uint32_t> ObjectMoves::candidates(const Where& where, Count low, Count high) {
    store_.spend(static_cast<std::size_t>(high - low) / 64);
    std::vector<std::uint32_t> ahead;
    const std::uint32_t last = is_any_order_ ? 0 : last_ahead(where);
    for (Count i = low; i < high; ++i) {
        const auto place = sorted_places_[static_cast<std::size_t>(i)];
        const bool is_ahead = is_any_order_ ? !has_come(where.came, place)
                                            : where.place <= place && place + 1 <= last;
        if (is_ahead) ahead.push_back(place);
    }
    if (where.left.empty()) return ahead;
    std::vector<std::uint32_t> kept;
    if (!is_total_only_) {
        for (auto place : ahead) {
            if (!offers(where, place).empty()) kept.push_back(place);
        }
        return kept;
    }
    const Count room = where.left[0].high;
    if (room == kUnbounded || room > required_cost(where.place, where.came).second) return ahead;
    for (auto place : ahead) {
        if (is_required_[place]) kept.push_back(place);
    }
    return kept;
}

// One past the last member that may come next: that one must come, or too few would be left.
std::uint32_t ObjectMoves::last_ahead(const Where& where) const {
    const auto required = next_required(where);
    Count last = required ? Count{*required} + 1 : Count{num_places()};
    if (!where.left.empty() && is_total_only_ && fillers_.empty()) {
        last = std::min(last, Count{num_places()} - where.left[0].low + 1);
    }
    return static_cast<std::uint32_t>(std::max(last, Count{0}));
}

bool ObjectMoves::must_go_on(const Where& where) const { return next_required(where).has_value(); }

std::uint32_t ObjectMoves::next_due(const Where& where) const {
    return next_required(where).value_or(num_places());
}

bool ObjectMoves::may_fill(const Where& where) const {
    return is_any_order_ || !next_required(where);
}

Where ObjectMoves::after(const Where& where, std::optional<std::uint32_t> place, Left left) const {
    std::uint32_t index = where.place;
    Came came = where.came;
    if (!is_any_order_) {
        index = place ? *place + 1 : num_places();
    } else if (place) {
        came = with(std::move(came), *place);
    }
    Left rest = settled(index, came, std::move(left));
    return {index, std::move(came), std::move(rest), false, where.seen, where.forgotten};
}

Moves::State ObjectMoves::state_of(const Where& where) const {
    return {where.place, 0, where.place == num_places() ? Came() : where.came, where.left};
}

bool ObjectMoves::may_skip(std::uint32_t place, const Came& came) const {
    return has_come(came, place) || !is_required_[place];
}

bool ObjectMoves::may_take(std::uint32_t place, const Came& came) const {
    return !has_come(came, place);
}

Moves::Cost ObjectMoves::direct_cost(const State& state, bool& is_plain) {
    if (state.place == num_places()) {
        return direct_filler_cost(state.given_up, state.left, is_plain);
    }
    is_plain = state.left.empty() || is_total_only_;
    if (state.left.empty()) return required_cost(state.place, state.came).first;
    if (!is_total_only_) return std::nullopt;
    const auto [total, num_required] = required_cost(state.place, state.came);
    const Counter& left = state.left[0];
    if (left.high != kUnbounded && std::max(num_required, left.low) > left.high) {
        return std::nullopt;
    }
    const Count num_more = left.low - num_required;
    if (num_more <= 0) return total;
    const Cost more = optional_cost(state.place, state.came, num_more);
    return more ? Cost(add(total, *more)) : std::nullopt;
}

std::pair<Count, Count> ObjectMoves::required_cost(std::uint32_t place, const Came& came) const {
    const auto first = std::lower_bound(required_.begin(), required_.end(), place);
    if (came.empty()) {
        const auto at = static_cast<std::size_t>(first - required_.begin());
        return {bytes_from_[at], static_cast<Count>(required_.end() - first)};
    }
    Count total = 0;
    Count count = 0;
    for (auto at = first; at != required_.end(); ++at) {
        if (has_come(came, *at)) continue;
        total = add(total, cheapest_[*at]);
        ++count;
    }
    return {total, count};
}

Moves::Cost ObjectMoves::optional_cost(std::uint32_t place, const Came& came, Count count) {
    const Cost filler = groups_.empty() ? Cost() : Cost(groups_[0].choice->num_bytes);
    Count total = 0;
    store_.spend(optional_by_cost_.size() / 64);
    for (auto each : optional_by_cost_) {
        if (!count || (filler && cheapest_[each] >= *filler)) break;
        if (each < place || has_come(came, each)) continue;
        total = add(total, cheapest_[each]);
        --count;
    }
    if (!count) return total;
    return filler ? Cost(add(total, multiply(count, *filler))) : std::nullopt;
}

// Arrays

ArrayMoves::ArrayMoves(Store& store, const Items& shape)
    : Moves(store, shape.marks, total_of(shape), shape.counters) {
    is_distinct_ = shape.is_unique;
    for (const auto& parts : shape.prefix) places_.push_back(choices(parts, comma_bytes_));
    if (!shape.rest.empty()) fillers_.push_back(choices(shape.rest, comma_bytes_));
    finish();
    bytes_before_.push_back(0);
    for (const auto& choices : places_) {
        Count least = kMost;
        for (const Choice& choice : choices) least = std::min(least, choice.num_bytes);
        bytes_before_.push_back(add(bytes_before_.back(), least));
    }
}

std::optional<std::int64_t> ArrayMoves::place(const Where& where) const {
    if (where.place < num_places()) return where.place;
    return fillers_.empty() ? std::nullopt : std::optional<std::int64_t>(-1);
}

Where ArrayMoves::after(const Where& where, std::optional<std::uint32_t> place, Left left) const {
    const std::uint32_t index = place ? *place + 1 : num_places();
    return {index, {}, settled(index, {}, std::move(left)), false, where.seen, where.forgotten};
}

Moves::State ArrayMoves::state_of(const Where& where) const {
    return {where.place, 0, {}, where.left};
}

Moves::Cost ArrayMoves::direct_cost(const State& state, bool& is_plain) {
    const std::uint32_t place = state.place;
    if (place == num_places()) return direct_filler_cost(state.given_up, state.left, is_plain);
    is_plain = true;
    if (!lacks_something(state.left)) return 0;
    is_plain = is_total_only_;
    if (!is_total_only_) return std::nullopt;
    const Counter& left = state.left[0];
    if (left.high != kUnbounded && left.low > left.high) return std::nullopt;
    const Count end = std::min(add(place, left.low), Count{num_places()});
    const Count total =
        bytes_before_[static_cast<std::size_t>(end)] - bytes_before_[place];
    const Count more = left.low - (end - place);
    if (!more) return total;
    if (groups_.empty()) return std::nullopt;
    return add(total, multiply(more, groups_[0].choice->num_bytes));
}

}  // namespace palmette
