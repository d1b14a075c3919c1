// Products of float32 matrices. A result is the sum of its products in the order of the inputs, so that no bit of a row
// depends on how many rows are computed beside it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels.h"
#include "simd.h"

namespace infinilm::INFINILM_ISA {

// A tile's sums stay in registers: so many rows times so many vectors of outputs.
constexpr int kFloatRows = 6;
constexpr int kFloatVectors = kLanes == 16 ? 4 : 2;
// Inputs after which the sums of a tile are put aside. Of few rows the lines of a run are asked for while the one before is
// multiplied. Of many rows all use a run's weights in turn, which stay near meanwhile.
constexpr int kFewRun = 16;
constexpr int kManyRun = 128;

// Add the products of a tile's rows with a run of lines, `stride` apart, to what is in `out`.
template <int kRows, int kVectors, bool kFetches>
inline void add_tile(const FloatProduct& p, int64_t row, const float* weight, int64_t stride, int first, int end, int output) {
    const float* x = p.x + row * p.inputs;
    float* out = p.out + row * p.outputs + output;
    Floats sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) sums[r][v] = load(out + int64_t(r) * p.outputs + v * kLanes);
    }
    for (int i = first; i < end; ++i, weight += stride) {
        Floats line[kVectors];
        for (int v = 0; v < kVectors; ++v) {
            if constexpr (kFetches) __builtin_prefetch(weight + kFewRun * stride + v * kLanes, 0, 2);
            line[v] = load(weight + v * kLanes);
        }
        for (int r = 0; r < kRows; ++r) {
            const Floats input = all(x[int64_t(r) * p.inputs + i]);
            for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(input, line[v], sums[r][v]);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) store(out + int64_t(r) * p.outputs + v * kLanes, sums[r][v]);
    }
}

// All rows of a part, kRows at a time as long as they fit.
template <int kRows, int kVectors, bool kFetches>
inline void add_rows(const FloatProduct& p, int64_t row, int64_t end_row, const float* weight, int64_t stride, int first, int end,
                     int output) {
    if constexpr (kRows > 0) {
        for (; row + kRows <= end_row; row += kRows) {
            add_tile<kRows, kVectors, kFetches>(p, row, weight, stride, first, end, output);
        }
        add_rows<kRows - 1, kVectors, kFetches>(p, row, end_row, weight, stride, first, end, output);
    }
}

// The last outputs, which fill no vector: lines and sums are copied, with zeros behind them.
inline void add_last(const FloatProduct& p, int64_t row, int64_t end_row, int output, int end_output) {
    const int count = end_output - output;
    alignas(64) float lines[kManyRun * kLanes], sums[kFloatRows * kLanes];
    for (int first = 0; count > 0 && first < p.inputs; first += kManyRun) {
        const int end = std::min(first + kManyRun, p.inputs);
        for (int i = first; i < end; ++i) {
            store(lines + (i - first) * kLanes, load_some(p.weight + int64_t(i) * p.outputs + output, count));
        }
        for (int64_t begin = row; begin < end_row; begin += kFloatRows) {
            const int rows = int(std::min<int64_t>(kFloatRows, end_row - begin));
            float* out = p.out + begin * p.outputs + output;
            const FloatProduct tile{p.x + begin * p.inputs, lines, sums, rows, p.inputs, kLanes, true, false};
            for (int r = 0; r < rows; ++r) store(sums + r * kLanes, load_some(out + int64_t(r) * p.outputs, count));
            add_rows<kFloatRows, 1, false>(tile, 0, rows, lines, kLanes, first, end, 0);
            for (int r = 0; r < rows; ++r) store_some(out + int64_t(r) * p.outputs, load(sums + r * kLanes), count);
        }
    }
}

// Call `function` with a number of vectors as a constant, and the first output, until fewer than a vector are left. Returns
// the first of these.
template <typename Function>
inline int for_vectors(int output, int end_output, const Function& function) {
    using std::integral_constant;
    constexpr int kWhole = kFloatVectors * kLanes;
    for (; output + kWhole <= end_output; output += kWhole) function(integral_constant<int, kFloatVectors>{}, output);
    if (kFloatVectors > 2 && output + 2 * kLanes <= end_output) {
        function(integral_constant<int, 2>{}, output);
        output += 2 * kLanes;
    }
    if (output + kLanes <= end_output) {
        function(integral_constant<int, 1>{}, output);
        output += kLanes;
    }
    return output;
}

void multiply_floats(const FloatProduct& p, int64_t row, int64_t end_row, int output, int end_output) {
    const bool is_few = end_row - row <= kFewFloatRows;
    const int run = is_few ? kFewRun : kManyRun;
    alignas(64) float lines[kManyRun * kFloatVectors * kLanes];
    int last = output;
    for (int first = 0; first < p.inputs; first += run) {
        const int end = std::min(first + run, p.inputs);
        last = for_vectors(output, end_output, [&](auto vectors, int o) {
            constexpr int kWidth = vectors * kLanes;
            const float* weight = p.weight + int64_t(first) * p.outputs + o;
            if (is_few) return add_rows<kFloatRows, vectors, true>(p, row, end_row, weight, p.outputs, first, end, o);
            for (int i = first; i < end; ++i, weight += p.outputs) {
                std::memcpy(lines + (i - first) * kWidth, weight, kWidth * sizeof(float));
            }
            add_rows<kFloatRows, vectors, false>(p, row, end_row, lines, kWidth, first, end, o);
        });
    }
    add_last(p, row, end_row, last, end_output);
}

// ---- tables: a line of the weight is an output's ----

// The products of a tile of kLanes results: inputs are the lanes, which are added up in the end. Rows and outputs beyond the
// ends are computed as the last ones, and not written.
template <int kRows>
inline void multiply_table_tile(const FloatProduct& p, int64_t row, int64_t end_row, int output, int end_output) {
    constexpr int kOutputs = kLanes / kRows;
    const float *x[kRows], *lines[kOutputs];
    for (int r = 0; r < kRows; ++r) x[r] = p.x + std::min(row + r, end_row - 1) * p.inputs;
    for (int o = 0; o < kOutputs; ++o) lines[o] = p.weight + int64_t(std::min(output + o, end_output - 1)) * p.inputs;
    Floats sums[kLanes];
    for (int i = 0; i < kLanes; ++i) sums[i] = all(0.0f);
    const auto add = [&](const auto& read, int i) {
        Floats inputs[kRows];
        for (int r = 0; r < kRows; ++r) inputs[r] = read(x[r] + i);
#pragma GCC unroll 16
        for (int o = 0; o < kOutputs; ++o) {
            const Floats line = read(lines[o] + i);
            for (int r = 0; r < kRows; ++r) sums[o * kRows + r] = multiply_add(inputs[r], line, sums[o * kRows + r]);
        }
    };
    int i = 0;
    for (; i + kLanes <= p.inputs; i += kLanes) add([](const float* from) { return load(from); }, i);
    const int rest = p.inputs - i;
    if (rest > 0) add([rest](const float* from) { return load_some(from, rest); }, i);
    float results[kLanes];
    store(results, sums_of(sums));
    for (int o = 0; o < kOutputs && output + o < end_output; ++o) {
        for (int r = 0; r < kRows && row + r < end_row; ++r) p.out[(row + r) * p.outputs + output + o] += results[o * kRows + r];
    }
}

void multiply_float_table(const FloatProduct& p, int64_t row, int64_t end_row, int output, int end_output) {
    constexpr int kRows = kLanes / 4;
    if (end_row - row == 1) {
        for (; output < end_output; output += kLanes) multiply_table_tile<1>(p, row, end_row, output, end_output);
        return;
    }
    for (; output < end_output; output += kLanes / kRows) {
        for (int64_t r = row; r < end_row; r += kRows) multiply_table_tile<kRows>(p, r, end_row, output, end_output);
    }
}

}  // namespace infinilm::INFINILM_ISA
