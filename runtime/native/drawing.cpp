#include "drawing.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace palmette {

namespace {

constexpr int64_t kFewRows = 2;     // are not worth other threads
constexpr int64_t kBlock = 512;     // logits that are looked at, or passed over, together
constexpr int64_t kStretch = 64;    // logits of a block that are passed over together
constexpr int64_t kFewKept = 1024;  // of the largest are kept in a heap
// Of what top-p leaves out: so many tokens are looked among first, and so many times as many next.
constexpr int64_t kFirstParts = 256, kMoreParts = 16;
constexpr double kFar = -40;  // e to that is less than half of any unit of weight
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Candidate {
    float logit;
    int32_t id;
    int64_t weight;
};

// Best first; of equals, the lower id first. Without a branch: nobody could tell which way it goes.
inline bool is_before(const Candidate& a, const Candidate& b) {
    return (a.logit > b.logit) | ((a.logit == b.logit) & (a.id < b.id));
}

// What a thread works with, kept from row to row.
struct Scratch {
    std::vector<const float*> places;
    std::vector<float> logits, peaks, near;
    std::vector<int64_t> weights, sums;
    std::vector<Candidate> candidates, order;
};

Scratch& scratch() {
    static thread_local Scratch own;
    return own;
}

template <class Number> Number* room(std::vector<Number>& vector, int64_t count) {
    if (vector.size() < static_cast<std::size_t>(count)) {
        vector.resize(static_cast<std::size_t>(count));
    }
    return vector.data();
}

constexpr int64_t num_blocks(int64_t n) { return (n + kBlock - 1) / kBlock; }

// Calls work(block, first, count) for each block of n numbers, in their order.
template <class Work> void each_block(int64_t n, const Work& work) {
    for (int64_t block = 0, first = 0; first < n; ++block, first += kBlock) {
        work(block, first, std::min(kBlock, n - first));
    }
}

// Where in a list of weights, whose sum is `total`, the drawn share of them all is passed.
int64_t target_of(int64_t total, double uniform) {
    // The product may round up to the total itself, which is one past the last.
    return std::min(static_cast<int64_t>(uniform * static_cast<double>(total)), total - 1);
}

// What the k-th of n tokens in order has at least: as much as the largest of k blocks.
float bound_of(const Peaks& peaks, int64_t n, int64_t k) {
    const int64_t count = num_blocks(n);
    if (k < 1 || k > count) return -kInfinity;
    std::vector<float>& near = scratch().near;
    near.assign(peaks.blocks, peaks.blocks + count);
    std::nth_element(near.begin(), near.begin() + (k - 1), near.end(), std::greater<float>());
    return near[static_cast<std::size_t>(k - 1)];
}

// The k first of n tokens in order, as a heap with the last of them at its front.
void first_in_order(const Kernels& kernels, const Peaks& peaks, int64_t n, int64_t k,
                    std::vector<Candidate>& heap) {
    heap.clear();
    float least = -kInfinity;
    const float bound = bound_of(peaks, n, k);
    each_block(n, [&](int64_t block, int64_t first, int64_t count) {
        if (peaks.blocks[block] < bound) return;
        const float* const logits = peaks.places[block];
        int64_t i = 0;
        for (; i < count && static_cast<int64_t>(heap.size()) < k; ++i) {
            heap.push_back({logits[i], static_cast<int32_t>(first + i), 0});
            std::push_heap(heap.begin(), heap.end(), is_before);
            least = heap.front().logit;
        }
        if (!(peaks.blocks[block] > least)) return;
        while (i < count) {
            const int64_t end = std::min(i + kStretch, count);
            if (!(kernels.peak(logits + i, end - i) > least)) i = end;
            for (; i < end; ++i) {
                if (!(logits[i] > least)) continue;  // of equals, those there are the lower ones
                std::pop_heap(heap.begin(), heap.end(), is_before);
                heap.back() = {logits[i], static_cast<int32_t>(first + i), 0};
                std::push_heap(heap.begin(), heap.end(), is_before);
                least = heap.front().logit;
            }
        }
    });
}

// Tells the k likeliest of n tokens, best first.
template <class Logprob>
void add_likeliest(const Kernels& kernels, const Peaks& peaks, int64_t n, int64_t k, const Logprob& logprob,
                   Answer& answer) {
    std::vector<Candidate>& top = scratch().order;
    first_in_order(kernels, peaks, n, k, top);
    std::sort_heap(top.begin(), top.end(), is_before);
    for (const Candidate& each : top) answer.top.emplace_back(each.id, logprob(each.logit));
}

// Draws from the beginning of the order of the candidates, which lie by their ids: `most` of them at
// most, and none that those before it weigh `enough` without.
int64_t drawn_in_order(double uniform, int64_t most, double enough) {
    const std::vector<Candidate>& candidates = scratch().candidates;
    std::vector<Candidate>& order = scratch().order;
    order = candidates;
    // The last that is kept, by halves: those before the middle one tell whether that is.
    int64_t before = 0, first = 0, end = static_cast<int64_t>(order.size());
    while (first < end) {
        const int64_t middle = first + (end - first) / 2;
        std::nth_element(order.begin() + first, order.begin() + middle, order.begin() + end,
                         is_before);
        int64_t sum = before;
        for (int64_t i = first; i < middle; ++i) sum += order[static_cast<std::size_t>(i)].weight;
        if (middle < most && static_cast<double>(sum) < enough) {
            before = sum + order[static_cast<std::size_t>(middle)].weight;
            first = middle + 1;
        } else {
            end = middle;
        }
    }
    const Candidate last = order[static_cast<std::size_t>(first - 1)];
    int64_t target = target_of(before, uniform);
    for (const Candidate& each : candidates) {
        if (is_before(last, each)) continue;
        if (target < each.weight) return each.id;
        target -= each.weight;
    }
    return last.id;
}

// As `scale_bits` in Python: all weights add up to below 2^62.
int bits_of(int64_t vocab_size) {
    int length = 0;
    for (; vocab_size; vocab_size >>= 1) ++length;
    return std::min(52, 62 - length);
}

}  // namespace

Drawer::Drawer(const Kernels& kernels, int num_threads, int64_t vocab_size)
    : kernels_(kernels),
      num_threads_(std::max(1, num_threads)),
      vocab_size_(vocab_size),
      bits_(bits_of(vocab_size)) {}

void Drawer::draw(const Row* rows, int64_t count, double floor, Drawn* out) {
    if (count <= kFewRows) {
        for (int64_t i = 0; i < count; ++i) out[i] = draw_one(rows[i], floor);
        return;
    }
    own_pool(num_threads_).each(count, [&](int64_t i) { out[i] = draw_one(rows[i], floor); });
}

void Drawer::describe(const Question* rows, int64_t count, double floor, Answer* out) {
    if (count <= kFewRows) {
        for (int64_t i = 0; i < count; ++i) out[i] = describe_one(rows[i], floor);
        return;
    }
    own_pool(num_threads_).each(count, [&](int64_t i) { out[i] = describe_one(rows[i], floor); });
}

Drawn Drawer::draw_one(const Row& row, double floor) const {
    const Peaks peaks = peaks_of(row);
    if (!std::isfinite(peaks.all)) return {0, peaks.all, {}};
    Drawn drawn = drawn_from(row, peaks);
    if (row.num_top < 0) return drawn;
    if (!row.mask && !row.num_suppressed) {
        drawn.told = told_of(row, peaks, drawn.token_id, floor);
        return drawn;
    }
    Row all{};
    all.logits = row.logits;
    all.num_top = row.num_top;
    drawn.told = told_of(all, peaks_of(all), drawn.token_id, floor);
    return drawn;
}

Drawn Drawer::drawn_from(const Row& row, const Peaks& peaks) const {
    if (row.temperature == 0) {
        int64_t block = 0, place = 0;
        while (peaks.blocks[block] != peaks.all) ++block;
        while (peaks.places[block][place] != peaks.all) ++place;
        return {block * kBlock + place, peaks.all, {}};
    }
    const bool takes_all =
        row.top_p >= 1 && row.min_p <= 0 && (row.top_k <= 0 || row.top_k >= vocab_size_);
    return {takes_all ? drawn_from_all(row, peaks) : drawn_from_some(row, peaks), peaks.all, {}};
}

// The sums of blocks are in single precision, that of all in double.
Answer Drawer::told_of(const Row& row, const Peaks& peaks, int64_t token_id, double floor) const {
    Answer answer;
    answer.is_distribution = std::isfinite(peaks.all);
    if (!answer.is_distribution) return answer;
    double total = 0;
    each_block(vocab_size_, [&](int64_t block, int64_t, int64_t count) {
        if (peaks.blocks[block] - peaks.all > kFar) {
            total += kernels_.total(peaks.places[block], count, peaks.all);
        }
    });
    const double norm = std::log(total);
    const auto logprob = [&](float logit) {
        return std::min(0.0, std::max(floor, static_cast<double>(logit) - peaks.all - norm));
    };
    answer.logprobs.push_back(logprob(row.logits[token_id]));
    if (row.num_top > 0) add_likeliest(kernels_, peaks, vocab_size_, row.num_top, logprob, answer);
    return answer;
}

// The weights of a row add up to the same in any order, as do those that are drawn from.
Answer Drawer::describe_one(const Question& row, double floor) const {
    Row all{};
    all.logits = row.logits;
    const Peaks peaks = peaks_of(all);
    Answer answer;
    answer.is_distribution = std::isfinite(peaks.all);
    if (!answer.is_distribution) return answer;
    int64_t* const sums = room(scratch().sums, num_blocks(vocab_size_));
    const int64_t total = add_weights(peaks, 1.0, sums);
    const double norm = std::log(std::ldexp(static_cast<double>(total), -bits_));
    const auto logprob = [&](float logit) {
        return std::max(floor, static_cast<double>(logit) - peaks.all - norm);
    };
    for (int64_t token : row.targets) answer.logprobs.push_back(logprob(row.logits[token]));
    if (row.num_top > 0) add_likeliest(kernels_, peaks, vocab_size_, row.num_top, logprob, answer);
    return answer;
}

// Where a token is forbidden stands -inf: in a copy of all logits if there is a mask, and otherwise of
// the blocks with suppressed tokens only.
Peaks Drawer::peaks_of(const Row& row) const {
    Scratch& own = scratch();
    const float** const places = room(own.places, num_blocks(vocab_size_));
    float* const copies =
        row.mask || row.num_suppressed ? room(own.logits, vocab_size_) : nullptr;
    each_block(vocab_size_, [&](int64_t block, int64_t first, int64_t count) {
        places[block] = row.mask ? copies + first : row.logits + first;
        if (row.mask) kernels_.allow(row.logits + first, row.mask + first, count, copies + first);
    });
    for (int64_t i = 0; i < row.num_suppressed; ++i) {
        const int64_t token = row.suppressed[i];
        if (token < 0 || token >= vocab_size_) continue;
        const int64_t block = token / kBlock, first = block * kBlock;
        if (places[block] != copies + first) {
            std::copy_n(places[block], std::min(kBlock, vocab_size_ - first), copies + first);
            places[block] = copies + first;
        }
        copies[token] = -kInfinity;
    }
    float* const blocks = room(own.peaks, num_blocks(vocab_size_));
    float all = -kInfinity;
    bool is_nan = false;
    each_block(vocab_size_, [&](int64_t block, int64_t, int64_t count) {
        const float peak = blocks[block] = kernels_.peak(places[block], count);
        all = std::max(all, peak);  // which leaves it as it is for a NaN
        is_nan |= std::isnan(peak);
    });
    return {places, blocks, is_nan ? std::numeric_limits<float>::quiet_NaN() : all};
}

// The sum of all weights, and those of each block.
int64_t Drawer::add_weights(const Peaks& peaks, double temperature, int64_t* sums) const {
    int64_t weights[kBlock];
    int64_t total = 0;
    each_block(vocab_size_, [&](int64_t block, int64_t, int64_t count) {
        int64_t sum = 0;
        const double nearest = static_cast<double>(peaks.blocks[block]) - peaks.all;
        if (nearest / temperature > kFar) {
            kernels_.weigh(peaks.places[block], count, peaks.all, temperature, bits_, weights);
            for (int64_t i = 0; i < count; ++i) sum += weights[i];
        }
        sums[block] = sum;
        total += sum;
    });
    return total;
}

int64_t Drawer::drawn_from_all(const Row& row, const Peaks& peaks) const {
    int64_t* const sums = room(scratch().sums, num_blocks(vocab_size_));
    int64_t target = target_of(add_weights(peaks, row.temperature, sums), row.uniform);
    int64_t block = 0;
    while (target >= sums[block]) target -= sums[block++];
    const int64_t first = block * kBlock;
    int64_t weights[kBlock];
    kernels_.weigh(peaks.places[block], std::min(kBlock, vocab_size_ - first), peaks.all,
                   row.temperature, bits_, weights);
    int64_t place = 0;
    while (target >= weights[place]) target -= weights[place++];
    return first + place;
}

// Top-p and min-p are measured on the distribution of all tokens, top-k on its order (of equals, the
// lower id first): all three keep a beginning of that order.
int64_t Drawer::drawn_from_some(const Row& row, const Peaks& peaks) const {
    const int64_t n = vocab_size_;
    const int64_t most = row.top_k > 0 ? std::min(row.top_k, n) : n;
    float floor = -kInfinity;
    if (most < n && most <= kFewKept) {
        first_in_order(kernels_, peaks, n, most, scratch().order);
        floor = scratch().order.front().logit;
    }
    const double least = std::max(1.0, std::ceil(std::ldexp(row.min_p, bits_)));
    if (row.top_p >= 1) {
        gather(row, peaks, least, least, floor);
        return drawn_in_order(row.uniform, most, std::numeric_limits<double>::infinity());
    }
    int64_t* const sums = room(scratch().sums, num_blocks(n));
    const auto total = static_cast<double>(add_weights(peaks, row.temperature, sums));
    const double enough = row.top_p * total;
    // Tokens lighter than a V-th of what top-p leaves out weigh less than that together, so the
    // heavier ones already reach top_p. As a rule far heavier ones do, of which there are few.
    for (int64_t parts = kFirstParts;; parts *= kMoreParts) {
        const double lightest =
            std::floor((1.0 - row.top_p) * total / static_cast<double>(std::min(parts, n)));
        const int64_t weight = gather(row, peaks, least, std::max(least, lightest), floor);
        const bool has_most = static_cast<int64_t>(scratch().candidates.size()) >= most;
        if (has_most || parts >= n || static_cast<double>(weight) >= enough) break;
    }
    return drawn_in_order(row.uniform, most, enough);
}

// Makes candidates of the tokens that weigh `least` and more, of these all whose logit is `floor` or
// more and whose weight is `lightest` or more, and perhaps the next ones in order. Their weight.
int64_t Drawer::gather(const Row& row, const Peaks& peaks, double least, double lightest,
                       float floor) const {
    Scratch& own = scratch();
    // What weighs so much is no further from the likeliest: weights are worked out for few.
    const double furthest = std::log(std::ldexp(lightest - 0.5, -bits_)) * 1.000001 - 1e-13;
    const double lowest = std::max(static_cast<double>(floor),
                                   peaks.all + row.temperature * furthest - 1e-6);
    own.near.clear();
    own.candidates.clear();
    each_block(vocab_size_, [&](int64_t block, int64_t first, int64_t count) {
        if (static_cast<double>(peaks.blocks[block]) < lowest) return;
        const float* const logits = peaks.places[block];
        for (int64_t i = 0; i < count; ++i) {
            if (static_cast<double>(logits[i]) < lowest) continue;
            own.near.push_back(logits[i]);
            own.candidates.push_back({logits[i], static_cast<int32_t>(first + i), 0});
        }
    });
    const auto num_near = static_cast<int64_t>(own.near.size());
    int64_t* const weights = room(own.weights, num_near);
    kernels_.weigh(own.near.data(), num_near, peaks.all, row.temperature, bits_, weights);
    int64_t sum = 0;
    std::size_t count = 0;
    for (std::size_t i = 0; i < own.near.size(); ++i) {
        if (static_cast<double>(weights[i]) < least) continue;
        own.candidates[count] = own.candidates[i];
        own.candidates[count++].weight = weights[i];
        sum += weights[i];
    }
    own.candidates.resize(count);
    return sum;
}

}  // namespace palmette
