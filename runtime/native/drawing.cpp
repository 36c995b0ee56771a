#include "drawing.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace palmette {

namespace {

constexpr int64_t kFewRows = 2;    // are not worth other threads
constexpr int64_t kFewKept = 1024;  // of the largest are kept in a heap

// What a thread works with, kept from row to row.
struct Scratch {
    std::vector<float> logits, largest, candidates;
    std::vector<int64_t> weights, ids, order;
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

// The place in a list of weights where their sum passes the drawn share of all of them.
int64_t place_of(const int64_t* weights, int64_t count, int64_t total, double uniform) {
    // The product may round up to the total itself, which is one past the last.
    const int64_t target =
        std::min(static_cast<int64_t>(uniform * static_cast<double>(total)), total - 1);
    int64_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
        sum += weights[i];
        if (sum > target) return i;
    }
    return count - 1;
}

// The k-th largest of n numbers.
float kth_largest(const float* x, int64_t n, int64_t k, std::vector<float>& largest) {
    if (k > kFewKept) {
        largest.assign(x, x + n);
        std::nth_element(largest.begin(), largest.begin() + (k - 1), largest.end(),
                         std::greater<>());
        return largest[static_cast<std::size_t>(k - 1)];
    }
    largest.assign(x, x + k);
    std::make_heap(largest.begin(), largest.end(), std::greater<>());
    for (int64_t i = k; i < n; ++i) {
        if (!(x[i] > largest.front())) continue;
        std::pop_heap(largest.begin(), largest.end(), std::greater<>());
        largest.back() = x[i];
        std::push_heap(largest.begin(), largest.end(), std::greater<>());
    }
    return largest.front();
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
      pool_(num_threads),
      vocab_size_(vocab_size),
      bits_(bits_of(vocab_size)) {}

void Drawer::draw(const Row* rows, int64_t count, Drawn* out) {
    if (count <= kFewRows) {
        for (int64_t i = 0; i < count; ++i) out[i] = draw_one(rows[i]);
        return;
    }
    pool_.each(count, [&](int64_t i) { out[i] = draw_one(rows[i]); });
}

Drawn Drawer::draw_one(const Row& row) const {
    const int64_t n = vocab_size_;
    const float* logits = row.logits;
    if (row.mask || row.num_suppressed) {
        float* const allowed = room(scratch().logits, n);
        if (row.mask) {
            kernels_.allow(logits, row.mask, n, allowed);
        } else {
            std::copy(logits, logits + n, allowed);
        }
        for (int64_t i = 0; i < row.num_suppressed; ++i) {
            const int64_t token = row.suppressed[i];
            if (token >= 0 && token < n) allowed[token] = -std::numeric_limits<float>::infinity();
        }
        logits = allowed;
    }
    const float peak = kernels_.peak(logits, n);
    if (!std::isfinite(peak)) return {0, peak};
    if (row.temperature == 0) return {std::find(logits, logits + n, peak) - logits, peak};
    const bool takes_all =
        row.top_p >= 1 && row.min_p <= 0 && (row.top_k <= 0 || row.top_k >= n);
    return {takes_all ? drawn_from_all(row, logits, peak) : drawn_from_some(row, logits, peak),
            peak};
}

int64_t Drawer::drawn_from_all(const Row& row, const float* logits, float peak) const {
    int64_t* const weights = room(scratch().weights, vocab_size_);
    kernels_.weigh(logits, vocab_size_, peak, row.temperature, bits_, weights);
    int64_t total = 0;
    for (int64_t i = 0; i < vocab_size_; ++i) total += weights[i];
    return place_of(weights, vocab_size_, total, row.uniform);
}

// Top-p and min-p are measured on the distribution of all tokens, top-k on its order (of equals, the
// lower id first): all three keep a beginning of that order.
int64_t Drawer::drawn_from_some(const Row& row, const float* logits, float peak) const {
    Scratch& own = scratch();
    const int64_t n = vocab_size_;
    const bool has_top_k = row.top_k > 0 && row.top_k < n;
    const double one = std::ldexp(1.0, bits_);
    double least = std::max(1.0, std::ceil(row.min_p * one));
    int64_t total = 0;
    int64_t* const weights = room(own.weights, 2 * n);
    if (row.top_p < 1) {
        kernels_.weigh(logits, n, peak, row.temperature, bits_, weights);
        for (int64_t i = 0; i < n; ++i) total += weights[i];
        // Tokens lighter than a V-th of what top-p leaves out weigh less than that together, so
        // the heavier ones already reach top_p.
        least = std::max(least, std::floor((1.0 - row.top_p) * static_cast<double>(total) /
                                           static_cast<double>(n)));
    }
    const float floor = has_top_k ? kth_largest(logits, n, row.top_k, own.largest)
                                  : -std::numeric_limits<float>::infinity();
    // Candidates are found by their weights where these are known, else those are worked out for
    // the few that are near enough to the likeliest.
    const double lowest = peak + row.temperature * std::log((least - 0.5) / one) * 1.000001 - 1e-6;
    own.ids.clear();
    own.candidates.clear();
    for (int64_t i = 0; i < n; ++i) {
        if (logits[i] < floor || (total ? static_cast<double>(weights[i]) < least
                                        : static_cast<double>(logits[i]) < lowest)) {
            continue;
        }
        own.ids.push_back(i);
        own.candidates.push_back(logits[i]);
    }
    const auto count = static_cast<int64_t>(own.ids.size());
    // By place among the candidates from here on.
    kernels_.weigh(own.candidates.data(), count, peak, row.temperature, bits_, weights);
    own.order.resize(static_cast<std::size_t>(count));
    for (int64_t i = 0; i < count; ++i) own.order[static_cast<std::size_t>(i)] = i;
    const auto is_before = [&](int64_t a, int64_t b) {
        const float x = own.candidates[static_cast<std::size_t>(a)];
        const float y = own.candidates[static_cast<std::size_t>(b)];
        return x != y ? x > y : a < b;
    };
    std::sort(own.order.begin(), own.order.end(), is_before);
    int64_t before = 0, num_kept = 0;
    for (int64_t place : own.order) {
        const int64_t weight = weights[place];
        if (static_cast<double>(weight) < least || (has_top_k && num_kept == row.top_k)) break;
        if (row.top_p < 1 &&
            !(static_cast<double>(before) < row.top_p * static_cast<double>(total))) {
            break;
        }
        before += weight;
        ++num_kept;
    }
    own.order.resize(static_cast<std::size_t>(num_kept));
    std::sort(own.order.begin(), own.order.end());
    int64_t* const kept = weights + n;
    for (int64_t i = 0; i < num_kept; ++i) kept[i] = weights[own.order[static_cast<std::size_t>(i)]];
    const int64_t place = place_of(kept, num_kept, before, row.uniform);
    return own.ids[static_cast<std::size_t>(own.order[static_cast<std::size_t>(place)])];
}

}  // namespace palmette
