// Threads that share the items of one task after the other, without torch and without OpenMP.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace palmette {

// The caller works too, and takes every item that no other thread has begun: threads that the
// system has put aside hold nobody up but for the item they are at. A thread that finds nothing
// to do spins for some microseconds, yields, and then sleeps, so that it takes nothing from others
// who share the processor.
class Pool {
public:
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

    // Calls work(item) for each item below `count`, in any order, on any thread; returns when all
    // are done. One caller at a time. `work` must not throw.
    template <class Work> void each(int64_t count, const Work& work) {
        if (count <= 0) return;
        if (count == 1 || threads_.empty()) {
            for (int64_t item = 0; item < count; ++item) work(item);
            return;
        }
        run([](const void* self, int64_t item,
               int) { (*static_cast<const Work*>(self))(item); },
            &work, count);
    }

    // The same for items of which neighbours lie side by side in memory: each thread goes through
    // a range of its own in order, and then helps others with what is left of theirs. `done(thread)`
    // is called by each that worked when it finds nothing more to do.
    template <class Work, class Done>
    void each_in_ranges(int64_t count, const Work& work, const Done& done) {
        const int num = num_threads();
        if (count <= 0) return;
        if (num == 1) {
            for (int64_t item = 0; item < count; ++item) work(item);
            done(0);
            return;
        }
        for (int i = 0; i < num; ++i) ranges_[static_cast<std::size_t>(i)].next = count * i / num;
        const auto go = [&](int thread) {
            for (int i = 0; i < num; ++i) {
                const int owner = (thread + i) % num;
                std::atomic<int64_t>& next = ranges_[static_cast<std::size_t>(owner)].next;
                const int64_t end = count * (owner + 1) / num;
                for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < end;)
                    work(item);
            }
            done(thread);
        };
        using Go = decltype(go);
        run([](const void* self, int64_t, int thread) { (*static_cast<const Go*>(self))(thread); },
            &go, num);
    }

private:
    using Call = void (*)(const void*, int64_t item, int thread);

    struct alignas(64) Range {
        std::atomic<int64_t> next{0};  // of its items
    };

    void run(Call call, const void* self, int64_t count);
    bool help(int thread);
    void serve(int thread);

    // The number of the task above, how many of its items nobody has begun below.
    std::atomic<uint64_t> open_{0};
    std::atomic<int64_t> unfinished_{0};
    Call call_ = nullptr;
    const void* self_ = nullptr;
    std::atomic<int> sleeping_{0};
    std::atomic<bool> is_over_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    int64_t owner_ = 0;  // the process that made the threads
    std::vector<Range> ranges_;
    std::vector<std::thread> threads_;
};

// The calling thread's own pool of so many, kept until the thread ends: what it does one after the
// other shares the threads, which as a rule still spin for the next task and need not be woken.
Pool& own_pool(int num_threads);

}  // namespace palmette
