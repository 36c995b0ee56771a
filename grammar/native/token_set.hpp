// A set of tokens: a large one that many share, and the few by which this one differs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "vocabulary.hpp"

namespace palmette {

// Bit `t % 64` of word `t / 64` is token `t`.
struct PackedTokens {
    std::vector<std::uint64_t> words;
    std::size_t count = 0;

    bool contains(Token token) const {
        const auto index = static_cast<std::size_t>(token);
        return words[index >> 6] >> (index & 63) & 1;
    }

    void count_up() {
        count = 0;
        for (auto word : words) count += static_cast<std::size_t>(__builtin_popcountll(word));
    }
};

class TokenSet {
  public:
    std::size_t count() const {
        return (base_ ? base_->count : 0) + added_.size() - removed_.size();
    }

    // The one token of the set if there is exactly one, else -1.
    Token only() const {
        if (count() != 1) return -1;
        if (!base_) return added_[0];
        for (std::size_t i = 0; i < base_->words.size(); ++i) {
            for (auto word = base_->words[i]; word; word &= word - 1) {
                const auto token = static_cast<Token>(64 * i + __builtin_ctzll(word));
                if (contains(token)) return token;
            }
        }
        return added_[0];
    }

    bool contains(Token token) const {
        if (std::binary_search(added_.begin(), added_.end(), token)) return true;
        return base_ && base_->contains(token) &&
               !std::binary_search(removed_.begin(), removed_.end(), token);
    }

    // The set less some tokens of it.
    TokenSet without(std::vector<Token> tokens) const;

    // Bytes that this set takes besides its base.
    std::size_t num_bytes() const {
        return (added_.capacity() + removed_.capacity()) * sizeof(Token);
    }

    std::size_t num_bytes_of_base() const {
        return base_ ? base_->words.size() * sizeof(std::uint64_t) : 0;
    }

    // Make `row`, of `num_rows` bytes that are 0 or 1, exactly this set.
    void write_bools(std::uint8_t* row, std::size_t num_rows) const;

    // Make the words exactly this set; bit `t % 32` of word `t / 32` is token `t`.
    void write_bits(std::uint32_t* words, std::size_t num_words) const {
        std::size_t copied = 0;
        if (base_) {
            copied = std::min(num_words, base_->words.size() * 2);
            std::memcpy(words, base_->words.data(), copied * sizeof(std::uint32_t));
        }
        std::memset(words + copied, 0, (num_words - copied) * sizeof(std::uint32_t));
        for (Token token : removed_) words[token >> 5] &= ~(std::uint32_t{1} << (token & 31));
        for (Token token : added_) words[token >> 5] |= std::uint32_t{1} << (token & 31);
    }

    friend class TokenSetBuilder;

  private:
    std::shared_ptr<const PackedTokens> base_;
    std::vector<Token> added_;    // sorted, not in the base
    std::vector<Token> removed_;  // sorted, in the base
};

// Unites sets and single tokens.
class TokenSetBuilder {
  public:
    explicit TokenSetBuilder(std::size_t num_words) : num_words_(num_words) {}

    void add(Token token) {
        if (own_) {
            own_->words[static_cast<std::size_t>(token) >> 6] |= std::uint64_t{1} << (token & 63);
        } else if (!base_ || !removed_.empty() || !base_->contains(token)) {
            tokens_.push_back(token);
            if (tokens_.size() > most_single()) own_base();
        }
    }

    void add(const TokenSet& set);

    TokenSet finish();

  private:
    // More single tokens than this are packed: they would take more room than the bits.
    std::size_t most_single() const { return num_words_; }

    // Give this builder words of its own, with what is known so far but for single tokens.
    void own_base();

    std::size_t num_words_;
    std::shared_ptr<const PackedTokens> base_;
    std::shared_ptr<PackedTokens> own_;  // the base, where it is ours to change
    std::vector<Token> tokens_;
    std::vector<Token> removed_;
};

}  // namespace palmette
