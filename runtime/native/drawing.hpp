// Drawing tokens from rows of logits.

#pragma once

#include <cstdint>

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
};

struct Drawn {
    int64_t token_id;
    float peak;  // the largest logit that is allowed; if it is not finite nothing was drawn
};

// Draws rows on several threads, each row on one, so that it comes to the same in any company. One
// caller at a time.
class Drawer {
public:
    Drawer(const Kernels& kernels, int num_threads, int64_t vocab_size);

    int64_t vocab_size() const { return vocab_size_; }

    void draw(const Row* rows, int64_t count, Drawn* out);

private:
    Drawn draw_one(const Row& row) const;
    int64_t drawn_from_all(const Row& row, const float* logits, float peak) const;
    int64_t drawn_from_some(const Row& row, const float* logits, float peak) const;

    const Kernels& kernels_;
    Pool pool_;
    int64_t vocab_size_;
    int bits_;
};

}  // namespace palmette
