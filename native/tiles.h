// Code shared by the products of rounded rows with packed weights, for 16 and for 8 bits.
//
// A panel's 16 rows are the lanes of the sums. So nothing is added across a vector, and the order of a result's
// additions does not depend on how many rows are computed at a time.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace infinilm::INFINILM_ISA {

// This many rows at a time share the unpacking of a weight. Three sums per row have to stay in registers.
constexpr int kMaxRows = kLanes / 2;
// How many bytes ahead weights are prefetched. Weights are stored in the order in which they are read, across panels
// and matrices, but the hardware prefetcher stops at the end of every page. For 8-bit weights and one row it suffices:
// there are so few instructions per line that reads run far ahead by themselves, and prefetching distant lines would
// hinder them.
template <int kBits, int kRows>
constexpr size_t kAhead = kLanes == 16 && kBits == 8 && kRows == 1 ? 1024 : 8192;
constexpr int kParts = kPanelRows / kLanes;  // vectors that hold a panel's rows
constexpr int kManyPanels = 4;
// A tile is kTileRows rows times kTileVectors vectors of weights. Its sums and those of a group stay in registers, and
// all its vectors share what is read of a row.
constexpr int kTileRows = kLanes == 16 ? 6 : 3;
constexpr int kTileVectors = 2;
constexpr int kManyVectors = kManyPanels * kParts;
static_assert(kTaskUnit % kTileRows == 0 && kManyVectors % kTileVectors == 0);

// Prefetches into the L2 cache: a core has few outstanding requests for L1 lines, and drops prefetches beyond that.
template <size_t kBytes>
inline void fetch_ahead(const uint8_t* from) {
    for (size_t line = 0; line < kBytes; line += 64) __builtin_prefetch(from + line, 0, 2);
}

// Vector `quad` of a group: four columns of kLanes rows, one number per byte.
template <int kBits>
inline Bytes unpack(const uint8_t* group, int quad, int part) {
    const uint8_t* place = group + part * sizeof(Bytes);
    if constexpr (kBits == 8) {
        return load(place + quad * kVectorBytes);
    } else {
        // Shifts work on 32 bits and shift in bits of the next byte. The mask removes those.
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

// Where the results of some rows go: first to `sums` over the blocks so far, finally to `out`.
struct Results {
    float* sums;        // kTileVectors * kLanes per row
    const float* bias;  // or null
    float* out;
    int64_t stride;  // from row to row of out
    int columns;     // columns left, counted from `out`
    bool accumulate;

    // The same for the rows that begin `rows` rows later.
    Results after(int rows) const {
        return {sums + rows * kTileVectors * kLanes, bias, out + rows * stride, stride, columns, accumulate};
    }
};

// Formats that differ in name only share the kernels of the first one.
constexpr int same_kernels(int format) {
    for (int other = 0; other < format; ++other) {
        const Format &a = kFormats[other], &b = kFormats[format];
        if (a.bits == b.bits && a.scales == b.scales && a.has_minimum == b.has_minimum && a.zero == b.zero) return other;
    }
    return format;
}

// Chooses from kFunctions, one per format, the function for a matrix's format.
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
