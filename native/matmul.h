// Products of rows that are rounded to 16 bits with packed weights.
//
// A row's numbers have 16 bits, in two bytes: 255 * coarse + fine. So a weight is multiplied twice. With few rows that
// costs little compared with reading the weight. Results differ from those of floats only in the fifth digit.
#pragma once

#include <type_traits>

#include "tiles.h"

namespace infinilm::INFINILM_ISA {

// From this many rows on, measurements show that unpacking weights once for all rows is faster.
template <int kFormat>
constexpr int kMany = kLanes == 16 && kFormats[kFormat].scales == 1 ? kAlwaysMany : kAlwaysFew;

// Multiply kRows rows of x, at most kMaxRows, with kLanes rows of a panel. With is_first, prefetch weights.
template <int kFormat, int kRows>
inline void multiply_tile(const PackedMatrix& w, const Activations& x, int row, int panel, int part, bool is_first,
                          Floats (&sums)[kRows]) {
    constexpr Format format = kFormats[kFormat];
    constexpr int kQuadsPerScale = kQuads / format.scales;
    constexpr int kRun = std::min(kQuadsPerSum<format.bits>, kQuadsPerScale);
    constexpr size_t kBytes = format.all_bytes();
    constexpr int kZero = kHasShortSums && format.bits == 8 ? 0 : format.zero;
    constexpr int kStride = kBlockGroups;  // from row to row, in groups

    const uint8_t* ahead = w.panel(panel) + kAhead<format.bits, kRows>;
    for (Floats& sum : sums) sum = all(0.0f);
    for (int first = 0; first < w.groups(); first += kBlockGroups) {
        const uint8_t* group = w.numbers(panel, first);
        const uint16_t* scales = w.scales(panel, first) + part * kLanes;
        int64_t place = x.place(row, first / kBlockGroups);
        const float* x_scales = x.scales + place / kBlockGroups;
        Floats block_sums[kRows];
        for (Floats& sum : block_sums) sum = all(0.0f);
        const int groups = std::min(kBlockGroups, w.groups() - first);
        for (int g = 0; g < groups; ++g, ++place, group += format.group_bytes(), scales += format.scale_values()) {
            const int8_t* coarse = x.coarse + place * kGroup;
            const int8_t* fine = x.fine + place * kGroup;
            if (is_first) {
                fetch_ahead<kBytes>(ahead);
                ahead += kBytes;
            }
            for (int s = 0; s < format.scales; ++s) {
                Ints totals[kRows];
                for (int r = 0; r < kRows; ++r) {
                    int offset = 0;
                    if constexpr (kZero != 0) {
                        const int32_t* half = x.halves + (place + r * kStride) * 2;
                        offset = -kZero * (format.scales == 1 ? half[0] + half[1] : half[s]);
                    }
                    totals[r] = all(offset);
                }
                for (int first_quad = s * kQuadsPerScale; first_quad < (s + 1) * kQuadsPerScale; first_quad += kRun) {
                    Ints coarse_sums[kRows], fine_sums[kRows];
                    for (int r = 0; r < kRows; ++r) coarse_sums[r] = fine_sums[r] = Ints{};
#pragma GCC unroll 8
                    for (int quad = first_quad; quad < first_quad + kRun; ++quad) {
                        const Bytes q = unpack<format.bits>(group, quad, part);
                        for (int r = 0; r < kRows; ++r) {
                            const int at = r * kStride * kGroup + 4 * quad;
                            coarse_sums[r] = add_products<format.bits>(coarse_sums[r], q, coarse + at);
                            fine_sums[r] = add_products<format.bits>(fine_sums[r], q, fine + at);
                        }
                    }
                    for (int r = 0; r < kRows; ++r) {
                        const Ints much = widen(coarse_sums[r]);
                        totals[r] += (much << 8) - much + widen(fine_sums[r]);
                    }
                }
                const Floats scale = load_half(scales + s * kPanelRows);
                for (int r = 0; r < kRows; ++r) {
                    block_sums[r] = multiply_add(to_floats(totals[r]), scale, block_sums[r]);
                }
            }
            if constexpr (format.has_minimum) {
                const Floats minimum = load_half(scales + format.scales * kPanelRows);
                for (int r = 0; r < kRows; ++r) {
                    block_sums[r] = multiply_add(minimum, all(x.sums[place + r * kStride]), block_sums[r]);
                }
            }
        }
        for (int r = 0; r < kRows; ++r) sums[r] = multiply_add(block_sums[r], all(x_scales[r]), sums[r]);
    }
}

template <int kFormat, int kRows>
void multiply_rows(const PackedMatrix& w, const Activations& x, int row, int panel, bool is_first, const float* bias,
                   float* out, int64_t out_stride, bool accumulate) {
    for (int part = 0; part < kParts; ++part) {
        const int first = panel * kPanelRows + part * kLanes;
        const int lanes = std::min(kLanes, w.rows - first);
        if (lanes <= 0) return;
        Floats sums[kRows];
        multiply_tile<kFormat, kRows>(w, x, row, panel, part, is_first && part == 0, sums);
        for (int r = 0; r < kRows; ++r) {
            write_tile(sums[r], bias ? bias + first : nullptr, out + (row + r) * out_stride + first, lanes, accumulate);
        }
    }
}

// Multiply the last `rest` rows, at most kRows.
template <int kFormat, int kRows>
void multiply_rest(const PackedMatrix& w, const Activations& x, int row, int rest, int panel, bool is_first,
                   const float* bias, float* out, int64_t out_stride, bool accumulate) {
    if constexpr (kRows > 0) {
        if (rest == kRows) {
            multiply_rows<kFormat, kRows>(w, x, row, panel, is_first, bias, out, out_stride, accumulate);
        } else {
            multiply_rest<kFormat, kRows - 1>(w, x, row, rest, panel, is_first, bias, out, out_stride, accumulate);
        }
    }
}

template <int kFormat>
void multiply_few(const PackedMatrix& w, const Activations& x, int first_row, int end_row, int first_panel,
                  int end_panel, const float* bias, float* out, int64_t out_stride, bool accumulate) {
    for (int panel = first_panel; panel < end_panel; ++panel) {
        int row = first_row;
        for (; row + kMaxRows <= end_row; row += kMaxRows) {
            const bool is_first = row == first_row;
            multiply_rows<kFormat, kMaxRows>(w, x, row, panel, is_first, bias, out, out_stride, accumulate);
        }
        multiply_rest<kFormat, kMaxRows - 1>(w, x, row, end_row - row, panel, row == first_row, bias, out, out_stride,
                                             accumulate);
    }
}

// ---- many rows: weights are unpacked once for all rows, to 16 bits, and multiplied with the 16-bit whole numbers. The
// sums are the same integers, so a row's results have the same bits as with few rows. ----

constexpr int kPairs = kGroup / 2;  // vectors in a group
// Some unpacked groups of kLanes rows of a panel.
struct UnpackedBlock {
    Ints numbers[kBlockGroups][kPairs];  // a lane has two columns of a row, as int16
    Floats scales[kBlockGroups][2];
    Floats minimums[kBlockGroups];
};

template <int kFormat>
inline void unpack_block(const PackedMatrix& w, int panel, int part, int first_group, int groups, UnpackedBlock& block) {
    constexpr Format format = kFormats[kFormat];
    for (int g = 0; g < groups; ++g) {
        const uint8_t* group = w.numbers(panel, first_group + g);
        const uint16_t* scales = w.scales(panel, first_group + g) + part * kLanes;
#pragma GCC unroll 8
        for (int quad = 0; quad < kQuads; ++quad) {
            const Bytes four = unpack<format.bits>(group, quad, part);
            block.numbers[g][2 * quad] = subtract_shorts(lower_pairs(four), format.zero);
            block.numbers[g][2 * quad + 1] = subtract_shorts(upper_pairs(four), format.zero);
        }
        for (int s = 0; s < format.scales; ++s) block.scales[g][s] = load_half(scales + s * kPanelRows);
        if (format.has_minimum) block.minimums[g] = load_half(scales + format.scales * kPanelRows);
    }
}

// How many pairs of columns are unrolled. With few registers more would make the compiler read too far ahead.
constexpr int kUnrolled = kLanes == 16 ? 16 : 8;

// Add the products of kRows rows with kVectors blocks to the rows' sums; with is_first the sums start from 0.
template <int kScales, bool kHasMinimum, int kRows, int kVectors>
__attribute__((noinline)) void multiply_block(const UnpackedBlock* blocks, int groups, const Activations& x, int64_t place,
                                              bool is_first, bool is_last, const Results& results) {
    constexpr int kStride = kBlockGroups * kGroup;  // from row to row
    const int16_t* whole = x.whole + place * kGroup;
    const float* x_scales = x.scales + place / kBlockGroups;
    const float* x_sums = x.sums + place;
    for (int r = 0; is_last && r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) __builtin_prefetch(results.out + r * results.stride + v * kLanes, 1);
    }
    Floats sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) sums[r][v] = all(0.0f);
    }
    for (int g = 0; g < groups; ++g, whole += kGroup) {
        for (int r = 0; r < kRows; ++r) __builtin_prefetch(whole + (kRows + r) * kStride);  // for the next tile
        for (int s = 0; s < kScales; ++s) {
            Ints totals[kRows][kVectors];
            for (int r = 0; r < kRows; ++r) {
                for (int v = 0; v < kVectors; ++v) totals[r][v] = Ints{};
            }
#pragma GCC unroll kUnrolled
            for (int pair = s * kPairs / kScales; pair < (s + 1) * kPairs / kScales; ++pair) {
                Ints w[kVectors];
                for (int v = 0; v < kVectors; ++v) w[v] = blocks[v].numbers[g][pair];
                for (int r = 0; r < kRows; ++r) {
                    const Ints two = all_pairs(whole + r * kStride + 2 * pair);
                    for (int v = 0; v < kVectors; ++v) totals[r][v] = add_pairs(totals[r][v], w[v], two);
                }
            }
            for (int v = 0; v < kVectors; ++v) {
                const Floats scale = blocks[v].scales[g][s];
                for (int r = 0; r < kRows; ++r) sums[r][v] = multiply_add(to_floats(totals[r][v]), scale, sums[r][v]);
            }
        }
        if constexpr (kHasMinimum) {
            Floats minimums[kVectors];
            for (int v = 0; v < kVectors; ++v) minimums[v] = blocks[v].minimums[g];
            for (int r = 0; r < kRows; ++r) {
                const Floats x_sum = all(x_sums[r * kBlockGroups + g]);
                for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(minimums[v], x_sum, sums[r][v]);
            }
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
            float* to = results.sums + (r * kTileVectors + v) * kLanes;
            store(to, multiply_add(sums[r][v], all(x_scales[r]), is_first ? all(0.0f) : load(to)));
        }
    }
    if (!is_last) return;
#pragma GCC unroll 1
    for (int i = 0; i < kRows * kVectors; ++i) {
        const int r = i / kVectors, first = i % kVectors * kLanes;
        write_tile(load(results.sums + r * kTileVectors * kLanes + first), results.bias ? results.bias + first : nullptr,
                   results.out + r * results.stride + first, std::min(kLanes, results.columns - first),
                   results.accumulate);
    }
}

// Multiply all rows, kRows at a time while they fit, then fewer. Each tile also prefetches a few lines of the next
// weights, from panels that are `panel_bytes` long.
template <int kScales, bool kHasMinimum, int kRows, int kVectors>
inline void multiply_block_rows(const UnpackedBlock* blocks, int groups, const Activations& x, int64_t place, int rows,
                                bool is_first, bool is_last, Results results, const uint8_t* ahead, size_t panel_bytes) {
    if constexpr (kRows > 0) {
        for (; rows >= kRows; rows -= kRows, place += kRows * kBlockGroups, results = results.after(kRows)) {
            for (size_t panel = 0; panel < std::max(1, kVectors / kParts); ++panel) {
                __builtin_prefetch(ahead + panel * panel_bytes, 0, 2);
                __builtin_prefetch(ahead + panel * panel_bytes + 64, 0, 2);
            }
            ahead += 128;
            multiply_block<kScales, kHasMinimum, kRows, kVectors>(blocks, groups, x, place, is_first, is_last, results);
        }
        multiply_block_rows<kScales, kHasMinimum, kRows - 1, kVectors>(blocks, groups, x, place, rows, is_first, is_last,
                                                                       results, ahead, panel_bytes);
    }
}

// Multiply up to kManyPanels panels. For each block of columns all panels are processed in turn, so that the block's
// rounded rows stay in the cache.
template <int kFormat>
void multiply_many(const PackedMatrix& w, const Activations& x, int first_row, int end_row, int first_panel,
                   int end_panel, const float* bias, float* out, int64_t out_stride, bool accumulate) {
    constexpr Format format = kFormats[kFormat];
    alignas(64) UnpackedBlock unpacked[kTileVectors];
    alignas(64) float sums[kManyVectors / kTileVectors][kMaxTaskRows * kTileVectors * kLanes];
    const int rows = end_row - first_row, vectors = (end_panel - first_panel) * kParts;
    for (int first = 0; first < w.groups(); first += kBlockGroups) {
        const int groups = std::min(kBlockGroups, w.groups() - first);
        const int64_t place = x.place(first_row, first / kBlockGroups);
        for (int vector = 0; vector < vectors; vector += kTileVectors) {
            const bool is_whole = vector + kTileVectors <= vectors;
            for (int v = 0; v < (is_whole ? kTileVectors : 1); ++v) {
                const int panel = first_panel + (vector + v) / kParts;
                unpack_block<kFormat>(w, panel, (vector + v) % kParts, first, groups, unpacked[v]);
            }
            const int next = first_panel + (vector + kTileVectors) / kParts;
            const uint8_t* ahead = next < end_panel               ? w.numbers(next, first)
                                   : first + groups < w.groups() ? w.numbers(first_panel, first + groups)
                                                                  : w.panel(end_panel);
            const int column = first_panel * kPanelRows + vector * kLanes;
            const Results results{sums[vector / kTileVectors], bias ? bias + column : nullptr,
                                  out + first_row * out_stride + column, out_stride, w.rows - column, accumulate};
            const auto multiply_rows =
                is_whole ? multiply_block_rows<format.scales, format.has_minimum, kTileRows, kTileVectors>
                         : multiply_block_rows<format.scales, format.has_minimum, kTileRows, 1>;
            multiply_rows(unpacked, groups, x, place, rows, first == 0, first + groups == w.groups(), results, ahead,
                          format.panel_bytes(w.columns));
        }
    }
}

template <int kFormat>
void multiply_format(const PackedMatrix& w, const Activations& x, int first_row, int end_row, int first_panel,
                     int end_panel, const float* bias, float* out, int64_t out_stride, bool accumulate) {
    if (x.whole == nullptr || (x.coarse != nullptr && end_row - first_row < kMany<kFormat>)) {
        return multiply_few<kFormat>(w, x, first_row, end_row, first_panel, end_panel, bias, out, out_stride, accumulate);
    }
    for (int panel = first_panel; panel < end_panel; panel += kManyPanels) {
        multiply_many<kFormat>(w, x, first_row, end_row, panel, std::min(panel + kManyPanels, end_panel), bias, out,
                               out_stride, accumulate);
    }
}

// In kernels_bytes.cpp.
std::remove_pointer_t<decltype(Kernels::multiply)> multiply_bytes;

void multiply(const PackedMatrix& w, const Activations& x, int first_row, int end_row, int first_panel, int end_panel,
              const float* bias, float* out, int64_t out_stride, bool accumulate) {
    const auto function = x.bits == 8 ? multiply_bytes : INFINILM_CHOOSE_FORMAT(multiply_format);
    function(w, x, first_row, end_row, first_panel, end_panel, bias, out, out_stride, accumulate);
}

}  // namespace infinilm::INFINILM_ISA
