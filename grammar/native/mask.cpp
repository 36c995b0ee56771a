#include "mask.hpp"

#include <algorithm>

namespace palmette {

namespace {

constexpr std::size_t kFewTokens = 2000;     // are tried faster than the whole trie is walked
constexpr std::size_t kBytesPerEntry = 200;  // a mask or body with its places in the caches

}  // namespace

std::size_t Body::num_bytes() const {
    return inside.num_bytes() + inside.num_bytes_of_base() + exits.capacity() * sizeof(NodeIndex) +
           kBytesPerEntry;
}

bool Body::drop_exit(NodeIndex node) {
    // Those with children, and those without, are each in order.
    const auto open_end = exits.begin() + static_cast<std::ptrdiff_t>(num_open_exits);
    auto found = std::lower_bound(exits.begin(), open_end, node);
    if (found != open_end && *found == node) {
        --num_open_exits;
    } else {
        found = std::lower_bound(open_end, exits.end(), node);
        if (found == exits.end() || *found != node) return false;
    }
    exits.erase(found);
    return true;
}

std::size_t Mask::num_bytes() const {
    // The base is counted whole, though it is often shared with a body.
    return tokens.num_bytes() + (bodies.size() == 1 ? 0 : tokens.num_bytes_of_base()) +
           ends.capacity() * sizeof(Term*) + doubtful.capacity() * sizeof(Token) +
           bodies.capacity() * sizeof(bodies[0]) + kBytesPerEntry;
}

// Shared bodies

std::shared_ptr<const Body> SharedMasks::get(const Structure& structure) {
    const auto found = bodies_.find(structure);
    if (found == bodies_.end()) return nullptr;
    order_.splice(order_.end(), order_, found->second.place);
    return found->second.body;
}

void SharedMasks::put(const Structure& structure, std::shared_ptr<const Body> body) {
    if (bodies_.count(structure)) return;
    num_bytes_ += body->num_bytes();
    order_.push_back(structure);
    bodies_.emplace(structure, Entry{std::move(body), std::prev(order_.end())});
    while (num_bytes_ > max_bytes_ && bodies_.size() > 1) {
        const auto oldest = bodies_.find(order_.front());
        num_bytes_ -= oldest->second.body->num_bytes();
        bodies_.erase(oldest);
        order_.pop_front();
    }
}

// Masks

MaskBuilder::MaskBuilder(const Vocabulary& vocabulary, Automaton& automaton,
                         std::shared_ptr<SharedMasks> shared, std::size_t max_bytes)
    : vocabulary_(vocabulary),
      automaton_(automaton),
      store_(automaton.store()),
      lexemes_(store_),
      shared_(std::move(shared)),
      max_bytes_(max_bytes) {}

void MaskBuilder::clear() {
    order_.clear();
    at_hand_.clear();
    num_bytes_ = 0;
}

Mask& MaskBuilder::build_and_keep(Term* term) {
    Term* lenient = store_.lenient(term);
    auto mask = lenient == term ? build(term) : with_doubtful(term, lenient);
    order_.push_back(term);
    mask->place = std::prev(order_.end());
    num_bytes_ += mask->num_bytes();
    term->mask = std::move(mask);
    while (num_bytes_ > max_bytes_ && order_.size() > 1) {
        Term* oldest = order_.front();
        num_bytes_ -= oldest->mask->num_bytes();
        oldest->mask.reset();
        order_.pop_front();
    }
    return *term->mask;
}

std::unique_ptr<Mask> MaskBuilder::build(Term* term) {
    auto mask = std::make_unique<Mask>();
    TokenSetBuilder tokens(vocabulary_.num_words());
    struct Start {
        std::shared_ptr<const Body> body;  // from its exits; null: from the root
        Term* state;
    };
    std::vector<Start> starts;
    std::vector<Term*> plain;
    std::vector<Term*> pending;
    const auto add_alternatives = [&pending](Term* from) {
        const Alternatives all(from);
        pending.insert(pending.end(), all.begin(), all.end());
    };
    add_alternatives(term);
    while (!pending.empty()) {
        Term* each = pending.back();
        pending.pop_back();
        const bool is_sequence = each->kind == Kind::kSequence;
        Term* head = is_sequence ? each->item(0) : each;
        Term* tail = is_sequence ? each->item(1) : store_.epsilon();
        if (head->kind != Kind::kLexeme) {
            plain.push_back(each);
            continue;
        }
        if (store_.is_empty(head)) continue;
        auto body = body_of(head);
        tokens.add(body->inside);
        mask->bodies.emplace_back(head, tail);
        if (tail->kind != Kind::kEpsilon) {
            if (body->num_open_exits) starts.push_back({std::move(body), tail});
            if (head->nullable) add_alternatives(tail);
        }
    }
    if (!plain.empty()) {
        starts.push_back({nullptr, plain.size() == 1 ? plain[0] : store_.alternation(plain)});
    }
    const std::uint32_t stamp = store_.next_stamp();
    std::vector<NodeIndex> barriers;
    const auto end_at = [&](Term* after) {
        if (after->stamp == stamp) return;
        after->stamp = stamp;
        mask->ends.push_back(after);
    };
    const auto visit = [&](NodeIndex node, Term* after) {
        if (after->is_barrier) barriers.push_back(node);
        if (!vocabulary_.node(node).has_token) return;
        vocabulary_.for_each_token_at(node, [&](Token token) { tokens.add(token); });
        end_at(after);
    };
    const auto visit_below = [&](NodeIndex node, Term* after) {
        if (after->is_barrier) barriers.push_back(node);
        vocabulary_.for_each_token_below(node, [&](Token token) { tokens.add(token); });
        end_at(after);
    };
    for (const Start& start : starts) {
        automaton_.enter(start.state);
        if (start.state->is_barrier) {
            const NodeIndex root = 0;
            const NodeIndex* first = start.body ? start.body->exits.data() : &root;
            barriers.insert(barriers.end(), first,
                            first + (start.body ? start.body->num_open_exits : 1));
        }
        if (!start.body) {
            automaton_.walk(vocabulary_, 0, start.state, visit, visit_below);
            continue;
        }
        for (std::size_t i = 0; i < start.body->num_open_exits; ++i) {
            automaton_.walk(vocabulary_, start.body->exits[i], start.state, visit, visit_below);
        }
    }
    mask->tokens = tokens.finish();
    mask->ends.shrink_to_fit();
    if (!barriers.empty()) {
        mask->doubtful = tokens_below(vocabulary_, barriers);
        mask->tokens = mask->tokens.without(mask->doubtful);
    }
    return mask;
}

std::unique_ptr<Mask> MaskBuilder::with_doubtful(Term* term, Term* lenient) {
    const Mask& known = mask_of(lenient);
    auto mask = std::make_unique<Mask>();
    mask->ends = known.ends;
    mask->bodies = known.bodies;
    if (known.doubtful.empty()) {
        mask->tokens = known.tokens;
        mask->worst = known.worst;
        return mask;
    }
    TokenSetBuilder tokens(vocabulary_.num_words());
    tokens.add(known.tokens);
    for (const auto& [token, after] : try_tokens(automaton_, vocabulary_, term, known.doubtful)) {
        tokens.add(token);
        if (std::find(mask->ends.begin(), mask->ends.end(), after) == mask->ends.end()) {
            mask->ends.push_back(after);
        }
    }
    mask->tokens = tokens.finish();
    return mask;
}

std::vector<Token> tokens_below(const Vocabulary& vocabulary, const std::vector<NodeIndex>& nodes) {
    std::vector<Token> tokens;
    for (NodeIndex node : nodes) {
        for (NodeIndex at = node + 1; at < vocabulary.node(node).end; ++at) {
            vocabulary.for_each_token_at(at, [&](Token token) { tokens.push_back(token); });
        }
    }
    std::sort(tokens.begin(), tokens.end());
    tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
    return tokens;
}

std::vector<std::pair<Token, Term*>> try_tokens(Automaton& automaton, const Vocabulary& vocabulary,
                                                Term* term, const std::vector<Token>& tokens) {
    std::vector<std::pair<Token, Term*>> allowed;
    for (Token token : tokens) {
        automaton.store().spend();
        if (Term* after = automaton.step(term, vocabulary.bytes_of(token))) {
            allowed.emplace_back(token, after);
        }
    }
    return allowed;
}

// Bodies

std::shared_ptr<const Body> MaskBuilder::body_of(Term* head) {
    Term* clamped = lexemes_.clamp(head, vocabulary_.max_depth());
    const auto known = at_hand_.find(clamped);
    if (known != at_hand_.end()) return known->second;
    const Structure structure = lexemes_.structure(clamped);
    auto body = shared_->get(structure);
    if (!body) {
        const auto counted = lexemes_.without_counter(clamped);
        if (const auto whole = lexemes_.without_exclusion(clamped)) {
            body = narrow_body(clamped, whole->first, whole->second);
        } else if (counted && vocabulary_.num_longer_tokens(counted->second, kFewTokens) <=
                                  kFewTokens) {
            body = counted_body(clamped, counted->first, counted->second);
        } else if (const auto split = lexemes_.without_words(clamped)) {
            body = body_without(clamped, split->first, split->second);
        } else {
            body = walk_body(clamped);
        }
        shared_->put(structure, body);
    }
    if (at_hand_.size() >= kBodiesAtHand) at_hand_.clear();
    at_hand_.emplace(clamped, body);
    return body;
}

std::shared_ptr<const Body> MaskBuilder::walk_body(Term* head) {
    auto body = std::make_shared<Body>();
    TokenSetBuilder tokens(vocabulary_.num_words());
    automaton_.enter(head);
    const auto visit = [&](NodeIndex node, Term* after) {
        if (vocabulary_.node(node).has_token) {
            vocabulary_.for_each_token_at(node, [&](Token token) { tokens.add(token); });
        }
        if (after->nullable) body->exits.push_back(node);
    };
    const auto visit_below = [&](NodeIndex above, Term* after) {
        vocabulary_.for_each_token_below(above, [&](Token token) { tokens.add(token); });
        if (!after->nullable) return;
        for (NodeIndex node = above + 1; node < vocabulary_.node(above).end; ++node) {
            body->exits.push_back(node);
        }
    };
    automaton_.walk(vocabulary_, 0, head, visit, visit_below);
    body->inside = tokens.finish();
    order_exits(*body);
    return body;
}

template <class Visit>
void MaskBuilder::for_each_child(NodeIndex node, Term* term, Visit visit) {
    for (const Pair& pair : store_.parts(term)) {
        pair.bits.for_each([&](std::uint8_t byte) {
            const NodeIndex child = vocabulary_.child(node, byte);
            if (child) visit(child, pair.after, byte);
        });
    }
}

// The body of `base`, less the ends at which a word excluded from `head` is complete.
std::shared_ptr<const Body> MaskBuilder::narrow_body(Term* head, Term* base, Term* excluded) {
    const auto known = body_of(base);
    auto body = std::make_shared<Body>(*known);
    std::vector<Token> lost;
    automaton_.enter(head);
    const auto is_complete = [&](NodeIndex node) {
        const Term* after = automaton_.pass(head, vocabulary_.path(node));
        return after && after->nullable;
    };
    std::vector<std::pair<NodeIndex, Term*>> pending{{0, excluded}};
    while (!pending.empty()) {
        const auto [node, here] = pending.back();
        pending.pop_back();
        store_.spend();
        // It may be an end in another way too.
        if (here->nullable && !is_complete(node) && body->drop_exit(node)) {
            vocabulary_.for_each_token_at(node, [&](Token token) { lost.push_back(token); });
        }
        for_each_child(node, here, [&](NodeIndex child, Term* after, std::uint8_t) {
            pending.emplace_back(child, after);
        });
    }
    body->inside = known->inside.without(std::move(lost));
    return body;
}

// The body of `base`, less where a counter that it lacks would have too much or too little: too
// little only at its ends, too much only in tokens with more bytes than that.
std::shared_ptr<const Body> MaskBuilder::counted_body(Term* head, Term* base, Count most) {
    automaton_.enter(head);
    std::vector<Token> lost;
    vocabulary_.for_each_longer_token(most, [&](Token token) {
        if (!automaton_.step(head, vocabulary_.bytes_of(token))) lost.push_back(token);
    });
    const auto known = body_of(base);
    auto body = std::make_shared<Body>();
    for (NodeIndex node : known->exits) {
        if (automaton_.accepts(head, vocabulary_.path(node))) {
            body->exits.push_back(node);
        } else {
            vocabulary_.for_each_token_at(node, [&](Token token) { lost.push_back(token); });
        }
    }
    body->inside = known->inside.without(std::move(lost));
    order_exits(*body);
    return body;
}

// The body of `base`, less what leads only to the words that are excluded from `head`. A prefix that
// none of the words begins with has the same continuations in both.
std::shared_ptr<const Body> MaskBuilder::body_without(Term* head, Term* base, Term* words) {
    const auto known = body_of(base);
    auto body = std::make_shared<Body>(*known);
    std::vector<Token> lost;
    struct Place {
        NodeIndex node;
        Term* word;
        Term* here;
    };
    std::vector<Place> pending{{0, words, head}};
    while (!pending.empty()) {
        const auto [node, word, here] = pending.back();
        pending.pop_back();
        store_.spend();
        if (node && store_.is_empty(here)) {
            vocabulary_.for_each_token_at(node, [&](Token token) { lost.push_back(token); });
        }
        if (!here->nullable) body->drop_exit(node);
        for_each_child(node, word, [&, here = here](NodeIndex child, Term* after,
                                                    std::uint8_t byte) {
            pending.push_back({child, after, store_.after(here, byte)});
        });
    }
    body->inside = known->inside.without(std::move(lost));
    return body;
}

void MaskBuilder::order_exits(Body& body) const {
    const auto has_children = [this](NodeIndex node) {
        return vocabulary_.node(node).end != node + 1;
    };
    const auto middle = std::partition(body.exits.begin(), body.exits.end(), has_children);
    if (!std::is_sorted(body.exits.begin(), middle)) std::sort(body.exits.begin(), middle);
    if (!std::is_sorted(middle, body.exits.end())) std::sort(middle, body.exits.end());
    body.num_open_exits = static_cast<std::size_t>(middle - body.exits.begin());
    body.exits.shrink_to_fit();
}

}  // namespace palmette
