#include "python_store.hpp"

#include <chrono>
#include <cstddef>

#include "recipe.hpp"

namespace palmette {

namespace {

// The Python object of a term. It pins the term; it does not keep the store.
struct TermObject {
    PyObject_HEAD
    Term* term;  // null once the store is gone
    PythonStore* store;
};

PyTypeObject* term_type = nullptr;
PyObject* kinds = nullptr;  // the members of `Kind` in their order

TermObject* live(PyObject* self) {
    auto* object = reinterpret_cast<TermObject*>(self);
    if (!object->term) throw std::runtime_error("the store of this term is gone");
    return object;
}

// The body of a C function: errors as Python has them.
template <class Function>
PyObject* answer(Function function) noexcept {
    try {
        return py::object(function()).release().ptr();
    } catch (py::error_already_set& error) {
        error.restore();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

void dealloc_term(PyObject* self) {
    auto* object = reinterpret_cast<TermObject*>(self);
    if (object->term) object->term->handle = nullptr;
    PyTypeObject* type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

py::tuple handles_of(PythonStore& store, Term* const* terms, std::size_t count) {
    py::tuple handles(count);
    for (std::size_t i = 0; i < count; ++i) handles[i] = store.handle_of(terms[i]);
    return handles;
}

template <class Attribute>
getter getter_of(Attribute) {
    return [](PyObject* self, void*) -> PyObject* {
        return answer([self] {
            TermObject* object = live(self);
            return Attribute()(*object->term, *object->store);
        });
    };
}

struct GetKind {
    py::object operator()(const Term& term, PythonStore&) const {
        return py::reinterpret_borrow<py::object>(
            PyList_GetItem(kinds, static_cast<Py_ssize_t>(term.kind)));
    }
};

template <bool Term::* flag>
struct GetFlag {
    py::object operator()(const Term& term, PythonStore&) const { return py::bool_(term.*flag); }
};

struct GetItems {
    py::object operator()(const Term& term, PythonStore& store) const {
        return handles_of(store, term.items(), term.num_items);
    }
};

struct GetBits {
    py::object operator()(const Term& term, PythonStore&) const { return number_of(term.bits); }
};

struct GetLow {
    py::object operator()(const Term& term, PythonStore&) const { return py::int_(term.low); }
};

struct GetHigh {
    py::object operator()(const Term& term, PythonStore&) const {
        if (term.high == kUnbounded) return py::none();
        return py::int_(term.high);
    }
};

struct GetSerial {
    py::object operator()(const Term& term, PythonStore&) const { return py::int_(term.serial); }
};

struct GetRule {
    py::object operator()(const Term& term, PythonStore& store) const {
        return store.object_of(term.rule);
    }
};

struct GetSpine {
    py::object operator()(Term& term, PythonStore& store) const {
        py::list spine;
        for (Term* each : spine_of(&term)) spine.append(store.handle_of(each));
        return spine;
    }
};

struct GetAlternatives {
    py::object operator()(Term& term, PythonStore& store) const {
        const Alternatives all(&term);
        return handles_of(store, all.begin(), static_cast<std::size_t>(all.end() - all.begin()));
    }
};

PyGetSetDef term_attributes[] = {
    {"kind", getter_of(GetKind()), nullptr, "What the term is made of.", nullptr},
    {"nullable", getter_of(GetFlag<&Term::nullable>()), nullptr,
     "Whether the empty string is in it.", nullptr},
    {"is_searched", getter_of(GetFlag<&Term::is_searched>()), nullptr,
     "Whether emptiness needs a search.", nullptr},
    {"is_regular", getter_of(GetFlag<&Term::is_regular>()), nullptr, "Whether it holds no call.",
     nullptr},
    {"is_finite", getter_of(GetFlag<&Term::is_finite>()), nullptr,
     "Whether it obviously has a limited number of strings.", nullptr},
    {"items", getter_of(GetItems()), nullptr, "The terms that it is made of.", nullptr},
    {"bits", getter_of(GetBits()), nullptr, "The bytes of a byte set.", nullptr},
    {"low", getter_of(GetLow()), nullptr, "The least number of repetitions.", nullptr},
    {"high", getter_of(GetHigh()), nullptr, "The most repetitions; None is without end.", nullptr},
    {"serial", getter_of(GetSerial()), nullptr, "The number of the term in its store.", nullptr},
    {"rule", getter_of(GetRule()), nullptr, "The rule that is called, or None.", nullptr},
    {"spine", getter_of(GetSpine()), nullptr, "The elements of a sequence, or the term itself.",
     nullptr},
    {"alternatives", getter_of(GetAlternatives()), nullptr,
     "The items of an alternation, or the term itself.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyObject* repr_of_term(PyObject* self) {
    return answer([self] {
        const Term& term = *live(self)->term;
        const auto name = GetKind()(term, *live(self)->store).attr("name").attr("lower")();
        return py::str("<{} {}>").format(name, term.serial);
    });
}

PyType_Slot term_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_term)},
    {Py_tp_repr, reinterpret_cast<void*>(repr_of_term)},
    {Py_tp_getset, term_attributes},
    {Py_tp_doc, const_cast<char*>("One interned node; see `palmette.grammar.terms.Term`.")},
    {0, nullptr},
};

PyType_Spec term_spec = {
    "palmette.grammar._native.Term", sizeof(TermObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, term_slots};

Limits limits_of(const py::object& limits) {
    const auto count = [&](const char* name) { return count_of(limits.attr(name)); };
    return {count("max_states"), count("max_terms"), count("max_alternatives"),
            limits.attr("mask_seconds").cast<double>(),
            static_cast<std::size_t>(count("mask_cache_bytes"))};
}

// The patience of the operation that this thread carries out, or None.
py::object current_patience() {
    static PyObject* const ask =
        py::object(py::module_::import("palmette.grammar.patience").attr("current_patience"))
            .release()
            .ptr();
    return py::reinterpret_borrow<py::object>(ask)();
}

// Lets other threads run and signals through, and ends what nobody waits for.
void pause() {
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    const py::object patience = current_patience();
    if (!patience.is_none()) patience.attr("look")();
    const py::gil_scoped_release release;
}

Count bound_of(py::handle bound) { return bound.is_none() ? kUnbounded : count_of(bound); }

std::vector<Counter> counters_of(py::handle counters) {
    std::vector<Counter> list;
    for (const auto& counter : py::reinterpret_borrow<py::object>(counters)) {
        list.push_back({count_of(counter.attr("low")), bound_of(counter.attr("high"))});
    }
    return list;
}

// Raises ValueError unless a place has parts, and these move counters that there are.
void check_counters(std::size_t num_counters, const std::vector<Part>& parts) {
    if (parts.empty()) throw py::value_error("a place of an object or array needs parts");
    for (const Part& part : parts) {
        for (auto counter : part.counters) {
            if (counter >= num_counters) throw py::value_error("a part moves an unknown counter");
        }
    }
}

void check_counters(std::size_t num_counters, const std::vector<Member>& members,
                    const std::vector<Names>& names) {
    for (const Member& member : members) check_counters(num_counters, member.parts);
    for (const Names& each : names) check_counters(num_counters, each.parts);
}

struct PythonRule : Rule {
    PythonRule(PythonStore& store, py::object rule)
        : Rule(rule.attr("name").cast<std::string>(), rule.attr("nullable").cast<bool>(),
               count_of(rule.attr("min_bytes"))),
          store(store),
          object(std::move(rule)) {}

    Term* build() override { return ask("body"); }

    Term* make_shortest() override { return ask("shortest"); }

    Term* ask(const char* method) {
        if (!object) throw std::runtime_error("the store of this rule is being collected");
        const py::object keep = object;
        return store.term_of(keep.attr(method)());
    }

    PythonStore& store;
    py::object object;
};

}  // namespace

// Numbers

ByteSet byte_set_of(py::handle number) {
    static PyObject* all = PyNumber_Subtract(
        py::reinterpret_steal<py::object>(PyNumber_Lshift(py::int_(1).ptr(), py::int_(256).ptr()))
            .ptr(),
        py::int_(1).ptr());
    const auto low = py::reinterpret_steal<py::object>(PyNumber_And(number.ptr(), all));
    if (!low) throw py::error_already_set();
    const py::bytes bytes = low.attr("to_bytes")(32, "little");
    const std::string_view view = bytes;
    ByteSet set;
    for (std::size_t i = 0; i < 32; ++i) {
        set.words[i / 8] |= std::uint64_t{static_cast<std::uint8_t>(view[i])} << (8 * (i % 8));
    }
    return set;
}

py::object number_of(const ByteSet& set) {
    char bytes[32];
    for (std::size_t i = 0; i < 32; ++i) {
        bytes[i] = static_cast<char>(set.words[i / 8] >> (8 * (i % 8)) & 255);
    }
    const auto int_type = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(&PyLong_Type));
    return int_type.attr("from_bytes")(py::bytes(bytes, 32), "little");
}

Count count_of(py::handle number) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    if (value == -1 && !overflow && PyErr_Occurred()) throw py::error_already_set();
    if (overflow > 0 || value > kMost) return kMost;
    if (overflow < 0 || value < 0) throw py::value_error("a count must not be negative");
    return value;
}

// The store

PythonStore::PythonStore(py::object limits_, const py::object& alphabet_)
    : limits(std::move(limits_)),
      alphabet(alphabet_),
      core_(limits_of(limits), byte_set_of(alphabet), pause) {
    core_.forget_rule = [this](Rule& rule) {
        rules_.erase(static_cast<PythonRule&>(rule).object.ptr());
    };
    core_.orphan = [](Term& term) { static_cast<TermObject*>(term.handle)->term = nullptr; };
}

py::object PythonStore::handle_of(Term* term) {
    if (term->handle) {
        return py::reinterpret_borrow<py::object>(static_cast<PyObject*>(term->handle));
    }
    auto* object = reinterpret_cast<TermObject*>(term_type->tp_alloc(term_type, 0));
    if (!object) throw py::error_already_set();
    object->term = term;
    object->store = this;
    term->handle = object;
    return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object));
}

Term* PythonStore::term_of(py::handle object) {
    if (Py_TYPE(object.ptr()) != term_type) {
        throw py::type_error("expected a term of this store, got " +
                             std::string(Py_TYPE(object.ptr())->tp_name));
    }
    auto* term = reinterpret_cast<TermObject*>(object.ptr());
    if (term->store != this || !term->term) throw py::type_error("the term is of another store");
    return term->term;
}

std::vector<Term*> PythonStore::terms_of(py::handle iterable) {
    const auto list =
        py::reinterpret_steal<py::object>(PySequence_Fast(iterable.ptr(), "expected terms"));
    if (!list) throw py::error_already_set();
    const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(list.ptr()));
    PyObject** from = PySequence_Fast_ITEMS(list.ptr());
    std::vector<Term*> terms(count);
    for (std::size_t i = 0; i < count; ++i) terms[i] = term_of(from[i]);
    return terms;
}

Rule* PythonStore::rule_of(py::handle object) {
    const auto known = rules_.find(object.ptr());
    if (known != rules_.end()) return known->second;
    auto made =
        std::make_unique<PythonRule>(*this, py::reinterpret_borrow<py::object>(object));
    Rule* rule = core_.adopt(std::move(made));
    rules_.emplace(object.ptr(), rule);
    return rule;
}

py::object PythonStore::call(py::handle rule) { return handle_of(core_.call(rule_of(rule))); }

py::object PythonStore::rule(const py::tuple& key, const py::object& make) {
    PyObject* known = PyDict_GetItemWithError(keyed_.ptr(), key.ptr());
    if (!known && PyErr_Occurred()) throw py::error_already_set();
    if (known) return call(known);
    const py::object made = make();
    keyed_[key] = made;
    return call(made);
}

py::object PythonStore::object_of(const Rule* rule) const {
    if (!rule) return py::none();
    return static_cast<const PythonRule*>(rule)->object;
}

std::vector<Part> PythonStore::parts_of(py::handle parts) {
    std::vector<Part> list;
    for (const auto& part : py::reinterpret_borrow<py::object>(parts)) {
        list.push_back({term_of(part.attr("value")), {}});
        for (const auto& index : py::reinterpret_borrow<py::object>(part.attr("counters"))) {
            list.back().counters.push_back(py::cast<std::uint32_t>(index));
        }
    }
    return list;
}

Punctuation PythonStore::marks_of(py::handle marks, const char* open, const char* close) {
    const auto mark = [&](const char* name) { return term_of(marks.attr(name)); };
    return {mark("blank"), mark("comma"), mark("colon"), mark(open), mark(close)};
}

// A shape whose scarce texts are counted one by one, see `palmette.grammar.distinct`.
py::object distinct(const char* function, const py::object& shape, const py::object& store) {
    return py::module_::import("palmette.grammar.distinct").attr(function)(shape, store);
}

py::object PythonStore::object(const py::object& self, py::object shape) {
    Members members;
    members.has_distinct_names = py::cast<bool>(shape.attr("has_distinct_names"));
    if (members.has_distinct_names) shape = distinct("distinct_names", shape, self);
    members.marks = marks_of(shape.attr("punctuation"), "open_object", "close_object");
    for (const auto& member : shape.attr("members")) {
        members.members.push_back({py::cast<std::string>(member.attr("key")),
                                   parts_of(member.attr("parts")),
                                   py::cast<bool>(member.attr("is_required"))});
    }
    for (const auto& names : shape.attr("names")) {
        members.names.push_back({term_of(names.attr("name")), parts_of(names.attr("parts"))});
    }
    members.counters = counters_of(shape.attr("counters"));
    members.min_members = count_of(shape.attr("min_members"));
    members.max_members = bound_of(shape.attr("max_members"));
    members.is_any_order = py::cast<std::string>(shape.attr("order")) == "any";
    check_counters(members.counters.size(), members.members, members.names);
    return handle_of(core_.object(std::move(members)));
}

py::object PythonStore::array(const py::object& self, py::object shape) {
    Items items;
    items.is_unique = py::cast<bool>(shape.attr("is_unique"));
    if (items.is_unique) shape = distinct("distinct_items", shape, self);
    items.marks = marks_of(shape.attr("punctuation"), "open_array", "close_array");
    for (const auto& parts : shape.attr("prefix")) items.prefix.push_back(parts_of(parts));
    items.rest = parts_of(shape.attr("rest"));
    items.counters = counters_of(shape.attr("counters"));
    items.min_items = count_of(shape.attr("min_items"));
    items.max_items = bound_of(shape.attr("max_items"));
    for (const auto& parts : items.prefix) check_counters(items.counters.size(), parts);
    if (!items.rest.empty()) check_counters(items.counters.size(), items.rest);
    return handle_of(core_.array(items));
}

int PythonStore::traverse(visitproc visit, void* arg) const {
    Py_VISIT(limits.ptr());
    Py_VISIT(keyed_.ptr());
    for (const auto& rule : core_.rules()) {
        Py_VISIT(static_cast<const PythonRule&>(*rule).object.ptr());
    }
    return 0;
}

void PythonStore::let_go() {
    // Dropping one may run any code; what is dropped is out of reach first.
    std::vector<py::object> dropped;
    for (const auto& rule : core_.rules()) {
        dropped.push_back(std::move(static_cast<PythonRule&>(*rule).object));
    }
    rules_.clear();
    dropped.push_back(std::move(keyed_));
    keyed_ = py::dict();
}

// Operations

namespace {

// Raises OutOfPatience instead of waiting longer than the patience of this thread lasts.
void wait_for(std::timed_mutex& mutex) {
    const py::object patience = current_patience();
    const py::object seconds = patience.is_none() ? py::none() : patience.attr("seconds");
    bool is_held = true;
    if (seconds.is_none()) {
        const py::gil_scoped_release release;
        mutex.lock();
    } else {
        const auto time = std::chrono::duration<double>(py::cast<double>(seconds));
        const py::gil_scoped_release release;
        is_held = mutex.try_lock_for(time);
    }
    if (is_held) return;
    const auto error = py::module_::import("palmette.grammar.patience").attr("OutOfPatience");
    py::set_error(error, "another operation on the grammar takes long");
    throw py::error_already_set();
}

}  // namespace

Operation::Operation(PythonStore& store) : store_(store) {
    is_nested_ = store.owner_ == std::this_thread::get_id();
    if (is_nested_) return;
    if (!store.mutex_.try_lock()) wait_for(store.mutex_);
    store.owner_ = std::this_thread::get_id();
}

Operation::~Operation() {
    if (is_nested_) return;
    store_.owner_ = std::thread::id();
    store_.mutex_.unlock();
}

// Bindings

void bind_store(py::module_& module) {
    term_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&term_spec));
    if (!term_type) throw py::error_already_set();
    module.attr("Term") =
        py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(term_type));
    kinds = py::list(py::module_::import("palmette.grammar.terms").attr("Kind")).release().ptr();

    const auto setup = py::custom_type_setup([](PyHeapTypeObject* heap_type) {
        PyTypeObject* type = &heap_type->ht_type;
        type->tp_flags |= Py_TPFLAGS_HAVE_GC;
        type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
            Py_VISIT(Py_TYPE(self));
            if (!py::detail::is_holder_constructed(self)) return 0;
            return py::cast<PythonStore&>(py::handle(self)).traverse(visit, arg);
        };
        type->tp_clear = [](PyObject* self) {
            if (py::detail::is_holder_constructed(self)) {
                py::cast<PythonStore&>(py::handle(self)).let_go();
            }
            return 0;
        };
    });
    const auto all_bytes = number_of(ByteSet::all());

    py::class_<Recipe, std::shared_ptr<Recipe>>(module, "Recipe",
                                                "A regular term as data, for other stores.")
        .def_property_readonly("size", &Recipe::size);

    py::class_<PythonStore>(module, "TermStore", setup,
                            "Makes terms, keeps equal ones equal, and derives them.")
        .def(py::init<py::object, py::object>(), py::arg("limits"), py::arg("alphabet") = all_bytes)
        .def_readonly("limits", &PythonStore::limits)
        .def_readonly("alphabet", &PythonStore::alphabet)
        .def_property_readonly("empty", [](PythonStore& s) { return s.handle_of(s.core().empty()); })
        .def_property_readonly("epsilon",
                               [](PythonStore& s) { return s.handle_of(s.core().epsilon()); })
        .def_property_readonly("anything",
                               [](PythonStore& s) { return s.handle_of(s.core().anything()); })
        .def("__len__", [](PythonStore& s) { return s.core().num_new(); })
        .def("start_clock",
             [](PythonStore& s, double seconds) { s.core().start_clock(seconds); })
        .def("share_clock",
             [](PythonStore& s, PythonStore& other) { s.core().share_clock(other.core()); })
        .def_property_readonly("load", [](PythonStore& s) { return s.core().load(); })
        .def("look", [](PythonStore& s) { s.core().look(); })
        .def("hold",
             [](PythonStore& s, Py_ssize_t num_bytes) { s.core().hold(static_cast<std::size_t>(num_bytes)); })
        .def(
            "spend", [](PythonStore& s, std::size_t work) { s.core().spend(work); },
            py::arg("work") = 1)
        .def("byte_set",
             [](PythonStore& s, py::handle bits) {
                 const ByteSet set = byte_set_of(bits);
                 return operate(s, [&] { return s.handle_of(s.core().byte_set(set)); });
             })
        .def("literal",
             [](PythonStore& s, const py::bytes& text) {
                 return operate(
                     s, [&] { return s.handle_of(s.core().literal(std::string_view(text))); });
             })
        .def("can_spell",
             [](PythonStore& s, const py::bytes& text) {
                 return s.core().can_spell(std::string_view(text));
             })
        .def("words",
             [](PythonStore& s, const py::iterable& words) {
                 std::vector<std::string> listed;
                 for (const auto& word : words) {
                     listed.emplace_back(std::string_view(py::cast<py::bytes>(word)));
                 }
                 return operate(
                     s, [&] { return s.handle_of(s.core().words(std::move(listed))); });
             })
        .def("table",
             [](PythonStore& s, const py::sequence& accepting, const py::sequence& moves) {
                 std::vector<bool> ends;
                 for (const auto& each : accepting) ends.push_back(py::cast<bool>(each));
                 if (ends.empty() || moves.size() != ends.size()) {
                     throw py::value_error("a table has moves for each of its states");
                 }
                 std::vector<std::vector<Table::Move>> rows;
                 for (const auto& each : moves) {
                     rows.emplace_back();
                     for (const auto& move : py::reinterpret_borrow<py::object>(each)) {
                         const auto [bits, after] =
                             py::cast<std::pair<py::object, std::uint32_t>>(move);
                         if (after >= ends.size()) {
                             throw py::value_error("a move leads to no state of the table");
                         }
                         rows.back().push_back({byte_set_of(bits), after});
                     }
                 }
                 return operate(s, [&] {
                     return s.handle_of(s.core().table(std::move(ends), std::move(rows)));
                 });
             })
        .def("sequence",
             [](PythonStore& s, const py::args& terms) {
                 const auto list = s.terms_of(terms);
                 return operate(
                     s, [&] { return s.handle_of(s.core().sequence(list.data(), list.size())); });
             })
        .def("alternation",
             [](PythonStore& s, const py::object& terms) {
                 const auto list = s.terms_of(terms);
                 return operate(s, [&] { return s.handle_of(s.core().alternation(list)); });
             })
        .def("optional",
             [](PythonStore& s, py::handle term) {
                 Term* both[] = {s.term_of(term), s.core().epsilon()};
                 return operate(s, [&] { return s.handle_of(s.core().alternation(both, 2)); });
             })
        .def("repeat",
             [](PythonStore& s, py::handle term, py::handle low, py::handle high) {
                 const Count least = count_of(low);
                 const Count most = bound_of(high);
                 return operate(s, [&] {
                     return s.handle_of(s.core().repeat(s.term_of(term), least, most));
                 });
             })
        .def("both",
             [](PythonStore& s, const py::args& terms) {
                 const auto list = s.terms_of(terms);
                 return operate(s, [&] { return s.handle_of(s.core().both(list)); });
             })
        .def("complement",
             [](PythonStore& s, py::handle term) {
                 return operate(
                     s, [&] { return s.handle_of(s.core().complement(s.term_of(term))); });
             })
        .def("lexeme",
             [](PythonStore& s, py::handle term) {
                 return operate(s,
                                [&] { return s.handle_of(s.core().lexeme(s.term_of(term))); });
             })
        .def("call",
             [](PythonStore& s, py::handle rule) {
                 return operate(s, [&] { return s.call(rule); });
             })
        .def("object",
             [](const py::object& self, const py::object& shape) {
                 auto& s = py::cast<PythonStore&>(self);
                 return operate(s, [&] { return s.object(self, shape); });
             })
        .def("array",
             [](const py::object& self, const py::object& shape) {
                 auto& s = py::cast<PythonStore&>(self);
                 return operate(s, [&] { return s.array(self, shape); });
             })
        .def("rule",
             [](PythonStore& s, const py::tuple& key, const py::object& make) {
                 return operate(s, [&] { return s.rule(key, make); });
             })
        .def("recipe",
             [](PythonStore& s, py::handle term) {
                 return std::shared_ptr<Recipe>(Recipe::of(s.core(), s.term_of(term)));
             })
        .def("follow",
             [](PythonStore& s, const Recipe& recipe) {
                 return operate(s, [&] { return s.handle_of(recipe.follow(s.core())); });
             })
        .def("parts",
             [](PythonStore& s, py::handle term) {
                 return operate(s, [&] {
                     py::list pairs;
                     for (const Pair& pair : s.core().parts(s.term_of(term))) {
                         pairs.append(py::make_tuple(number_of(pair.bits), s.handle_of(pair.after)));
                     }
                     return pairs;
                 });
             })
        .def("is_empty",
             [](PythonStore& s, py::handle term) {
                 return operate(s, [&] { return s.core().is_empty(s.term_of(term)); });
             })
        .def("min_bytes",
             [](PythonStore& s, py::handle term) {
                 return operate(s, [&] { return s.core().min_bytes(s.term_of(term)); });
             })
        .def("shortest",
             [](PythonStore& s, py::handle term) {
                 return operate(s,
                                [&] { return py::bytes(s.core().shortest(s.term_of(term))); });
             })
        .def("accepts",
             [](PythonStore& s, py::handle term, const py::bytes& text) {
                 return operate(s, [&] {
                     return s.core().accepts(s.term_of(term), std::string_view(text));
                 });
             })
        .def("mark_character", [](PythonStore& s, py::handle term) {
            s.core().mark_character(s.term_of(term));
            return py::reinterpret_borrow<py::object>(term);
        });
}

}  // namespace palmette
