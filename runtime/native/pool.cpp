#include "pool.hpp"

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace palmette {

namespace {

constexpr int kSpins = 2000;  // some tens of microseconds
constexpr int kYields = 50;
constexpr uint64_t kItems = 0xffffffff;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int num_threads) : ranges_(static_cast<std::size_t>(num_threads)) {
#if defined(__unix__) || defined(__APPLE__)
    owner_ = getpid();
#endif
    for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { serve(i); });
}

Pool::~Pool() {
#if defined(__unix__) || defined(__APPLE__)
    if (getpid() != owner_) {  // after a fork: the threads are the other process's
        for (auto& thread : threads_) thread.detach();
        return;
    }
#endif
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_over_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void Pool::run(Call call, const void* self, int64_t count) {
    call_ = call;
    self_ = self;
    unfinished_.store(count, std::memory_order_relaxed);
    const uint64_t task = (open_.load(std::memory_order_relaxed) | kItems) + 1;
    open_.store(task | static_cast<uint64_t>(count));
    if (sleeping_.load() > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    while (help(0)) {
    }
    for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0; ++spins) {
        if (spins < kSpins) {
            pause();
        } else {
            std::this_thread::yield();
        }
    }
}

// Does one item, if there is one that nobody has begun.
bool Pool::help(int thread) {
    uint64_t open = open_.load(std::memory_order_acquire);
    do {
        if ((open & kItems) == 0) return false;
        // Whoever takes an item keeps the task from ending, so that what it reads of it is its own.
    } while (!open_.compare_exchange_weak(open, open - 1, std::memory_order_acq_rel));
    call_(self_, static_cast<int64_t>(open & kItems) - 1, thread);
    unfinished_.fetch_sub(1, std::memory_order_release);
    return true;
}

void Pool::serve(int thread) {
    while (true) {
        int idle = 0;
        while (idle < kSpins + kYields) {
            if (help(thread)) {
                idle = 0;
            } else if (++idle < kSpins) {
                pause();
            } else {
                std::this_thread::yield();
            }
            if (is_over_.load(std::memory_order_relaxed)) return;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        ++sleeping_;
        wake_.wait(lock, [this] { return is_over_ || (open_.load() & kItems) != 0; });
        --sleeping_;
        if (is_over_) return;
    }
}

Pool& own_pool(int num_threads) {
    static thread_local std::vector<std::unique_ptr<Pool>> pools;  // as a rule there is one
    for (const auto& pool : pools)
        if (pool->num_threads() == num_threads) return *pool;
    pools.push_back(std::make_unique<Pool>(num_threads));
    return *pools.back();
}

}  // namespace palmette
