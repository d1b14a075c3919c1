// Products of float32 matrices. A result is a sum of sums, each over kRun inputs, all in the order of the inputs. So no bit of
// a row depends on how many rows are computed beside it, and an error grows with the number of sums, not of inputs.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels.h"
#include "simd.h"

namespace infinilm::INFINILM_ISA {

// A tile's sums stay in registers: so many rows times so many vectors of outputs.
constexpr int kFloatRows = 6;
constexpr int kFloatVectors = kLanes == 16 ? 4 : 2;
constexpr int kRun = 32;  // inputs
// With few rows the lines of a run are prefetched while the one before is multiplied. With many, so many lines are copied, and
// stay in the cache while all rows are multiplied by them.
constexpr int kManyLines = 128;

// Add the products of a tile's rows and a run of lines, `stride` apart, to what is in `out`.
template <int kRows, int kVectors, bool kFetches>
inline void add_run(const float* x, int64_t x_stride, const float* weight, int64_t stride, int count, float* out,
                    int64_t out_stride) {
    Floats sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) sums[r][v] = all(0.0f);
    }
    const auto add_line = [&](int i) {
        Floats line[kVectors];
        for (int v = 0; v < kVectors; ++v) {
            const float* place = weight + i * stride + v * kLanes;
            if constexpr (kFetches) __builtin_prefetch(place + kRun * stride, 0, 2);
            line[v] = load(place);
        }
        for (int r = 0; r < kRows; ++r) {
            const Floats input = all(x[r * x_stride + i]);
            for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(input, line[v], sums[r][v]);
        }
    };
    if (count == kRun) {
#pragma GCC unroll 2
        for (int i = 0; i < kRun; ++i) add_line(i);
    } else {
        for (int i = 0; i < count; ++i) add_line(i);
    }
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
            float* place = out + r * out_stride + v * kLanes;
            store(place, load(place) + sums[r][v]);
        }
    }
}

// All rows of a part, kRows at a time as long as they fit, with the lines from `first` to `end`.
template <int kRows, int kVectors, bool kFetches>
inline void add_rows(const FloatProduct& p, int64_t row, int64_t end_row, const float* weight, int64_t stride, int first, int end,
                     int output) {
    if constexpr (kRows > 0) {
        for (; row + kRows <= end_row; row += kRows) {
            const float* x = p.x + row * p.inputs;
            float* out = p.out + row * p.outputs + output;
            for (int i = first; i < end; i += kRun) {
                add_run<kRows, kVectors, kFetches>(x + i, p.inputs, weight + (i - first) * stride, stride,
                                                   std::min(kRun, end - i), out, p.outputs);
            }
        }
        add_rows<kRows - 1, kVectors, kFetches>(p, row, end_row, weight, stride, first, end, output);
    }
}

// The last outputs, which fill no vector: lines and sums are copied, with zeros behind them.
inline void add_last(const FloatProduct& p, int64_t row, int64_t end_row, int output, int end_output) {
    const int count = end_output - output;
    alignas(64) float lines[kManyLines * kLanes], sums[kFloatRows * kLanes];
    for (int first = 0; count > 0 && first < p.inputs; first += kManyLines) {
        const int end = std::min(first + kManyLines, p.inputs);
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

inline void multiply_few(const FloatProduct& p, int64_t row, int64_t end_row, int output, int end_output) {
    int last = output;
    for (int first = 0; first < p.inputs; first += kRun) {
        const int end = std::min(first + kRun, p.inputs);
        last = for_vectors(output, end_output, [&](auto vectors, int o) {
            const float* weight = p.weight + int64_t(first) * p.outputs + o;
            add_rows<kFloatRows, vectors, true>(p, row, end_row, weight, p.outputs, first, end, o);
        });
    }
    add_last(p, row, end_row, last, end_output);
}

inline void multiply_many(const FloatProduct& p, int64_t row, int64_t end_row, int output, int end_output) {
    alignas(64) float lines[kManyLines * kFloatVectors * kLanes];
    int last = output;
    for (int first = 0; first < p.inputs; first += kManyLines) {
        const int end = std::min(first + kManyLines, p.inputs);
        last = for_vectors(output, end_output, [&](auto vectors, int o) {
            constexpr int kWidth = vectors * kLanes;
            for (int i = first; i < end; ++i) {
                std::memcpy(lines + (i - first) * kWidth, p.weight + int64_t(i) * p.outputs + o, kWidth * sizeof(float));
            }
            add_rows<kFloatRows, vectors, false>(p, row, end_row, lines, kWidth, first, end, o);
        });
    }
    add_last(p, row, end_row, last, end_output);
}

void multiply_floats(const FloatProduct& p, int64_t row, int64_t end_row, int output, int end_output) {
    const auto multiply = end_row - row <= kFewFloatRows ? multiply_few : multiply_many;
    multiply(p, row, end_row, output, end_output);
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
