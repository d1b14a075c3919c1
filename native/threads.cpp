#include "threads.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace infinilm {
namespace {

// Microseconds pass between two pieces of a step's work, somewhat more between two steps. A thread spins this long
// before it sleeps. That is enough to be awake for the next piece, and does not block a core for long that others need.
constexpr auto kPatience = std::chrono::microseconds(200);

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Pool {
public:
    explicit Pool(int threads) : shares_(threads) {
        for (int i = 1; i < threads; ++i) threads_.emplace_back([this, i] { serve(i); });
    }

    ~Pool() {
        is_over_.store(true);
        open(~uint64_t(0));
        for (std::thread& thread : threads_) thread.join();
    }

    void run(int64_t tasks, void (*task)(const void*, int64_t), const void* context) {
        task_ = task;
        context_ = context;
        const int64_t count = int64_t(shares_.size());
        for (int64_t i = 0; i < count; ++i) {
            shares_[i].next.store(tasks * i / count, std::memory_order_relaxed);
            shares_[i].end = tasks * (i + 1) / count;
        }
        open(++number_);
        work(0);
        // All tasks are taken, so threads that have not entered yet need not. Wait for those that have.
        open_.store(0);
        for (int spins = 0; inside_.load() > 0; ++spins) {
            if (spins < 4096) {
                pause();
            } else {
                std::this_thread::yield();  // there may be fewer cores than threads
            }
        }
    }

private:
    // Let threads enter this piece of work. A thread that enters sees everything that was written before.
    void open(uint64_t number) {
        latest_.store(number);
        open_.store(number);
        if (sleepers_.load() > 0) {
            { std::lock_guard lock(mutex_); }  // afterwards a thread has seen the number, or sleeps and is woken
            wake_.notify_all();
        }
    }

    // A thread processes its own share in order, so that it reads memory in order. Then it helps with the other shares.
    void work(size_t thread) {
        for (size_t i = 0; i < shares_.size(); ++i) {
            Share& share = shares_[(thread + i) % shares_.size()];
            for (;;) {
                const int64_t index = share.next.fetch_add(1, std::memory_order_relaxed);
                if (index >= share.end) break;
                task_(context_, index);
            }
        }
    }

    void serve(int thread) {
        for (uint64_t seen = 0;;) {
            seen = wait_for_other_than(seen);
            if (is_over_.load()) return;
            inside_.fetch_add(1);  // from here on the piece stays; the next line checks that it is still open
            if (open_.load() != 0) work(thread);
            inside_.fetch_sub(1);
        }
    }

    uint64_t wait_for_other_than(uint64_t seen) {
        for (;;) {
            const uint64_t latest = latest_.load();
            const auto begin = std::chrono::steady_clock::now();
            for (int spins = 0;; ++spins) {
                const uint64_t number = open_.load(std::memory_order_relaxed);
                if (number != 0 && number != seen) return number;
                pause();
                if (spins % 64 == 63 && std::chrono::steady_clock::now() - begin > kPatience) break;
            }
            // A thread that wakes after its piece of work is over spins for the next one, which usually follows at
            // once.
            std::unique_lock lock(mutex_);
            sleepers_.fetch_add(1);
            wake_.wait(lock, [&] { return latest_.load() != latest; });
            sleepers_.fetch_sub(1);
        }
    }

    struct alignas(64) Share {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };

    std::vector<Share> shares_;
    std::vector<std::thread> threads_;
    void (*task_)(const void*, int64_t) = nullptr;
    const void* context_ = nullptr;
    uint64_t number_ = 0;  // the number of the piece of work
    alignas(64) std::atomic<int> inside_{0};
    alignas(64) std::atomic<uint64_t> open_{0};  // the number of the piece that may be entered; 0: none
    alignas(64) std::atomic<uint64_t> latest_{0};  // the number of the piece that was opened last
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> is_over_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
};

std::mutex running;
std::atomic<int> count{1};
Pool* pool = nullptr;  // never destroyed at exit: its threads may be in use until then

}  // namespace

void set_num_threads(int wanted) {
    std::lock_guard lock(running);
    if (wanted == count.load()) return;
    delete pool;
    pool = wanted > 1 ? new Pool(wanted) : nullptr;
    count.store(wanted);
}

int num_threads() { return count.load(); }

void detail::run_tasks(int64_t tasks, void (*task)(const void*, int64_t), const void* context) {
    if (tasks > 1) {
        std::unique_lock lock(running, std::try_to_lock);
        if (lock && pool != nullptr) return pool->run(tasks, task, context);
    }
    for (int64_t i = 0; i < tasks; ++i) task(context, i);
}

}  // namespace infinilm
