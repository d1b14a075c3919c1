// Memory for weights and for what lies between two kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace infinilm {

// Memory that only grows, aligned to cache lines. What was in it is lost when it does.
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

// Zeros that are there as long as somebody holds them. Weights taken one after the other lie side by side in large
// pages: a step reads all of them, and looking up small pages would take it longer than the reading.
std::shared_ptr<uint8_t> allocate_weights(size_t num_bytes);

}  // namespace infinilm
