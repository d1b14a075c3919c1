// Products with dense matrices, on all threads.
#pragma once

#include "kernels.h"

namespace infinilm {

// The product, into its `out`.
void multiply_dense(const FloatProduct& product);

}  // namespace infinilm
