// Products with matrices of floats, on all threads.
#pragma once

#include <vector>

#include "kernels.h"

namespace infinilm {

// What becomes of a product's sums.
struct DenseProduct {
    FloatProduct product;       // whose out is where results go
    const float* bias = nullptr;
    bool accumulate = false;    // add sums and bias to what is there
};

// All of them, shared out over the threads together.
void multiply_dense(const std::vector<DenseProduct>& products);

}  // namespace infinilm
