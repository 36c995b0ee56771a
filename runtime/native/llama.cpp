#include "llama.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "packing.hpp"

namespace palmette {

namespace {

constexpr int64_t kSerial = 1 << 14;  // numbers that are not worth a second thread
constexpr int64_t kItems = 8;         // parts of a product for each thread, at most
constexpr int64_t kFetched = 1 << 15;  // bytes of the next weight that each thread fetches

int64_t pairs_of(const Linear& linear) { return (linear.n / kTile + 1) / 2; }

// Whether each of `count` numbers is at least 0 and below `end`.
bool are_below(const int64_t* numbers, int64_t count, int64_t end) {
    for (int64_t i = 0; i < count; ++i)
        if (numbers[i] < 0 || numbers[i] >= end) return false;
    return true;
}

void check(bool is_right, const char* what) {
    if (!is_right) throw std::invalid_argument(std::string("a batch with ") + what);
}

}  // namespace

Llama::Llama(const Shape& shape, const Kernels& kernels, bool is_exact, int num_threads)
    : shape_(shape),
      kernels_(kernels),
      takes_(is_exact ? kernels.exact : kernels.takes),
      num_threads_(std::max(1, num_threads)) {}

void Llama::check_kind(const Linear& linear) const {
    if (linear.format == Format::b12 && !kernels_.has_b12)
        throw std::invalid_argument("the kernels have no products of this format");
}

void Llama::add(const Layer& layer) {
    for (const Linear& part : layer.query_key_value) check_kind(part);
    for (const Linear* each : {&layer.attention_output, &layer.gate_up, &layer.down}) check_kind(*each);
    layers_.push_back(layer);
}

void Llama::finish(const float* final_norm, const Linear& embedding, const Linear& head) {
    check_kind(head);
    final_norm_ = final_norm;
    embedding_ = embedding;
    head_ = head;
}

template <class Work> void Llama::rows(int64_t count, int64_t cost, const Work& work) {
    if (count * cost <= kSerial || num_threads_ == 1) {
        for (int64_t row = 0; row < count; ++row) work(row);
        return;
    }
    const int64_t parts = std::min<int64_t>(count, num_threads_ * 4);
    pool_->each(parts, [&](int64_t part) {
        const int64_t end = count * (part + 1) / parts;
        for (int64_t row = count * part / parts; row < end; ++row) work(row);
    });
}

void Llama::multiply(const Linear& linear, const Rows& input, int64_t rows, float* y, int64_t ldy,
                     Ending ending, const Linear* next) {
    // Parts are pairs of tiles: a gate and what it gates stay together.
    const int64_t threads = num_threads_, pairs = pairs_of(linear);
    const int64_t parts = std::min(pairs, threads * kItems);
    pool_->each_in_ranges(
        parts,
        [&](int64_t part) {
            const int64_t first = pairs * part / parts * 2;
            const int64_t last = std::min(pairs * (part + 1) / parts * 2, linear.n / kTile);
            kernels_.multiply(linear, input, rows, y, ldy, first, last, ending);
        },
        [&](int thread) {
            if (!next) return;
            // What this thread reads first then, while others are still at work: tiles fetch those
            // behind them, but these are behind none.
            const int64_t pair = pairs_of(*next) * thread / threads;
            const uint8_t* const from = next->weight + pair * 2 * next->tile_size;
            const int64_t size = std::min(2 * next->tile_size, kFetched);
            for (int64_t line = 0; line < size; line += 64) __builtin_prefetch(from + line);
        });
}

Rows Llama::normalized(const float* x, const float* weight, int64_t count, const Linear& next) {
    const int64_t n = next.k;
    const Input input = takes(next);
    const bool is_bf16 = input == Input::bf16, is_ready = is_bf16 || input == Input::f32;
    auto* out = reinterpret_cast<uint8_t*>(is_ready ? input_.data() : normal_.data());
    const int64_t size = is_bf16 ? 2 : 4;
    rows(count, n, [&](int64_t row) {
        kernels_.normalize(x + row * n, weight, shape_.epsilon, n, out + row * n * size, is_bf16);
    });
    return is_ready ? completed(count, next) : taken(normal_.data(), count, next);
}

// Rows as a product with the weight takes them.
Rows Llama::taken(const float* x, int64_t count, const Linear& next) {
    const int64_t n = next.k;
    const Input input = takes(next);
    auto* const out = reinterpret_cast<uint8_t*>(input_.data());
    if (input == Input::f32) {
        std::memcpy(out, x, sizeof(float) * static_cast<size_t>(count * n));
        return completed(count, next);
    }
    rows(count, n, [&](int64_t row) {
        const float* const from = x + row * n;
        void* const to = out + row * n * size_of(input);
        float* const sums = sums_.data() + row * num_sums(input, n);
        if (input == Input::bf16) {
            kernels_.round(from, n, static_cast<uint16_t*>(to));
        } else if (input == Input::i16) {
            kernels_.quantise(from, n, static_cast<int16_t*>(to), sums);
        } else {
            kernels_.quantise_bytes(from, n, static_cast<int8_t*>(to), reinterpret_cast<Bytes32*>(sums));
        }
    });
    return completed(count, next);
}

// What is in `input_`, with its sums where the weight asks for them.
Rows Llama::completed(int64_t count, const Linear& next) {
    const int64_t n = next.k;
    const Input input = takes(next);
    if (has_offsets(next.format) && input == Input::f32) {
        rows(count, n, [&](int64_t row) {
            kernels_.sum_blocks(input_.data() + row * n, n, sums_.data() + row * (n / 32));
        });
    }
    return {input_.data(), n, input, sums_.data()};
}

// Turns queries and keys to their positions, and puts keys and values where they belong.
void Llama::place(const Batch& batch, const Pages& pages, int64_t layer) {
    const int64_t dim = shape_.head_dim, half_dim = dim / 2;
    const int64_t num_all = shape_.num_heads + 2 * shape_.num_kv_heads;
    const int64_t size = pages.is_bf16 ? 2 : 4;
    uint8_t* const base = pages.data + layer * pages.layer_step * size;
    rows(batch.num_rows, num_all * dim, [&](int64_t row) {
        float* head = heads_.data() + row * num_all * dim;
        const float* cosines = batch.cosines + batch.positions[row] * half_dim;
        const float* sines = batch.sines + batch.positions[row] * half_dim;
        const int64_t page = batch.slots[row] / pages.page_size;
        const int64_t within = batch.slots[row] % pages.page_size;
        uint8_t* to = base + (page * pages.page_step + within * dim) * size;
        for (int64_t i = 0; i < shape_.num_heads; ++i, head += dim) {
            kernels_.turn(head, dim, cosines, sines);
            for (int64_t d = 0; d < dim; ++d) head[d] *= shape_.query_scale;
        }
        for (int64_t i = 0; i < 2 * shape_.num_kv_heads; ++i, head += dim) {
            if (i < shape_.num_kv_heads) kernels_.turn(head, dim, cosines, sines);
            if (pages.is_bf16) {
                kernels_.round(head, dim, reinterpret_cast<uint16_t*>(to));
            } else {
                std::memcpy(to, head, sizeof(float) * static_cast<size_t>(dim));
            }
            to += pages.head_step * size;
        }
    });
}

void Llama::attend(const Batch& batch, const Pages& pages, int64_t layer) {
    const int64_t num_all = shape_.num_heads + 2 * shape_.num_kv_heads, dim = shape_.head_dim;
    const int64_t size = pages.is_bf16 ? 2 : 4;
    const uint8_t* keys = pages.data + layer * pages.layer_step * size;
    const uint8_t* values = keys + shape_.num_kv_heads * pages.head_step * size;
    struct Part {
        Span span;
        int64_t kv_head;  // the first one
        int64_t first, last;
        int64_t stretch;  // or -1: all
        int64_t place;    // of what the stretch comes to
    };
    struct Split {
        int64_t first_row, num_heads, num_stretches, place;
    };
    const int64_t step =
        std::max<int64_t>(1, kMaxQueriesTogether / (shape_.num_heads / shape_.num_kv_heads));
    int64_t num_groups = 0;
    for (int64_t s = 0; s < batch.num_sequences; ++s) {
        const int64_t count = batch.query_starts[s + 1] - batch.query_starts[s];
        num_groups += (count + step - 1) / step;
    }
    // Few parts would leave threads without work.
    const int64_t enough = num_threads_ * kItems;
    const bool may_split = num_threads_ > 1 && num_groups * shape_.num_kv_heads < enough;
    const bool in_order = num_groups >= enough || num_threads_ == 1;
    const Heads heads{shape_.num_heads, shape_.num_kv_heads, dim,           pages.page_size,
                      pages.head_step,  pages.page_step,     pages.is_bf16, in_order};
    const int64_t heads_each = in_order ? heads.num_kv_heads : 1;
    std::vector<Part> parts;
    std::vector<Split> splits;
    int64_t room = 0;
    for (int64_t s = 0; s < batch.num_sequences; ++s) {
        const int64_t start = batch.query_starts[s], count = batch.query_starts[s + 1] - start;
        const int64_t length = batch.context_lengths[s];
        const Span span{start, count, length, batch.pages + batch.first_pages[s]};
        const auto add = [&](int64_t stretch, int64_t place) {
            for (int64_t first = 0; first < count; first += step) {
                const int64_t last = std::min(count, first + step);
                for (int64_t head = 0; head < heads.num_kv_heads; head += heads_each)
                    parts.push_back({span, head, first, last, stretch, place});
            }
        };
        const int64_t num_stretches = (length + kStretch - 1) / kStretch;
        if (!may_split || num_stretches == 1) {
            add(-1, 0);
            continue;
        }
        splits.push_back({start, count * heads.num_heads, num_stretches, room});
        for (int64_t stretch = 0; stretch < num_stretches; ++stretch) {
            add(stretch, room);
            room += count * heads.num_heads * stretch_size(dim);
        }
    }
    if (stretches_.size() < static_cast<size_t>(room)) stretches_.resize(static_cast<size_t>(room));
    pool_->each(static_cast<int64_t>(parts.size()), [&](int64_t i) {
        const Part& part = parts[static_cast<size_t>(i)];
        for (int64_t head = part.kv_head; head < part.kv_head + heads_each; ++head) {
            if (part.stretch < 0) {
                kernels_.attend(heads, part.span, head, part.first, part.last, heads_.data(),
                                num_all * dim, keys, values, attended_.data(),
                                shape_.num_heads * dim);
            } else {
                kernels_.attend_stretch(heads, part.span, head, part.first, part.last,
                                        part.stretch, heads_.data(), num_all * dim, keys, values,
                                        stretches_.data() + part.place);
            }
        }
    });
    for (const Split& split : splits) {
        const int64_t size = stretch_size(dim);
        rows(split.num_heads, split.num_stretches * dim, [&](int64_t i) {
            kernels_.conclude(heads, stretches_.data() + split.place + i * size,
                              split.num_heads * size, split.num_stretches,
                              attended_.data() + (split.first_row * heads.num_heads + i) * dim);
        });
    }
}

// What is out of range would be read or written out of bounds.
void Llama::check_ranges(const Batch& batch, const Pages& pages) const {
    const int64_t t = batch.num_rows, s = batch.num_sequences;
    check(t > 0 && s > 0, "no rows");
    check(are_below(batch.token_ids, t, shape_.vocab_rows), "an unknown token");
    check(are_below(batch.positions, t, batch.num_positions), "a position beyond the table");
    check(are_below(batch.slots, t, pages.num_pages * pages.page_size), "a slot outside the pool");
    check(are_below(batch.logit_rows, batch.num_logits, t), "logits of a row that is not there");
    for (int64_t r = 1; r < batch.num_logits; ++r)
        check(batch.logit_rows[r - 1] < batch.logit_rows[r], "rows of logits out of order");
    check(batch.query_starts[0] == 0 && batch.query_starts[s] == t, "rows of no sequence");
    for (int64_t i = 0; i < s; ++i) {
        const int64_t count = batch.query_starts[i + 1] - batch.query_starts[i];
        const int64_t length = batch.context_lengths[i];
        check(count > 0 && length >= count, "a context shorter than its rows");
        const int64_t num_pages = batch.first_pages[i + 1] - batch.first_pages[i];
        check(num_pages * pages.page_size >= length, "fewer pages than its context needs");
    }
    check(are_below(batch.pages, batch.first_pages[s], pages.num_pages), "an unknown page");
}

void Llama::forward(const Batch& batch, const Pages& pages, float* logits) {
    check_ranges(batch, pages);
    pool_ = &own_pool(num_threads_);
    const int64_t t = batch.num_rows, h = shape_.hidden, dim = shape_.head_dim;
    const int64_t q = shape_.num_heads * dim, all = q + 2 * shape_.num_kv_heads * dim;
    const int64_t widest = std::max({h, q, shape_.inner});
    const auto room = [](std::vector<float>& vector, int64_t count) {
        if (vector.size() < static_cast<size_t>(count)) vector.resize(static_cast<size_t>(count));
    };
    room(hidden_, t * h);
    room(heads_, t * all);
    room(attended_, t * q);
    room(gated_, t * shape_.inner);
    room(normal_, t * h);
    room(input_, t * widest);
    room(sums_, t * widest / 8);
    rows(t, h, [&](int64_t row) {
        read_row(embedding_, batch.token_ids[row], hidden_.data() + row * h);
    });
    int64_t count = t;
    for (size_t i = 0; i < layers_.size(); ++i) {
        const Layer& layer = layers_[i];
        const auto at = static_cast<int64_t>(i);
        const bool is_last = i + 1 == layers_.size();
        int64_t first = 0;
        for (const Linear& part : layer.query_key_value) {
            first += part.n;
            multiply(part, normalized(hidden_.data(), layer.attention_norm, t, part), t,
                     heads_.data() + first - part.n, all, Ending::set,
                     first < all ? &part + 1 : &layer.attention_output);
        }
        place(batch, pages, at);
        attend(batch, pages, at);
        if (is_last) {  // what follows concerns each row alone
            count = batch.num_logits;
            for (int64_t r = 0; r < count; ++r) {  // ascending, so that none is overwritten
                const int64_t row = batch.logit_rows[r];
                std::memmove(hidden_.data() + r * h, hidden_.data() + row * h,
                             sizeof(float) * static_cast<size_t>(h));
                std::memmove(attended_.data() + r * q, attended_.data() + row * q,
                             sizeof(float) * static_cast<size_t>(q));
            }
        }
        multiply(layer.attention_output, taken(attended_.data(), count, layer.attention_output),
                 count, hidden_.data(), h, Ending::add, &layer.gate_up);
        multiply(layer.gate_up, normalized(hidden_.data(), layer.mlp_norm, count, layer.gate_up),
                 count, gated_.data(), shape_.inner, Ending::gated, &layer.down);
        multiply(layer.down, taken(gated_.data(), count, layer.down), count, hidden_.data(), h,
                 Ending::add, is_last ? &head_ : &layers_[i + 1].query_key_value.front());
    }
    multiply(head_, normalized(hidden_.data(), final_norm_, count, head_), count, logits,
             head_.n, Ending::set, nullptr);
}

}  // namespace palmette
