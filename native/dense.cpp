#include "dense.h"

#include <algorithm>

#include "dispatch.h"
#include "threads.h"

namespace infinilm {

namespace {

constexpr int kTaskRows = 192;     // a multiple of those that are multiplied at a time
constexpr int kTaskOutputs = 64;   // the widest tile's, on any instruction set
constexpr int kLeastOutputs = 16;  // the widest vector's

int64_t divide_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit; }

}  // namespace

void multiply_dense(const FloatProduct& product) {
    if (product.rows == 0 || product.outputs == 0) return;
    const auto multiply = product.is_table ? kernels().multiply_float_table : kernels().multiply_floats;
    // Of few rows a task reads as much of each line as there is for it; of many all use a narrow strip of the matrix.
    const bool is_few = product.rows <= kFewFloatRows;
    const int64_t share = divide_up(product.outputs, num_threads());
    const int64_t rows = is_few ? product.rows : kTaskRows;
    const int64_t outputs = is_few ? divide_up(share, kLeastOutputs) * kLeastOutputs : kTaskOutputs;
    const int64_t blocks = divide_up(product.rows, rows);
    parallel_for(blocks * divide_up(product.outputs, outputs), 1, [&](int64_t task) {
        const int64_t row = task % blocks * rows, end_row = std::min(row + rows, product.rows);
        const int64_t output = task / blocks * outputs, end_output = std::min<int64_t>(output + outputs, product.outputs);
        for (int64_t r = row; r < end_row; ++r) {
            std::fill(product.out + r * product.outputs + output, product.out + r * product.outputs + end_output, 0.0f);
        }
        multiply(product, row, end_row, int(output), int(end_output));
    });
}

}  // namespace infinilm
