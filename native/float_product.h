// Products of float32 rows and matrices of floats. A result is a sum of partial sums over kFloatRun inputs each, all in
// the order of the inputs. So a row's bits do not depend on the number of rows, and the error grows with the number of
// partial sums only.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels.h"
#include "numbers.h"
#include "simd.h"

namespace infinilm::INFINILM_ISA {

// A tile is kFloatRows rows times kFloatVectors vectors of outputs; its sums stay in registers.
constexpr int kFloatRows = 6;
constexpr int kFloatVectors = kLanes == 16 ? 4 : 2;
// With few rows, a run's lines are prefetched while the previous run is multiplied. With many rows, kManyLines lines
// are copied and stay in the cache while all rows are multiplied by them.
constexpr int kManyLines = 128;
constexpr int kLineBytes = 64;  // a cache line

// Some lines of a matrix, beginning at some output. Each line belongs to one input.
struct Lines {
    const void* numbers;
    int64_t stride;
    const float* scales;  // of the first line; null: none
    int64_t scale_stride;
    int first, group;     // the first line's input; inputs per group of scales

    Lines from_output(int output, int bytes) const {
        Lines lines = *this;
        lines.numbers = static_cast<const uint8_t*>(numbers) + int64_t(output) * bytes;
        if (scales != nullptr) lines.scales = scales + output;
        return lines;
    }
    const float* scales_of(int line) const {
        return scales == nullptr ? nullptr : scales + int64_t((first + line) / group - first / group) * scale_stride;
    }
};

inline Lines lines_of(const FloatMatrix& m, int first, int output, int bytes) {
    const float* scales = m.scales == nullptr ? nullptr : m.scales + (first / m.group) * m.scale_stride;
    const void* numbers = static_cast<const uint8_t*>(m.numbers) + first * m.stride * bytes;
    return Lines{numbers, m.stride, scales, m.scale_stride, first, m.group}.from_output(output, bytes);
}

// Add the products of a tile's rows and `count` lines from `begin` on to `out`.
template <FloatType kType, int kRows, int kVectors, bool kFetches>
inline void add_run(const float* x, int64_t x_stride, const Lines& lines, int begin, int count, float* out, int64_t out_stride) {
    constexpr int kBytes = kNumberBytes<kType>;
    Floats sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) sums[r][v] = all(0.0f);
    }
    const void* numbers = static_cast<const uint8_t*>(lines.numbers) + begin * lines.stride * kBytes;
    const auto add_line = [&](int i) {
        Floats line[kVectors];
        for (int v = 0; v < kVectors; ++v) {
            const int64_t place = i * lines.stride + v * kLanes;
            if constexpr (kFetches) {
                const uint8_t* ahead = static_cast<const uint8_t*>(numbers) + (place + kFloatRun * lines.stride) * kBytes;
                if (v * kLanes * kBytes % kLineBytes == 0) __builtin_prefetch(ahead, 0, 2);
            }
            line[v] = load_numbers<kType>(numbers, place);
        }
        for (int r = 0; r < kRows; ++r) {
            const Floats input = all(x[r * x_stride + i]);
            for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(input, line[v], sums[r][v]);
        }
    };
    if (count == kFloatRun) {
#pragma GCC unroll 2
        for (int i = 0; i < kFloatRun; ++i) add_line(i);
    } else {
        for (int i = 0; i < count; ++i) add_line(i);
    }
    const float* scales = lines.scales_of(begin);
    for (int v = 0; v < kVectors; ++v) {
        const Floats scale = scales == nullptr ? all(1.0f) : load(scales + v * kLanes);
        for (int r = 0; r < kRows; ++r) {
            float* place = out + r * out_stride + v * kLanes;
            store(place, multiply_add(sums[r][v], scale, load(place)));
        }
    }
}

// Multiply the rows `row` to `end_row` by `count` lines, kRows at a time while they fit, then fewer.
template <FloatType kType, int kRows, int kVectors, bool kFetches>
inline void add_rows(const FloatProduct& p, int64_t row, int64_t end_row, const Lines& lines, int count, int output) {
    if constexpr (kRows > 0) {
        for (; row + kRows <= end_row; row += kRows) {
            const float* x = p.x + row * p.matrix.inputs + lines.first;
            float* out = p.out + row * p.out_stride + output;
            for (int i = 0; i < count; i += kFloatRun) {
                add_run<kType, kRows, kVectors, kFetches>(x + i, p.matrix.inputs, lines, i, std::min(kFloatRun, count - i),
                                                          out, p.out_stride);
            }
        }
        add_rows<kType, kRows - 1, kVectors, kFetches>(p, row, end_row, lines, count, output);
    }
}

// The last outputs, fewer than a vector: their lines, scales and sums are copied and padded with zeros.
template <FloatType kType>
inline void add_last(const FloatProduct& p, int64_t row, int64_t end_row, int output, int end_output) {
    const int count = end_output - output;
    alignas(64) float numbers[kManyLines * kLanes], scales[kManyLines / kFloatRun * kLanes], sums[kFloatRows * kLanes];
    for (int first = 0; count > 0 && first < p.matrix.inputs; first += kManyLines) {
        const int num_lines = std::min(kManyLines, p.matrix.inputs - first);
        const Lines lines = lines_of(p.matrix, first, output, kNumberBytes<kType>);
        for (int i = 0; i < num_lines; ++i) {
            store(numbers + i * kLanes, load_some_numbers<kType>(lines.numbers, i * lines.stride, count));
            if (i % kFloatRun == 0 && lines.scales) store(scales + i / kFloatRun * kLanes, load_some(lines.scales_of(i), count));
        }
        const Lines copied{numbers, kLanes, lines.scales ? scales : nullptr, kLanes, first, kFloatRun};
        for (int64_t begin = row; begin < end_row; begin += kFloatRows) {
            const int rows = int(std::min<int64_t>(kFloatRows, end_row - begin));
            float* out = p.out + begin * p.out_stride + output;
            FloatProduct tile = p;
            tile.x += begin * p.matrix.inputs, tile.out = sums, tile.out_stride = kLanes;
            for (int r = 0; r < rows; ++r) store(sums + r * kLanes, load_some(out + r * p.out_stride, count));
            add_rows<FloatType::kFloat32, kFloatRows, 1, false>(tile, 0, rows, copied, num_lines, 0);
            for (int r = 0; r < rows; ++r) store_some(out + r * p.out_stride, load(sums + r * kLanes), count);
        }
    }
}

// Call `function(number of vectors, a constant; first output)` until fewer outputs than a vector are left. Returns the
// first of these.
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

template <FloatType kType>
void multiply_few(const FloatProduct& p, int64_t row, int64_t end_row, int output, int end_output) {
    int last = output;
    for (int first = 0; first < p.matrix.inputs; first += kFloatRun) {
        const int count = std::min(kFloatRun, p.matrix.inputs - first);
        last = for_vectors(output, end_output, [&](auto vectors, int o) {
            const Lines lines = lines_of(p.matrix, first, o, kNumberBytes<kType>);
            add_rows<kType, kFloatRows, vectors, true>(p, row, end_row, lines, count, o);
        });
    }
    add_last<kType>(p, row, end_row, last, end_output);
}

template <FloatType kType>
void multiply_many(const FloatProduct& p, int64_t row, int64_t end_row, int output, int end_output) {
    alignas(64) float numbers[kManyLines * kFloatVectors * kLanes];
    int last = output;
    for (int first = 0; first < p.matrix.inputs; first += kManyLines) {
        const int count = std::min(kManyLines, p.matrix.inputs - first);
        last = for_vectors(output, end_output, [&](auto vectors, int o) {
            constexpr int kWidth = vectors * kLanes;
            Lines lines = lines_of(p.matrix, first, o, kNumberBytes<kType>);
            for (int i = 0; i < count; ++i) {
                for (int v = 0; v < kWidth; v += kLanes) {
                    store(numbers + i * kWidth + v, load_numbers<kType>(lines.numbers, i * lines.stride + v));
                }
            }
            lines.numbers = numbers, lines.stride = kWidth;
            add_rows<FloatType::kFloat32, kFloatRows, vectors, false>(p, row, end_row, lines, count, o);
        });
    }
    add_last<kType>(p, row, end_row, last, end_output);
}

template <FloatType kType>
void multiply_floats_of(const FloatProduct& p, int64_t row, int64_t end_row, int output, int end_output) {
    const auto multiply = end_row - row <= kFewFloatRows ? multiply_few<kType> : multiply_many<kType>;
    multiply(p, row, end_row, output, end_output);
}

void multiply_floats(const FloatProduct& p, int64_t row, int64_t end_row, int output, int end_output) {
    switch (p.matrix.type) {
        case FloatType::kFloat32: return multiply_floats_of<FloatType::kFloat32>(p, row, end_row, output, end_output);
        case FloatType::kFloat16: return multiply_floats_of<FloatType::kFloat16>(p, row, end_row, output, end_output);
        case FloatType::kBFloat16: return multiply_floats_of<FloatType::kBFloat16>(p, row, end_row, output, end_output);
        case FloatType::kFloat8: return multiply_floats_of<FloatType::kFloat8>(p, row, end_row, output, end_output);
    }
}

// ---- tables: a line of the weight belongs to an output ----

// The products of a tile of kLanes results. Lanes hold different inputs and are added up at the end. Rows and outputs
// beyond the ends repeat the last ones and are not written.
template <FloatType kType, int kRows>
inline void multiply_table_tile(const FloatProduct& p, int64_t row, int64_t end_row, int output, int end_output) {
    constexpr int kOutputs = kLanes / kRows;
    const float* x[kRows];
    int64_t lines[kOutputs];
    for (int r = 0; r < kRows; ++r) x[r] = p.x + std::min(row + r, end_row - 1) * p.matrix.inputs;
    for (int o = 0; o < kOutputs; ++o) lines[o] = std::min(output + o, end_output - 1) * p.matrix.stride;
    Floats sums[kLanes];
    for (int i = 0; i < kLanes; ++i) sums[i] = all(0.0f);
    const auto add = [&](int i, int count) {
        Floats inputs[kRows];
        for (int r = 0; r < kRows; ++r) inputs[r] = load_some(x[r] + i, count);
#pragma GCC unroll 16
        for (int o = 0; o < kOutputs; ++o) {
            const Floats line = load_some_numbers<kType>(p.matrix.numbers, lines[o] + i, count);
            for (int r = 0; r < kRows; ++r) sums[o * kRows + r] = multiply_add(inputs[r], line, sums[o * kRows + r]);
        }
    };
    int i = 0;
    for (; i + kLanes <= p.matrix.inputs; i += kLanes) add(i, kLanes);
    if (i < p.matrix.inputs) add(i, p.matrix.inputs - i);
    float results[kLanes];
    store(results, sums_of(sums));
    for (int o = 0; o < kOutputs && output + o < end_output; ++o) {
        for (int r = 0; r < kRows && row + r < end_row; ++r) p.out[(row + r) * p.out_stride + output + o] += results[o * kRows + r];
    }
}

template <FloatType kType>
void multiply_table_of(const FloatProduct& p, int64_t row, int64_t end_row, int output, int end_output) {
    constexpr int kRows = kLanes / 4;
    if (end_row - row == 1) {
        for (; output < end_output; output += kLanes) multiply_table_tile<kType, 1>(p, row, end_row, output, end_output);
        return;
    }
    for (; output < end_output; output += kLanes / kRows) {
        for (int64_t r = row; r < end_row; r += kRows) multiply_table_tile<kType, kRows>(p, r, end_row, output, end_output);
    }
}

void multiply_float_table(const FloatProduct& p, int64_t row, int64_t end_row, int output, int end_output) {
    switch (p.matrix.type) {
        case FloatType::kFloat32: return multiply_table_of<FloatType::kFloat32>(p, row, end_row, output, end_output);
        case FloatType::kFloat16: return multiply_table_of<FloatType::kFloat16>(p, row, end_row, output, end_output);
        case FloatType::kBFloat16: return multiply_table_of<FloatType::kBFloat16>(p, row, end_row, output, end_output);
        case FloatType::kFloat8: return;  // has scales; tables have none
    }
}

}  // namespace infinilm::INFINILM_ISA
