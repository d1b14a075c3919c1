// Products with matrices of floats, run on all threads.
#pragma once

#include <vector>

#include "kernels.h"

namespace infinilm {

// A product, and what is done with its sums.
struct DenseProduct {
    FloatProduct product;       // results go to product.out
    const float* bias = nullptr;
    bool accumulate = false;    // add sums and bias to what is in out
};

// Compute all products; their tasks are divided among the threads together.
void multiply_dense(const std::vector<DenseProduct>& products);

}  // namespace infinilm
