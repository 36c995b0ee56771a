#include "arena.hpp"

#include <mutex>

namespace palmette {

namespace {

struct Kept {
    std::mutex mutex;
    std::vector<void*> blocks;
};

// Never destroyed: grammars may outlive what is static.
Kept& kept() {
    static Kept* const all = new Kept;
    return *all;
}

}  // namespace

void* Blocks::take() {
    Kept& all = kept();
    {
        const std::lock_guard<std::mutex> lock(all.mutex);
        if (!all.blocks.empty()) {
            void* block = all.blocks.back();
            all.blocks.pop_back();
            return block;
        }
    }
    return ::operator new(kBytes, kAlignment);
}

void Blocks::give_back(void* block) {
    Kept& all = kept();
    {
        const std::lock_guard<std::mutex> lock(all.mutex);
        if (all.blocks.capacity() < kMostKept) all.blocks.reserve(kMostKept);
        if (all.blocks.size() < kMostKept) {
            all.blocks.push_back(block);
            return;
        }
    }
    ::operator delete(block, kAlignment);
}

void Arena::clear() {
    for (void* block : blocks_) Blocks::give_back(block);
    for (void* block : large_) ::operator delete(block, Blocks::kAlignment);
    blocks_.clear();
    large_.clear();
    next_ = nullptr;
    left_ = num_bytes_ = 0;
}

void Arena::add_block(std::size_t num_bytes) {
    // Room in the list first, so that no block is lost if there is no memory for it.
    if (num_bytes_ == 0 && num_bytes < kFirstBytes) num_bytes = kFirstBytes;
    if (num_bytes > Blocks::kBytes || num_bytes_ == 0) {
        large_.reserve(large_.size() + 1);
        large_.push_back(::operator new(num_bytes, Blocks::kAlignment));
        next_ = static_cast<char*>(large_.back());
        left_ = num_bytes;
        num_bytes_ += num_bytes;
        return;
    }
    if (blocks_.size() == blocks_.capacity()) blocks_.reserve(2 * blocks_.size() + 4);
    blocks_.push_back(Blocks::take());
    next_ = static_cast<char*>(blocks_.back());
    left_ = Blocks::kBytes;
    num_bytes_ += Blocks::kBytes;
}

}  // namespace palmette
