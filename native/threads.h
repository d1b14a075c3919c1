// The threads that share out a kernel's work, and the one place that knows how many there are.
#pragma once

#include <cstdint>

namespace infinilm {

// How many threads work, the caller's included. Not to be changed while work is going on.
void set_num_threads(int count);
int num_threads();

namespace detail {
void run_tasks(int64_t tasks, void (*task)(const void* context, int64_t index), const void* context);
}

// Call `function(index)` for every index below `count`, on all threads, in any order; returns when all are done. A
// thread takes `grain` indices at a time. If another of the program's threads is at it already, this one works alone.
template <typename Function>
void parallel_for(int64_t count, int64_t grain, const Function& function) {
    const auto task = [&](int64_t index) {
        const int64_t end = (index + 1) * grain < count ? (index + 1) * grain : count;
        for (int64_t i = index * grain; i < end; ++i) function(i);
    };
    using Task = decltype(task);
    detail::run_tasks((count + grain - 1) / grain,
                      [](const void* context, int64_t index) { (*static_cast<const Task*>(context))(index); }, &task);
}

}  // namespace infinilm
