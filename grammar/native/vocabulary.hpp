// The tokens of a model as bytes, and their trie laid out for walking.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "byte_classes.hpp"
#include "byte_set.hpp"
#include "count.hpp"

namespace palmette {

using Token = std::int32_t;
using NodeIndex = std::uint32_t;

// Nodes in depth-first order: a subtree is the range [node, end), so what is not entered is
// skipped by one jump. Node 0 is the empty prefix. The tokens that end at a node are
// tokens[first_token .. first_token of the next node).
struct Node {
    NodeIndex end;
    std::uint32_t first_token;
    std::uint16_t depth;
    std::uint8_t byte;  // how its parent reaches it
    bool has_token;
};

class Vocabulary {
  public:
    // Tokens without bytes are never allowed, except that those of `stop_tokens` are where the
    // text is complete.
    Vocabulary(std::vector<std::string> token_bytes, std::vector<Token> stop_tokens,
               std::size_t num_rows);

    std::size_t num_rows() const { return num_rows_; }

    // 64-bit words of a packed mask.
    std::size_t num_words() const { return (num_rows_ + 63) / 64; }

    const std::vector<Token>& stop_tokens() const { return stop_tokens_; }

    bool is_stop_token(Token token) const {
        for (Token each : stop_tokens_) {
            if (each == token) return true;
        }
        return false;
    }

    // Empty for a token that stands for no text, and for one that does not exist.
    std::string_view bytes_of(Token token) const {
        const auto index = static_cast<std::size_t>(token);
        return index < token_bytes_.size() ? std::string_view(token_bytes_[index])
                                           : std::string_view();
    }

    // Whether each byte of any token is a token too, so that any text over them can be spelled.
    bool spells_every_text() const { return spells_every_text_; }

    // A shortest list of tokens that spells `text`, if any does.
    std::optional<std::vector<Token>> fewest_tokens(std::string_view text) const;

    // The trie

    const Node* nodes() const { return nodes_.data(); }

    const Node& node(NodeIndex index) const { return nodes_[index]; }

    // For each node the classes of all bytes of its subtree but its own; none if it is a leaf.
    const ByteClasses* classes_below() const { return classes_below_.data(); }

    std::uint16_t max_depth() const { return max_depth_; }

    // The node of the one-byte prefix, 0 if there is none.
    NodeIndex root_child(std::uint8_t byte) const { return root_children_[byte]; }

    NodeIndex child(NodeIndex node, std::uint8_t byte) const;

    // The node of a prefix that is not empty, 0 if no token begins with it.
    NodeIndex find(std::string_view prefix) const;

    // The prefix that the node stands for.
    std::string path(NodeIndex node) const;

    template <class Function>
    void for_each_token_at(NodeIndex index, Function function) const {
        const std::uint32_t end = nodes_[index + 1].first_token;
        for (std::uint32_t i = nodes_[index].first_token; i < end; ++i) function(tokens_[i]);
    }

    // The tokens that end below a node.
    template <class Function>
    void for_each_token_below(NodeIndex index, Function function) const {
        const std::uint32_t end = nodes_[nodes_[index].end].first_token;
        for (std::uint32_t i = nodes_[index + 1].first_token; i < end; ++i) function(tokens_[i]);
    }

    // The tokens of more than `num_bytes` bytes.
    template <class Function>
    void for_each_longer_token(Count num_bytes, Function function) const {
        for (Token token : by_length_) {
            if (static_cast<Count>(bytes_of(token).size()) <= num_bytes) return;
            function(token);
        }
    }

    // How many these are, if at most `most`.
    std::size_t num_longer_tokens(Count num_bytes, std::size_t most) const;

  private:
    static constexpr std::size_t kLongestToken = 60'000;

    std::vector<std::string> token_bytes_;
    std::vector<Token> stop_tokens_;
    std::size_t num_rows_;
    bool spells_every_text_ = false;
    std::vector<Node> nodes_;  // and one more, which ends the tokens of the last
    std::vector<ByteClasses> classes_below_;
    std::vector<NodeIndex> parents_;
    std::vector<Token> tokens_;     // in the order of their bytes
    std::vector<Token> by_length_;  // the longest first
    NodeIndex root_children_[256] = {};
    std::uint16_t max_depth_ = 0;
};

}  // namespace palmette
