// Drawing tokens from rows of logits, and log-probabilities.

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kernels.hpp"
#include "pool.hpp"

namespace palmette {

// What is drawn from, and how, as `palmette.runtime.sampling.distribution` has it.
struct Row {
    const float* logits;  // [vocabulary]
    const uint8_t* mask;  // [vocabulary], 0 where a token is forbidden; or null
    const int64_t* suppressed;
    int64_t num_suppressed;
    double temperature;  // 0: the likeliest
    double top_p, min_p;
    int64_t top_k;  // 0 or at least the vocabulary: all
    double uniform;
    int64_t num_top;  // of the likeliest are told with the drawn token; below 0: nothing
};

// Whose log-probabilities are wanted of a row, besides those of its `num_top` likeliest tokens.
struct Question {
    const float* logits;           // [vocabulary]
    std::vector<int64_t> targets;  // in the vocabulary
    int64_t num_top;               // at most the vocabulary
};

struct Answer {
    bool is_distribution = false;  // else the logits are not numbers, and nothing is known
    std::vector<double> logprobs;  // of the targets
    std::vector<std::pair<int64_t, double>> top;  // best first, of equals the lower id first
};

struct Drawn {
    int64_t token_id;
    float peak;   // the largest logit that is allowed; if it is not finite nothing was drawn
    Answer told;  // of the logits as they are, in single precision, if it is wanted
};

// The logits that a row draws from, in blocks, and the largest of each.
struct Peaks {
    const float* const* places;
    const float* blocks;
    float all;  // NaN if any is
};

// Works on rows on several threads, each row on one, so that it comes to the same in any company. One
// caller at a time.
class Drawer {
public:
    Drawer(const Kernels& kernels, int num_threads, int64_t vocab_size);

    int64_t vocab_size() const { return vocab_size_; }

    // `floor` for the log-probability of what is less likely.
    void draw(const Row* rows, int64_t count, double floor, Drawn* out);
    // Log-softmax of the logits as they are; `floor` for what is less likely.
    void describe(const Question* rows, int64_t count, double floor, Answer* out);

private:
    Drawn draw_one(const Row& row, double floor) const;
    Drawn drawn_from(const Row& row, const Peaks& peaks) const;
    Answer told_of(const Row& row, const Peaks& peaks, int64_t token_id, double floor) const;
    Answer describe_one(const Question& row, double floor) const;
    Peaks peaks_of(const Row& row) const;
    int64_t drawn_from_all(const Row& row, const Peaks& peaks) const;
    int64_t drawn_from_some(const Row& row, const Peaks& peaks) const;
    int64_t gather(const Row& row, const Peaks& peaks, double least, double lightest,
                   float floor) const;
    int64_t add_weights(const Peaks& peaks, double temperature, int64_t* sums) const;

    const Kernels& kernels_;
    int num_threads_;
    int64_t vocab_size_;
    int bits_;
};

}  // namespace palmette
