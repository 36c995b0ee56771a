// The extension `palmette.grammar._native`: vocabularies, grammars and matchers for Python.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "grammar.hpp"
#include "python_store.hpp"

namespace palmette {

namespace {

// A grammar and what it lives on.
class PythonGrammar {
  public:
    PythonGrammar(std::shared_ptr<Vocabulary> vocabulary, std::shared_ptr<SharedMasks> shared,
                  py::object store, py::handle start)
        : store_object_(std::move(store)),
          store_(py::cast<PythonStore&>(store_object_)),
          core_(std::move(vocabulary), std::move(shared), store_.core(), store_.term_of(start)) {
        if (store_.has_grammar) throw py::value_error("the store serves a grammar already");
        store_.has_grammar = true;
    }

    PythonStore& store() { return store_; }

    Grammar& core() { return core_; }

    // What `function` gives, alone in the grammar, on the clock and with room for it.
    template <class Function>
    auto operate(Function function) {
        const Operation operation(store_);
        if (operation.is_nested()) {
            throw std::runtime_error("a rule of the grammar uses the grammar while it is built");
        }
        try {
            core_.begin();
            return function();
        } catch (py::error_already_set& error) {
            if (error.matches(PyExc_RecursionError)) throw nested_too_deeply();
            throw;
        }
    }

  private:
    py::object store_object_;
    PythonStore& store_;
    Grammar core_;
};

class PythonMatcher {
  public:
    explicit PythonMatcher(std::shared_ptr<PythonGrammar> grammar)
        : grammar_(std::move(grammar)), core_(grammar_->core()) {}

    PythonMatcher(const PythonMatcher& other) = default;

    Matcher& core() { return core_; }

    std::uint32_t state(Py_ssize_t back) {
        if (back < 0 || static_cast<std::size_t>(back) > core_.num_tokens()) {
            throw py::index_error("there are " + std::to_string(core_.num_tokens()) +
                                  " tokens, cannot look " + std::to_string(back) + " back");
        }
        return core_.state(static_cast<std::size_t>(back));
    }

    bool is_finished() {
        if (core_.has_stopped()) return true;
        if (!core_.is_complete()) return false;
        return grammar_->operate([&] { return core_.is_finished(); });
    }

    bool accept(py::handle token_id) {
        const Py_ssize_t token = PyNumber_AsSsize_t(token_id.ptr(), nullptr);
        if (token == -1 && PyErr_Occurred()) throw py::error_already_set();
        const auto num_rows = grammar_->core().vocabulary().num_rows();
        if (token < 0 || static_cast<std::size_t>(token) >= num_rows) return false;
        return grammar_->operate([&] { return core_.accept(static_cast<Token>(token)); });
    }

    void rollback(py::handle num_tokens) {
        const Count number = number_of(num_tokens);
        if (number < 0 || static_cast<std::size_t>(number) > core_.num_tokens()) {
            throw py::value_error("cannot roll back " + py::str(num_tokens).cast<std::string>() +
                                  " of " + std::to_string(core_.num_tokens()) + " tokens");
        }
        core_.rollback(static_cast<std::size_t>(number));
    }

    void fill_mask(const py::array& row, const py::object& budget) {
        Count number = 0;
        Count* most = nullptr;
        if (!budget.is_none()) {
            number = number_of(budget);
            most = &number;
        }
        const std::size_t num_rows = grammar_->core().vocabulary().num_rows();
        const std::size_t num_words = (num_rows + 31) / 32;
        const bool is_flat = row.ndim() == 1 && (row.flags() & py::array::c_style) != 0 &&
                             row.writeable();
        const auto size = is_flat ? static_cast<std::size_t>(row.shape(0)) : 0;
        // Of an array in the other byte order, none.
        const char kind = row.dtype().attr("isnative").cast<bool>() ? row.dtype().kind() : '-';
        if (is_flat && kind == 'b' && size == num_rows) {
            auto* data = static_cast<std::uint8_t*>(const_cast<void*>(row.data()));
            grammar_->operate([&] { core_.fill_bools(data, num_rows, most); });
        } else if (is_flat && kind == 'i' && row.itemsize() == 4 && size == num_words) {
            auto* data = static_cast<std::uint32_t*>(const_cast<void*>(row.data()));
            grammar_->operate([&] { core_.fill_bits(data, num_words, most); });
        } else {
            py::list shape;
            for (py::ssize_t i = 0; i < row.ndim(); ++i) shape.append(row.shape(i));
            const py::str text = py::str("row must be bool [{}] or int32 [{}], contiguous and "
                                         "writable, got {} {}")
                                     .format(num_rows, num_words, row.dtype(), shape);
            throw py::value_error(text.cast<std::string>());
        }
    }

    std::vector<Token> forced_tokens(const py::object& limit) {
        return grammar_->operate([&] { return core_.forced_tokens(limit_of(limit)); });
    }

    py::bytes forced_bytes(const py::object& limit) {
        return py::bytes(
            grammar_->operate([&] { return core_.forced_bytes(limit_of(limit)); }));
    }

    py::list extensions(const py::bytes& tail, const py::object& limit) {
        const auto found = grammar_->operate(
            [&] { return core_.extensions(std::string_view(tail), limit_of(limit)); });
        py::list list;
        for (const auto& each : found) list.append(py::bytes(each));
        return list;
    }

    bool can_complete(double budget) {
        return grammar_->operate([&] { return core_.can_complete(budget); });
    }

  private:
    // Of integers beyond all counts, the greatest or the least of those.
    static Count number_of(py::handle integer) {
        int overflow = 0;
        const long long number = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
        if (overflow) return overflow > 0 ? kMost : -kMost;
        if (number == -1 && PyErr_Occurred()) throw py::error_already_set();
        return number;
    }

    static std::size_t limit_of(const py::object& limit) {
        if (limit.is_none()) return std::numeric_limits<std::size_t>::max();
        return static_cast<std::size_t>(std::max<Count>(number_of(limit), 0));
    }

    std::shared_ptr<PythonGrammar> grammar_;
    Matcher core_;
};

std::shared_ptr<Vocabulary> make_vocabulary(const py::sequence& token_bytes,
                                            std::vector<Token> stop_tokens, std::size_t num_rows) {
    std::vector<std::string> listed;
    listed.reserve(token_bytes.size());
    for (const auto& token : token_bytes) {
        listed.emplace_back(std::string_view(py::cast<py::bytes>(token)));
    }
    return std::make_shared<Vocabulary>(std::move(listed), std::move(stop_tokens), num_rows);
}

void raise(const char* name, const char* message) {
    const auto kind = py::module_::import("palmette.grammar.errors").attr(name);
    py::set_error(kind, message);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "The machine of the grammar engine in C++.";
    py::register_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const TooComplex& error) {
            raise("GrammarTooComplex", error.what());
        } catch (const NoWayOn& error) {
            raise("GrammarError", error.what());
        }
    });
    bind_store(module);

    py::class_<Vocabulary, std::shared_ptr<Vocabulary>>(module, "Vocabulary",
                                                        "Tokens as bytes, and their trie.")
        .def(py::init(&make_vocabulary), py::arg("token_bytes"), py::arg("stop_token_ids"),
             py::arg("num_rows"));

    py::class_<SharedMasks, std::shared_ptr<SharedMasks>>(
        module, "SharedMasks", "Bodies by structure, shared by every grammar over one vocabulary.")
        .def(py::init<std::size_t>(), py::arg("max_bytes"))
        .def_property_readonly("num_bodies", &SharedMasks::num_bodies);

    py::class_<PythonGrammar, std::shared_ptr<PythonGrammar>>(module, "Grammar",
                                                              "What all matchers of it share.")
        .def(py::init<std::shared_ptr<Vocabulary>, std::shared_ptr<SharedMasks>, py::object,
                      py::object>(),
             py::arg("vocabulary"), py::arg("shared"), py::arg("store"), py::arg("start"))
        .def_property_readonly(
            "num_states", [](PythonGrammar& g) { return g.core().automaton().num_states(); })
        .def_property_readonly("num_terms",
                               [](PythonGrammar& g) { return g.store().core().num_new(); })
        .def_property_readonly(
            "generation", [](PythonGrammar& g) { return g.core().automaton().generation(); })
        .def_property_readonly("num_bytes", [](PythonGrammar& g) { return g.core().num_bytes(); })
        .def_property_readonly("shortest_length", [](PythonGrammar& g) {
            const double length = g.operate([&] { return g.core().shortest_length(); });
            return py::reinterpret_steal<py::object>(PyLong_FromDouble(length));
        });

    py::class_<PythonMatcher>(module, "Matcher", "Follows one text, token by token.")
        .def(py::init<std::shared_ptr<PythonGrammar>>(), py::arg("grammar").none(false))
        .def(py::init<const PythonMatcher&>(), py::arg("other"))
        .def_property_readonly("num_tokens",
                               [](PythonMatcher& m) { return m.core().num_tokens(); })
        .def("state", &PythonMatcher::state, py::arg("back") = 0)
        .def_property_readonly("is_complete",
                               [](PythonMatcher& m) { return m.core().is_complete(); })
        .def_property_readonly("is_finished", &PythonMatcher::is_finished)
        .def("accept", &PythonMatcher::accept, py::arg("token_id"))
        .def("rollback", &PythonMatcher::rollback, py::arg("num_tokens"))
        .def("fill_mask", &PythonMatcher::fill_mask, py::arg("row"), py::kw_only(),
             py::arg("budget") = py::none())
        .def("forced_tokens", &PythonMatcher::forced_tokens, py::arg("limit") = py::none())
        .def("forced_bytes", &PythonMatcher::forced_bytes, py::arg("limit") = 1 << 16)
        .def("extensions", &PythonMatcher::extensions, py::arg("tail"), py::arg("limit"))
        .def("can_complete", &PythonMatcher::can_complete, py::arg("budget"));
}

}  // namespace palmette
