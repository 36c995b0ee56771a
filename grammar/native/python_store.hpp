// The store and its terms as Python sees them.
//
// All of the machine runs under the GIL; long work lets it go at its pauses, when another thread
// may come in. `Operation` keeps that thread out of a store that is in use. Nobody waits for a store
// with the GIL in hand, so the two locks cannot block each other.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "store.hpp"

namespace palmette {

namespace py = pybind11;

class PythonStore {
  public:
    PythonStore(py::object limits, const py::object& alphabet);
    PythonStore(const PythonStore&) = delete;
    PythonStore& operator=(const PythonStore&) = delete;

    Store& core() { return core_; }

    // The Python object of a term, the same one as long as it lives.
    py::object handle_of(Term* term);
    // The term of a Python object of this store. Raises TypeError for any other object.
    Term* term_of(py::handle object);
    std::vector<Term*> terms_of(py::handle iterable);
    Rule* rule_of(py::handle object);
    py::object call(py::handle rule);
    // A call of the rule that `make` gives, the same one for the same key.
    py::object rule(const py::tuple& key, const py::object& make);
    py::object object_of(const Rule* rule) const;
    // The values of a shape of `palmette.grammar.structures`, as terms.
    py::object object(const py::object& self, py::object shape);
    py::object array(const py::object& self, py::object shape);

    // For the garbage collector: rules hold what made them, which holds the store.
    int traverse(visitproc visit, void* arg) const;
    void let_go();

    py::object limits;
    py::object alphabet;
    bool has_grammar = false;  // at most one: masks are kept with the terms

  private:
    friend class Operation;

    std::vector<Part> parts_of(py::handle parts);
    Punctuation marks_of(py::handle marks, const char* open, const char* close);

    std::timed_mutex mutex_;
    std::thread::id owner_;
    py::dict keyed_;
    std::unordered_map<PyObject*, Rule*> rules_;
    Store core_;
};

// The right to use a store, which the same thread may hold several times over.
class Operation {
  public:
    explicit Operation(PythonStore& store);
    ~Operation();
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

    bool is_nested() const { return is_nested_; }

  private:
    PythonStore& store_;
    bool is_nested_;
};

// What `function` gives, in an operation on the store; too deep a recursion is a limit reached.
template <class Function>
auto operate(PythonStore& store, Function function) {
    const Operation operation(store);
    try {
        return function();
    } catch (py::error_already_set& error) {
        if (error.matches(PyExc_RecursionError)) throw nested_too_deeply();
        throw;
    }
}

ByteSet byte_set_of(py::handle number);
py::object number_of(const ByteSet& set);
Count count_of(py::handle number);  // clipped to what the machine can tell apart

void bind_store(py::module_& module);

}  // namespace palmette
