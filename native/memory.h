// Memory for weights and for results between two kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace infinilm {

// Memory that only grows, aligned to cache lines. Growing loses its contents.
template <typename T>
class Buffer {
public:
    T* reserve(size_t count) {
        if (count > size_) {
            memory_.reset();
            memory_.reset(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64))));
            size_ = count;
        }
        return memory_.get();
    }

private:
    struct Free {
        void operator()(T* memory) const { ::operator delete(memory, std::align_val_t(64)); }
    };
    std::unique_ptr<T, Free> memory_;
    size_t size_ = 0;
};

// Zeroed memory, freed with its last pointer. Successive allocations are adjacent in large pages: a step reads all
// weights, and with small pages the page lookups would take longer than the reads.
std::shared_ptr<uint8_t> allocate_weights(size_t num_bytes);

}  // namespace infinilm
