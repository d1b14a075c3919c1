#include "dense.h"

#include <algorithm>

#include "dispatch.h"
#include "memory.h"
#include "threads.h"

namespace infinilm {

namespace {

constexpr int kTaskRows = 192;     // a multiple of the rows that are multiplied at a time
constexpr int kTaskOutputs = 64;   // outputs of the widest tile of all instruction sets
constexpr int kLeastOutputs = 16;  // lanes of the widest vector

int64_t divide_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit; }

// How a product is divided into tasks of `rows` rows and `outputs` outputs.
struct Division {
    int64_t first_task, row_blocks, rows, outputs;
    float* sums;  // [rows, outputs] of the product, if a bias or accumulation follows; else null

    static Division of(const FloatProduct& p, int64_t first_task) {
        // With few rows, each thread gets one task with an equal share of every line. With many rows, tasks use narrow
        // strips of the matrix.
        const bool is_few = p.rows <= kFewFloatRows;
        const int64_t share = divide_up(divide_up(p.matrix.outputs, num_threads()), kLeastOutputs) * kLeastOutputs;
        const int64_t rows = is_few ? std::max<int64_t>(1, p.rows) : kTaskRows;
        return {first_task, divide_up(p.rows, rows), rows, is_few ? share : kTaskOutputs, nullptr};
    }
};

// Compute some rows and outputs of a product.
void run_task(const DenseProduct& own, float* sums, int64_t row, int64_t end_row, int output, int end_output) {
    const Kernels& k = kernels();
    FloatProduct product = own.product;
    const int64_t outputs = end_output - output;
    if (sums != nullptr) product.out = sums, product.out_stride = product.matrix.outputs;
    for (int64_t r = row; r < end_row; ++r) {
        float* from = product.out + r * product.out_stride + output;
        std::fill(from, from + outputs, 0.0f);
    }
    const auto multiply = product.matrix.is_table ? k.multiply_float_table : k.multiply_floats;
    multiply(product, row, end_row, output, end_output);
    for (int64_t r = row; sums != nullptr && r < end_row; ++r) {
        float* from = product.out + r * product.out_stride + output;
        float* to = own.product.out + r * own.product.out_stride + output;
        for (int64_t i = 0; own.bias != nullptr && i < outputs; ++i) from[i] += own.bias[output + i];
        for (int64_t i = 0; i < outputs; ++i) to[i] = own.accumulate ? to[i] + from[i] : from[i];
    }
}

}  // namespace

void multiply_dense(const std::vector<DenseProduct>& products) {
    static thread_local Buffer<float> memory;
    static thread_local std::vector<Division> divisions;
    divisions.clear();
    int64_t tasks = 0, num_sums = 0;
    for (const DenseProduct& each : products) {
        const FloatProduct& p = each.product;
        divisions.push_back(Division::of(p, tasks));
        tasks += divisions.back().row_blocks * divide_up(p.matrix.outputs, divisions.back().outputs);
        if (each.bias != nullptr || each.accumulate) num_sums += p.rows * p.matrix.outputs;
    }
    float* sums = memory.reserve(num_sums);
    for (size_t i = 0; i < products.size(); ++i) {
        if (products[i].bias == nullptr && !products[i].accumulate) continue;
        divisions[i].sums = sums;
        sums += products[i].product.rows * products[i].product.matrix.outputs;
    }
    const std::vector<Division>& found = divisions;  // the calling thread's; `divisions` is thread_local
    parallel_for(tasks, 1, [&](int64_t task) {
        size_t i = found.size() - 1;
        while (found[i].first_task > task) --i;
        const FloatProduct& p = products[i].product;
        const Division& own = found[i];
        const int64_t place = task - own.first_task;
        const int64_t row = place % own.row_blocks * own.rows, output = place / own.row_blocks * own.outputs;
        run_task(products[i], own.sums, row, std::min(row + own.rows, p.rows), int(output),
                 int(std::min<int64_t>(output + own.outputs, p.matrix.outputs)));
    });
}

}  // namespace infinilm
