// The threads that divide a kernel's work. Their number is only known here.
#pragma once

#include <cstdint>

namespace infinilm {

// The number of threads, the caller's included. Must not be changed while work is running.
void set_num_threads(int count);
int num_threads();

namespace detail {
void run_tasks(int64_t tasks, void (*task)(const void* context, int64_t index), const void* context);
}

// Call `function(index)` for every index below `count`, on all threads, in any order; returns when all are done. A
// thread takes `grain` indices at a time. If another caller uses the threads already, the calling thread works alone.
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
