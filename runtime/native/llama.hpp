// A whole step of a model of the Llama family in one call.

#pragma once

#include <cstdint>
#include <vector>

#include "kernels.hpp"
#include "pool.hpp"

namespace palmette {

struct Shape {
    int64_t hidden, inner, num_heads, num_kv_heads, head_dim, vocab_rows;
    float epsilon;
    float query_scale;
};

struct Layer {
    const float* attention_norm;
    std::vector<Linear> query_key_value;  // all outputs in this order, in parts that are kept alike
    Linear attention_output;
    const float* mlp_norm;
    Linear gate_up;  // tiles of both in turn
    Linear down;
};

// Keys and values: for each layer [2][num_kv_heads][num_pages][page_size][head_dim], of which a page
// of a head is contiguous. Steps are in numbers.
struct Pages {
    uint8_t* data;
    int64_t num_pages, page_size;
    int64_t layer_step, head_step, page_step;
    bool is_bf16;
};

// One step: T rows of S sequences, as in `ForwardBatch`.
struct Batch {
    int64_t num_rows, num_sequences, num_logits, num_positions;
    const int64_t* token_ids;       // [T]
    const int64_t* positions;       // [T]
    const int64_t* slots;           // [T]
    const int64_t* query_starts;    // [S + 1]
    const int64_t* context_lengths; // [S]
    const int64_t* pages;           // of all sequences, one after the other
    const int64_t* first_pages;     // [S + 1], where those of each begin
    const int64_t* logit_rows;      // [R], ascending
    const float* cosines;           // [num_positions][head_dim / 2]
    const float* sines;
};

class Llama {
public:
    // `is_exact`: nothing is rounded that need not be.
    Llama(const Shape& shape, const Kernels& kernels, bool is_exact, int num_threads);

    // Both throw std::invalid_argument for a weight that the kernels cannot multiply.
    void add(const Layer& layer);
    void finish(const float* final_norm, const Linear& embedding, const Linear& head);

    // Logits [R][outputs of the head] of the rows that are wanted; keys and values go into the pages. Throws
    // std::invalid_argument for a batch that is none. One caller at a time.
    void forward(const Batch& batch, const Pages& pages, float* logits);

    int num_threads() const { return num_threads_; }

private:
    void check_kind(const Linear& linear) const;
    void check_ranges(const Batch& batch, const Pages& pages) const;
    // `next`: what is multiplied after it, or null.
    void multiply(const Linear& linear, const Rows& input, int64_t rows, float* y, int64_t ldy,
                  Ending ending, const Linear* next);
    Input takes(const Linear& linear) const { return takes_[static_cast<int>(linear.format)]; }
    Rows normalized(const float* x, const float* weight, int64_t rows, const Linear& next);
    Rows taken(const float* x, int64_t rows, const Linear& next);
    Rows completed(int64_t rows, const Linear& next);
    void place(const Batch& batch, const Pages& pages, int64_t layer);
    void attend(const Batch& batch, const Pages& pages, int64_t layer);
    template <class Work> void rows(int64_t count, int64_t cost, const Work& work);

    Shape shape_;
    const Kernels& kernels_;
    const Input* takes_;
    int num_threads_;
    Pool* pool_ = nullptr;  // the caller's, while it is here
    std::vector<Layer> layers_;
    const float* final_norm_ = nullptr;
    Linear embedding_{}, head_{};
    std::vector<float> hidden_, heads_, attended_, gated_, sums_, stretches_;
    std::vector<float> normal_;  // rows before they are taken as a product takes them
    std::vector<float> input_;   // as it takes them
};

}  // namespace palmette
