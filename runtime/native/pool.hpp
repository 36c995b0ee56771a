// Threads that share the items of one task after the other, without torch and without OpenMP.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
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
        run(
            [](const void* self, int64_t item) { (*static_cast<const Work*>(self))(item); }, &work,
            count);
    }

private:
    using Call = void (*)(const void*, int64_t);

    void run(Call call, const void* self, int64_t count);
    bool help();
    void serve();

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
    std::vector<std::thread> threads_;
};

}  // namespace palmette
