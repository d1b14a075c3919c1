#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <mutex>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace infinilm {
namespace {

constexpr size_t kLargePage = 2 << 20;
constexpr size_t kChunk = 32 << 20;  // mapped at once; unused parts cost nothing

std::shared_ptr<uint8_t> allocate_chunk(size_t num_bytes) {
    num_bytes = (num_bytes + kLargePage - 1) / kLargePage * kLargePage;
#if defined(__linux__)
    // Maps more than needed, so that the chunk can begin at a large page.
    const size_t mapped = num_bytes + kLargePage;
    void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    const auto begin = (reinterpret_cast<uintptr_t>(memory) + kLargePage - 1) / kLargePage * kLargePage;
    madvise(reinterpret_cast<void*>(begin), num_bytes, MADV_HUGEPAGE);  // a hint: not all systems have large pages
    return {reinterpret_cast<uint8_t*>(begin), [=](uint8_t*) { munmap(memory, mapped); }};
#else
    void* memory = ::operator new(num_bytes, std::align_val_t(64));
    std::memset(memory, 0, num_bytes);
    return {static_cast<uint8_t*>(memory), [](uint8_t* own) { ::operator delete(own, std::align_val_t(64)); }};
#endif
}

}  // namespace

std::shared_ptr<uint8_t> allocate_weights(size_t num_bytes) {
    static std::mutex mutex;
    static std::weak_ptr<uint8_t> current;  // the newest chunk, which lives as long as the weights in it
    static size_t used = 0;

    const size_t size = (num_bytes + 63) / 64 * 64;
    if (size > kChunk) return allocate_chunk(size);
    std::lock_guard lock(mutex);
    std::shared_ptr<uint8_t> chunk = current.lock();
    if (chunk == nullptr || used + size > kChunk) {
        current = chunk = allocate_chunk(kChunk);
        used = 0;
    }
    used += size;
    return {chunk, chunk.get() + used - size};
}

}  // namespace infinilm
