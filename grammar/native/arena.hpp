// Memory in blocks that are handed on from one grammar to the next, so that a new grammar need not
// ask the system for pages and wait for them to be cleared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <vector>

namespace palmette {

// Blocks of one size, of the whole process. May be used from any thread.
class Blocks {
  public:
    static constexpr std::size_t kBytes = std::size_t{1} << 16;
    static constexpr std::align_val_t kAlignment{64};

    static void* take();
    static void give_back(void* block);

  private:
    static constexpr std::size_t kMostKept = 256;
};

// Takes memory a little at a time and lets go of all of it at once; runs no destructors.
class Arena {
  public:
    Arena() = default;
    ~Arena() { clear(); }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    void clear();

    // Bytes that it has taken.
    std::size_t num_bytes() const { return num_bytes_; }

    // Room for `count` objects of a type, not yet constructed.
    template <class Type>
    Type* allocate(std::size_t count) {
        static_assert(alignof(Type) <= static_cast<std::size_t>(Blocks::kAlignment));
        const std::size_t num_bytes = count * sizeof(Type);
        std::size_t gap = -reinterpret_cast<std::uintptr_t>(next_) & (alignof(Type) - 1);
        if (gap + num_bytes > left_) {
            add_block(num_bytes);
            gap = 0;
        }
        auto* place = reinterpret_cast<Type*>(next_ + gap);
        next_ += gap + num_bytes;
        left_ -= gap + num_bytes;
        return place;
    }

    // A copy of an array.
    template <class Type>
    const Type* copy(const Type* from, std::size_t count) {
        static_assert(std::is_trivially_copyable_v<Type>);
        Type* to = allocate<Type>(count);
        for (std::size_t i = 0; i < count; ++i) new (to + i) Type(from[i]);
        return to;
    }

  private:
    // Most grammars are small.
    static constexpr std::size_t kFirstBytes = std::size_t{1} << 13;

    void add_block(std::size_t num_bytes);

    std::vector<void*> blocks_;
    std::vector<void*> large_;  // of sizes of their own
    std::size_t num_bytes_ = 0;
    char* next_ = nullptr;
    std::size_t left_ = 0;
};

}  // namespace palmette
