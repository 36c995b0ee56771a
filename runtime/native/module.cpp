// The kernels as Python sees them. Addresses are integers: whoever hands them over keeps what lies
// there alive, and contiguous.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "drawing.hpp"
#include "llama.hpp"
#include "packing.hpp"

namespace py = pybind11;

namespace palmette {
namespace {

template <class T> T* at(std::uintptr_t address) { return reinterpret_cast<T*>(address); }

// The kernels that this processor can run, the plainest first.
std::vector<const Kernels*> available() {
    std::vector<const Kernels*> found{&kernels_of_base};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return found;
    found.push_back(&kernels_of_avx2);
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
        return found;
    }
    found.push_back(&kernels_of_avx512);
    if (!__builtin_cpu_supports("avx512vnni")) return found;
    found.push_back(&kernels_of_avx512_vnni);
    if (__builtin_cpu_supports("avx512bf16")) found.push_back(&kernels_of_avx512_bf16);
#endif
    return found;
}

const Kernels& kernels_named(const std::string& name) {
    for (const Kernels* each : available())
        if (name == each->name) return *each;
    throw std::invalid_argument("this processor has no kernels named " + name);
}

Format format_of(int number) {
    if (number < 0 || number >= kNumFormats) throw std::invalid_argument("no such format");
    return static_cast<Format>(number);
}

// `tile_size`: as `tile_bytes` says.
Linear linear_of(std::uintptr_t weight, std::uintptr_t bias, int64_t n, int64_t k, int format,
                 int64_t tile_size) {
    if (n <= 0 || n % kTile || k <= 0 || k % 32) {
        throw std::invalid_argument("a linear map of " + std::to_string(k) + " inputs and " +
                                    std::to_string(n) + " outputs cannot be cut into tiles");
    }
    return {at<const uint8_t>(weight), at<const float>(bias), n, k, format_of(format), tile_size};
}

Source source_of(int number, int64_t n, int64_t k) {
    if (number < 0 || number >= kNumSources) throw std::invalid_argument("no such source");
    const auto source = static_cast<Source>(number);
    if (n % kTile || k % 32 || k % stride_of(source).numbers) {
        throw std::invalid_argument("a weight that is not whole blocks");
    }
    return source;
}

// The most numbers of any tile that are outside as b12 has them.
int64_t most_outside(int source, std::uintptr_t from, std::uintptr_t rows, int64_t n, int64_t k,
                     int num_threads) {
    const Source taken = source_of(source, n, k);
    if (taken != Source::f32 && taken != Source::bf16) {
        throw std::invalid_argument("blocks are no numbers of bfloat16");
    }
    const py::gil_scoped_release release;
    std::vector<int64_t> counts(static_cast<std::size_t>(n / kTile));
    Pool pool(num_threads);
    pool.each(n / kTile, [&](int64_t tile) {
        counts[static_cast<std::size_t>(tile)] =
            count_outside(taken, at<const uint8_t>(from), at<const int64_t>(rows) + tile * kTile, k);
    });
    return *std::max_element(counts.begin(), counts.end());
}

void pack_weight(int source, std::uintptr_t from, std::uintptr_t rows, int64_t n, int64_t k,
                 int format, int64_t tile_size, std::uintptr_t to, int num_threads) {
    const Source taken = source_of(source, n, k);
    if (!can_pack(taken, format_of(format))) {
        throw std::invalid_argument("a weight that does not go into this format");
    }
    const py::gil_scoped_release release;
    Pool pool(num_threads);
    pool.each(n / kTile, [&](int64_t tile) {
        pack(taken, at<const uint8_t>(from), at<const int64_t>(rows), k,
             static_cast<Format>(format), tile_size, at<uint8_t>(to), tile, tile + 1);
    });
}

Input input_of(const Kernels& kernels, Format format, bool is_exact) {
    return (is_exact ? kernels.exact : kernels.takes)[static_cast<int>(format)];
}

// Products of rows of float that are contiguous, on one thread, for tests and measurements.
void multiply(const std::string& name, bool is_exact, const Linear& linear, std::uintptr_t x,
              int64_t rows, std::uintptr_t y, int ending) {
    const Kernels& kernels = kernels_named(name);
    if (linear.format == Format::b12 && !kernels.has_b12) {
        throw std::invalid_argument(name + " has no products of this format");
    }
    const Input input = input_of(kernels, linear.format, is_exact);
    const auto end = static_cast<Ending>(ending);
    const py::gil_scoped_release release;
    const int64_t k = linear.k, num = num_sums(input, k);
    std::vector<float> sums(static_cast<std::size_t>(rows * num));
    std::vector<uint8_t> taken(static_cast<std::size_t>(rows * k * size_of(input)));
    for (int64_t row = 0; row < rows; ++row) {
        const float* const from = at<const float>(x) + row * k;
        void* const to = taken.data() + row * k * size_of(input);
        float* const own = sums.data() + row * num;
        switch (input) {
            case Input::f32:
                std::copy_n(from, k, static_cast<float*>(to));
                kernels.sum_blocks(from, k, own);
                break;
            case Input::bf16: kernels.round(from, k, static_cast<uint16_t*>(to)); break;
            case Input::i16: kernels.quantise(from, k, static_cast<int16_t*>(to), own); break;
            case Input::i8:
                kernels.quantise_bytes(from, k, static_cast<int8_t*>(to), reinterpret_cast<Bytes32*>(own));
                break;
        }
    }
    kernels.multiply(linear, {taken.data(), k, input, sums.data()}, rows, at<float>(y),
                     end == Ending::gated ? linear.n / 2 : linear.n, 0, linear.n / kTile, end);
}

std::unique_ptr<Llama> make_llama(const std::string& kernels, bool is_exact, int num_threads,
                                  int64_t hidden, int64_t inner, int64_t num_heads, int64_t num_kv_heads,
                                  int64_t head_dim, int64_t vocab_rows, float epsilon,
                                  float query_scale) {
    if (num_heads <= 0 || num_kv_heads <= 0 || num_heads % num_kv_heads ||
        num_heads / num_kv_heads > kMaxQueriesTogether || head_dim % 16 || head_dim > kMaxHeadDim) {
        throw std::invalid_argument("heads of a shape that is not supported");
    }
    const Shape shape{hidden,   inner,      num_heads, num_kv_heads,
                      head_dim, vocab_rows, epsilon,   query_scale};
    return std::make_unique<Llama>(shape, kernels_named(kernels), is_exact, num_threads);
}

// `numbers` are, one after the other: the ids of the tokens, their positions and their slots [T each],
// the rows whose logits are wanted [R], where the rows of each sequence begin [S + 1], the lengths of
// their contexts [S], where the pages of each begin [S + 1], and these pages.
void forward(Llama& self, int64_t num_rows, int64_t num_sequences, int64_t num_logits,
             const std::vector<int64_t>& numbers, int64_t num_positions,
             std::uintptr_t cosines, std::uintptr_t sines, std::uintptr_t pages, int64_t num_pages,
             int64_t page_size, int64_t layer_step, int64_t head_step, int64_t page_step,
             bool is_bf16, std::uintptr_t logits) {
    const int64_t num_before = 3 * num_rows + num_logits + 3 * num_sequences + 2;
    const auto size = static_cast<int64_t>(numbers.size());
    if (num_rows < 0 || num_sequences < 0 || num_logits < 0 || size < num_before ||
        size != num_before + numbers[static_cast<std::size_t>(num_before - 1)]) {
        throw std::invalid_argument("a batch with another number of numbers than it has to have");
    }
    const int64_t* const token_ids = numbers.data();
    const int64_t* const positions = token_ids + num_rows;
    const int64_t* const slots = positions + num_rows;
    const int64_t* const logit_rows = slots + num_rows;
    const int64_t* const query_starts = logit_rows + num_logits;
    const int64_t* const lengths = query_starts + num_sequences + 1;
    const int64_t* const first_pages = lengths + num_sequences;
    const Batch step{num_rows,
                     num_sequences,
                     num_logits,
                     num_positions,
                     token_ids,
                     positions,
                     slots,
                     query_starts,
                     lengths,
                     first_pages + num_sequences + 1,
                     first_pages,
                     logit_rows,
                     at<const float>(cosines),
                     at<const float>(sines)};
    const py::gil_scoped_release release;
    self.forward(
        step,
        {at<uint8_t>(pages), num_pages, page_size, layer_step, head_step, page_step, is_bf16},
        at<float>(logits));
}

// The tokens of rows, their peaks, and what is told of them: None, or the log-probability of the
// token with those of the likeliest ones. A row is (mask or None, suppressed ids, temperature, top_p,
// min_p, top_k, uniform, how many likeliest tokens are told or -1).
py::tuple draw(Drawer& self, std::uintptr_t logits, int64_t step, const py::list& told,
               double floor) {
    const std::size_t count = told.size();
    std::vector<Row> rows(count);
    std::vector<Drawn> drawn(count);
    std::vector<py::array_t<bool, py::array::c_style | py::array::forcecast>> masks;
    std::vector<std::vector<int64_t>> suppressed(count);
    for (std::size_t i = 0; i < count; ++i) {
        const auto row = told[i].cast<py::tuple>();
        const uint8_t* mask = nullptr;
        if (!row[0].is_none()) {
            masks.push_back(row[0].cast<decltype(masks)::value_type>());
            if (masks.back().size() < self.vocab_size()) {
                throw std::invalid_argument("a mask that is shorter than the vocabulary");
            }
            mask = reinterpret_cast<const uint8_t*>(masks.back().data());
        }
        for (const auto& token : row[1].cast<py::tuple>()) {
            suppressed[i].push_back(token.cast<int64_t>());
        }
        rows[i] = {at<const float>(logits) + static_cast<int64_t>(i) * step,
                   mask,
                   suppressed[i].data(),
                   static_cast<int64_t>(suppressed[i].size()),
                   row[2].cast<double>(),
                   row[3].cast<double>(),
                   row[4].cast<double>(),
                   row[5].cast<int64_t>(),
                   row[6].cast<double>(),
                   std::min(row[7].cast<int64_t>(), self.vocab_size())};
    }
    {
        const py::gil_scoped_release release;
        self.draw(rows.data(), static_cast<int64_t>(count), floor, drawn.data());
    }
    py::list token_ids(count), peaks(count), answers(count);
    for (std::size_t i = 0; i < count; ++i) {
        token_ids[i] = drawn[i].token_id;
        peaks[i] = drawn[i].peak;
        const Answer& each = drawn[i].told;
        if (each.is_distribution) {
            answers[i] = py::make_tuple(each.logprobs[0], each.top);
        } else {
            answers[i] = py::none();
        }
    }
    return py::make_tuple(token_ids, peaks, answers);
}

// For each row the log-probabilities of its targets, and the id and log-probability of each of its
// `num_top` likeliest tokens; None for a row that is no distribution.
py::list describe(Drawer& self, std::uintptr_t logits, int64_t step,
                  std::vector<std::vector<int64_t>> targets, const std::vector<int64_t>& num_top,
                  double floor) {
    const std::size_t count = targets.size();
    if (num_top.size() != count) throw std::invalid_argument("rows that do not say how many");
    std::vector<Question> rows(count);
    std::vector<Answer> answers(count);
    for (std::size_t i = 0; i < count; ++i) {
        for (const int64_t token : targets[i]) {
            if (token < 0 || token >= self.vocab_size()) {
                throw py::index_error("a token that is not in the vocabulary");
            }
        }
        rows[i] = {at<const float>(logits) + static_cast<int64_t>(i) * step, std::move(targets[i]),
                   std::min(num_top[i], self.vocab_size())};
    }
    {
        const py::gil_scoped_release release;
        self.describe(rows.data(), static_cast<int64_t>(count), floor, answers.data());
    }
    py::list found;
    for (const Answer& each : answers) {
        if (each.is_distribution) {
            found.append(py::make_tuple(each.logprobs, each.top));
        } else {
            found.append(py::none());
        }
    }
    return found;
}

}  // namespace
}  // namespace palmette

PYBIND11_MODULE(_native, m) {
    using namespace palmette;
    m.attr("MAX_HEADS_TOGETHER") = kMaxQueriesTogether;
    m.attr("MAX_HEAD_DIM") = kMaxHeadDim;
    m.def("available", [] {
        std::vector<std::string> names;
        for (const Kernels* each : available()) names.emplace_back(each->name);
        return names;
    });
    m.def("takes", [](const std::string& name, bool is_exact, int format) {
        const Input input = input_of(kernels_named(name), format_of(format), is_exact);
        return input == Input::f32    ? "float32"
               : input == Input::bf16 ? "bfloat16"
               : input == Input::i16  ? "int16"
                                      : "int8";
    });
    m.def("has_b12", [](const std::string& name) { return kernels_named(name).has_b12; });
    m.def("tile_bytes", [](int format, int64_t k, int64_t num_outside) {
        return tile_bytes(format_of(format), k, num_outside);
    });
    m.def("most_outside", &most_outside);
    m.def("pack", &pack_weight);
    m.def("multiply", &multiply);
    m.def("read_row", [](const Linear& linear, int64_t index, std::uintptr_t out) {
        if (index < 0 || index >= linear.n) throw py::index_error("no such row");
        read_row(linear, index, at<float>(out));
    });
    py::class_<Drawer>(m, "Drawer")
        .def(py::init([](const std::string& kernels, int num_threads, int64_t vocab_size) {
            return std::make_unique<Drawer>(kernels_named(kernels), num_threads, vocab_size);
        }))
        .def("draw", &draw)
        .def("describe", &describe);
    py::class_<Linear>(m, "Linear").def(py::init(&linear_of));
    py::class_<Llama>(m, "Llama")
        .def(py::init(&make_llama))
        .def_property_readonly("num_threads", &Llama::num_threads)
        .def("add",
             [](Llama& self, std::uintptr_t attention_norm,
                const std::vector<Linear>& query_key_value, const Linear& attention_output,
                std::uintptr_t mlp_norm, const Linear& gate_up, const Linear& down) {
                 self.add({at<const float>(attention_norm), query_key_value, attention_output,
                           at<const float>(mlp_norm), gate_up, down});
             })
        .def("finish",
             [](Llama& self, std::uintptr_t norm, const Linear& embedding, const Linear& head) {
                 self.finish(at<const float>(norm), embedding, head);
             })
        .def("forward", &forward);
}
