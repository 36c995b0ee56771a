#include "vocabulary.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace palmette {

Vocabulary::Vocabulary(std::vector<std::string> token_bytes, std::vector<Token> stop_tokens,
                       std::size_t num_rows)
    : token_bytes_(std::move(token_bytes)),
      stop_tokens_(std::move(stop_tokens)),
      num_rows_(num_rows) {
    for (Token token : stop_tokens_) {
        const auto index = static_cast<std::size_t>(token);
        if (index < token_bytes_.size()) token_bytes_[index].clear();
    }
    for (std::size_t i = 0; i < token_bytes_.size(); ++i) {
        if (!token_bytes_[i].empty()) tokens_.push_back(static_cast<Token>(i));
        if (token_bytes_[i].size() > kLongestToken) {
            throw std::invalid_argument("a token has more than 60000 bytes");
        }
    }
    const auto text_of = [this](Token token) -> const std::string& {
        return token_bytes_[static_cast<std::size_t>(token)];
    };
    std::sort(tokens_.begin(), tokens_.end(), [&](Token a, Token b) {
        const int order = text_of(a).compare(text_of(b));
        return order != 0 ? order < 0 : a < b;
    });
    nodes_.push_back({0, 0, 0, 0, false});
    parents_.push_back(0);
    std::vector<NodeIndex> path{0};  // the nodes from the root to the last token
    const std::string* previous = nullptr;
    for (std::uint32_t i = 0; i < tokens_.size(); ++i) {
        const std::string& text = text_of(tokens_[i]);
        std::size_t common = 0;
        if (previous) {
            const std::size_t most = std::min(previous->size(), text.size());
            while (common < most && (*previous)[common] == text[common]) ++common;
        }
        while (path.size() > common + 1) {
            nodes_[path.back()].end = static_cast<NodeIndex>(nodes_.size());
            path.pop_back();
        }
        for (std::size_t depth = common; depth < text.size(); ++depth) {
            const auto index = static_cast<NodeIndex>(nodes_.size());
            nodes_.push_back({0, i, static_cast<std::uint16_t>(depth + 1),
                              static_cast<std::uint8_t>(text[depth]), false});
            parents_.push_back(path.back());
            path.push_back(index);
        }
        nodes_[path.back()].has_token = true;
        max_depth_ = std::max(max_depth_, nodes_[path.back()].depth);
        previous = &text;
    }
    for (NodeIndex index : path) nodes_[index].end = static_cast<NodeIndex>(nodes_.size());
    const auto num_nodes = static_cast<NodeIndex>(nodes_.size());
    nodes_.push_back({num_nodes, static_cast<std::uint32_t>(tokens_.size()), 0, 0, false});
    for (NodeIndex at = 1; at < num_nodes; at = nodes_[at].end) root_children_[nodes_[at].byte] = at;
    ByteSet singles;
    ByteSet alphabet;
    for (NodeIndex at = 1; at < num_nodes; ++at) {
        alphabet.add(nodes_[at].byte);
        if (nodes_[at].depth == 1 && nodes_[at].has_token) singles.add(nodes_[at].byte);
    }
    spells_every_text_ = singles == alphabet;
    classes_below_.resize(num_nodes);
    for (NodeIndex at = num_nodes; --at > 0;) {
        classes_below_[parents_[at]] |= classes_below_[at] | class_of(nodes_[at].byte);
    }
    by_length_ = tokens_;
    std::stable_sort(by_length_.begin(), by_length_.end(), [&](Token a, Token b) {
        return text_of(a).size() > text_of(b).size();
    });
}

std::size_t Vocabulary::num_longer_tokens(Count num_bytes, std::size_t most) const {
    std::size_t count = 0;
    while (count <= most && count < by_length_.size() &&
           static_cast<Count>(bytes_of(by_length_[count]).size()) > num_bytes) {
        ++count;
    }
    return count;
}

NodeIndex Vocabulary::child(NodeIndex node, std::uint8_t byte) const {
    if (!node) return root_children_[byte];
    const NodeIndex end = nodes_[node].end;
    for (NodeIndex at = node + 1; at < end && nodes_[at].byte <= byte; at = nodes_[at].end) {
        if (nodes_[at].byte == byte) return at;
    }
    return 0;
}

NodeIndex Vocabulary::find(std::string_view prefix) const {
    NodeIndex node = 0;
    for (char each : prefix) {
        node = child(node, static_cast<std::uint8_t>(each));
        if (!node) return 0;
    }
    return node;
}

std::string Vocabulary::path(NodeIndex node) const {
    std::string backwards;
    for (; node; node = parents_[node]) backwards.push_back(static_cast<char>(nodes_[node].byte));
    return {backwards.rbegin(), backwards.rend()};
}

std::optional<std::vector<Token>> Vocabulary::fewest_tokens(std::string_view text) const {
    constexpr std::uint32_t kNone = ~std::uint32_t{0};
    struct Choice {
        Token token;
        std::uint32_t end;
    };
    // Tokens needed from each position on, and the first of them.
    std::vector<std::uint32_t> best(text.size() + 1, kNone);
    std::vector<Choice> choices(text.size());
    best[text.size()] = 0;
    for (std::size_t start = text.size(); start-- > 0;) {
        NodeIndex node = 0;
        for (std::size_t at = start; at < text.size();) {
            node = child(node, static_cast<std::uint8_t>(text[at]));
            if (!node) break;
            ++at;
            if (best[at] == kNone || !nodes_[node].has_token) continue;
            if (best[start] == kNone || best[at] + 1 <= best[start]) {
                best[start] = best[at] + 1;
                choices[start] = {tokens_[nodes_[node].first_token],
                                  static_cast<std::uint32_t>(at)};
            }
        }
    }
    if (best[0] == kNone) return std::nullopt;
    std::vector<Token> tokens;
    for (std::size_t at = 0; at < text.size(); at = choices[at].end) {
        tokens.push_back(choices[at].token);
    }
    return tokens;
}

}  // namespace palmette
