// What products of rounded rows with packed weights have in common, whether numbers have 16 bits or 8.
//
// A panel's 16 rows are the lanes of the sums: nothing is added up across a vector, and a result's order of additions
// does not depend on how many rows are computed at a time.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace infinilm::INFINILM_ISA {

// So many rows at a time share the unpacking of a weight; three sums each have to stay in registers.
constexpr int kMaxRows = kLanes / 2;
// Weights are asked for so many bytes before they are needed. They lie in the order in which they are read, over panels
// and matrices, but the processor's own guesses end with every page. Of bytes that one row is multiplied with they are
// good: there are so few instructions for each line that reads run far ahead by themselves, and asking for distant
// lines would be in their way.
template <int kBits, int kRows>
constexpr size_t kAhead = kLanes == 16 && kBits == 8 && kRows == 1 ? 1024 : 8192;
constexpr int kParts = kPanelRows / kLanes;  // vectors for a panel's rows
constexpr int kManyPanels = 4;
// A tile is so many rows times so many vectors of weights: its sums, and those of a group, stay in registers, and what is
// read of a row serves all vectors.
constexpr int kTileRows = kLanes == 16 ? 6 : 3;
constexpr int kTileVectors = 2;
constexpr int kManyVectors = kManyPanels * kParts;
static_assert(kTaskUnit % kTileRows == 0 && kManyVectors % kTileVectors == 0);

// Into the second cache: a core can wait for few lines of the first, and drops requests beyond that.
template <size_t kBytes>
inline void fetch_ahead(const uint8_t* from) {
    for (size_t line = 0; line < kBytes; line += 64) __builtin_prefetch(from + line, 0, 2);
}

// Vector `quad` of a group: four columns of kLanes rows, one number a byte.
template <int kBits>
inline Bytes unpack(const uint8_t* group, int quad, int part) {
    const uint8_t* place = group + part * sizeof(Bytes);
    if constexpr (kBits == 8) {
        return load(place + quad * kVectorBytes);
    } else {
        // A shift moves 32 bits, so bits of the next byte come in. The mask removes them.
        const auto shifted = [&](const uint8_t* from, int right) { return (Bytes)((Ints)load(from) >> right); };
        Bytes q = shifted(place + quad / 2 * kVectorBytes, 4 * (quad % 2)) & 0x0f;
        const uint8_t* high = place + 4 * kVectorBytes;
        if constexpr (kBits == 5) {
            q |= (Bytes)((Ints)shifted(high, quad) << 4) & 0x10;
        }
        if constexpr (kBits == 6) {
            q |= (Bytes)((Ints)shifted(high + quad / 4 * kVectorBytes, 2 * (quad % 4)) << 4) & 0x30;
        }
        return q;
    }
}

// Write a row's results; the last panel may have fewer than 16 rows.
inline void write_tile(Floats sums, const float* bias, float* out, int lanes, bool accumulate) {
    float values[kLanes];
    if (lanes < kLanes) {
        store(values, sums);
        for (int i = 0; i < lanes; ++i) {
            const float value = bias ? values[i] + bias[i] : values[i];
            out[i] = accumulate ? out[i] + value : value;
        }
        return;
    }
    if (bias) sums += load(bias);
    if (accumulate) sums += load(out);
    store(out, sums);
}

// Where some rows' results go: sums of the blocks so far, and then `out`.
struct Results {
    float* sums;        // a row's are kTileVectors * kLanes
    const float* bias;  // or null
    float* out;
    int64_t stride;  // of out
    int columns;     // from `out` on
    bool accumulate;

    // Those of the row that comes so many rows later.
    Results after(int rows) const {
        return {sums + rows * kTileVectors * kLanes, bias, out + rows * stride, stride, columns, accumulate};
    }
};

// Formats that differ in name only share their kernels: that of the first.
constexpr int same_kernels(int format) {
    for (int other = 0; other < format; ++other) {
        const Format &a = kFormats[other], &b = kFormats[format];
        if (a.bits == b.bits && a.scales == b.scales && a.has_minimum == b.has_minimum && a.zero == b.zero) return other;
    }
    return format;
}

// That of functions by format that is for a matrix.
template <typename Function, Function... kFunctions>
inline Function choose(const Format* format) {
    constexpr Function functions[] = {kFunctions...};
    static_assert(sizeof functions / sizeof *functions == sizeof kFormats / sizeof *kFormats);
    return functions[format - kFormats];
}

#define INFINILM_CHOOSE_FORMAT(function)                                                                           \
    choose<decltype(&function<0>), function<same_kernels(0)>, function<same_kernels(1)>, function<same_kernels(2)>, \
           function<same_kernels(3)>, function<same_kernels(4)>, function<same_kernels(5)>,                        \
           function<same_kernels(6)>, function<same_kernels(7)>>(w.format)

}  // namespace infinilm::INFINILM_ISA
