#include "token_set.hpp"

#include <array>

namespace palmette {

namespace {

// For each byte its bits as eight bytes of 0 or 1, the lowest first.
const std::array<std::array<std::uint8_t, 8>, 256>& spread_bits() {
    static const auto table = [] {
        std::array<std::array<std::uint8_t, 8>, 256> made{};
        for (std::size_t byte = 0; byte < 256; ++byte) {
            for (std::size_t bit = 0; bit < 8; ++bit) {
                made[byte][bit] = static_cast<std::uint8_t>(byte >> bit & 1);
            }
        }
        return made;
    }();
    return table;
}

void erase(std::vector<std::uint64_t>& words, Token token) {
    words[static_cast<std::size_t>(token) >> 6] &= ~(std::uint64_t{1} << (token & 63));
}

}  // namespace

void TokenSet::write_bools(std::uint8_t* row, std::size_t num_rows) const {
    if (base_) {
        const auto& table = spread_bits();
        const std::size_t num_whole = num_rows / 64;
        for (std::size_t i = 0; i < num_whole; ++i) {
            const std::uint64_t word = base_->words[i];
            for (std::size_t j = 0; j < 8; ++j) {
                std::memcpy(row + 64 * i + 8 * j, table[word >> (8 * j) & 255].data(), 8);
            }
        }
        for (std::size_t token = 64 * num_whole; token < num_rows; ++token) {
            row[token] = base_->contains(static_cast<Token>(token));
        }
    } else {
        std::memset(row, 0, num_rows);
    }
    for (Token token : removed_) row[token] = 0;
    for (Token token : added_) row[token] = 1;
}

TokenSet TokenSet::without(std::vector<Token> tokens) const {
    std::sort(tokens.begin(), tokens.end());
    TokenSet set;
    set.base_ = base_;
    std::set_difference(added_.begin(), added_.end(), tokens.begin(), tokens.end(),
                        std::back_inserter(set.added_));
    if (base_) {
        std::vector<Token> in_base;
        for (Token token : tokens) {
            if (base_->contains(token)) in_base.push_back(token);
        }
        std::set_union(removed_.begin(), removed_.end(), in_base.begin(), in_base.end(),
                       std::back_inserter(set.removed_));
    }
    return set;
}

void TokenSetBuilder::add(const TokenSet& set) {
    if (set.base_ && !base_) {
        base_ = set.base_;
        removed_ = set.removed_;
    } else if (set.base_ && base_ == set.base_) {
        std::vector<Token> common;
        std::set_intersection(removed_.begin(), removed_.end(), set.removed_.begin(),
                              set.removed_.end(), std::back_inserter(common));
        removed_.swap(common);
    } else if (set.base_) {
        own_base();
        auto words = set.base_->words;
        for (Token token : set.removed_) erase(words, token);
        for (std::size_t i = 0; i < num_words_; ++i) own_->words[i] |= words[i];
    }
    for (Token token : set.added_) add(token);
}

void TokenSetBuilder::own_base() {
    if (own_) return;
    own_ = std::make_shared<PackedTokens>();
    if (base_) {
        own_->words = base_->words;
        for (Token token : removed_) erase(own_->words, token);
    } else {
        own_->words.assign(num_words_, 0);
    }
    base_ = own_;
    removed_.clear();
    const auto single = std::move(tokens_);
    tokens_.clear();
    for (Token token : single) add(token);
}

TokenSet TokenSetBuilder::finish() {
    if (own_) {
        own_->count_up();
        TokenSet set;
        set.base_ = own_;
        return set;
    }
    std::sort(tokens_.begin(), tokens_.end());
    tokens_.erase(std::unique(tokens_.begin(), tokens_.end()), tokens_.end());
    TokenSet set;
    set.base_ = base_;
    if (!base_) {
        set.added_ = std::move(tokens_);
    } else {
        for (Token token : tokens_) {
            if (!base_->contains(token)) set.added_.push_back(token);
        }
        std::set_difference(removed_.begin(), removed_.end(), tokens_.begin(), tokens_.end(),
                            std::back_inserter(set.removed_));
    }
    set.added_.shrink_to_fit();
    set.removed_.shrink_to_fit();
    return set;
}

}  // namespace palmette
