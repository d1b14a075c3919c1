// Products of rows that are rounded to 8 bits with packed weights.
//
// Each group of 32 columns has its own scale. The few groups with an outlier also have a second byte per number, in
// units of 1/254 of the first byte's: `Activations::fine_groups` says which groups. A tile multiplies the second bytes
// of a group if any of its rows has them. In the other rows they are zero and add exactly zero, so a row's results do
// not depend on the other rows.
#pragma once

#include "tiles.h"

namespace infinilm::INFINILM_ISA::bytes {

// From this many rows on, measurements show that unpacking weights once for all rows is faster.
constexpr int kMany = kAlwaysMany;

// How many quads are unrolled. With few registers more would make the compiler read too far ahead.
constexpr int kUnrolled = kLanes == 16 ? 8 : 4;

template <int kFormat>
constexpr int kZero = kHasShortSums && kFormats[kFormat].bits == 8 ? 0 : kFormats[kFormat].zero;

// Totals of the quads of scale `s`, for kRows rows times kVectors vectors of weights, which `weights(quad, vector)`
// returns.
template <int kFormat, int kRows, int kVectors, typename Weights>
inline __attribute__((always_inline)) void add_up(int s, const int8_t* numbers, const int32_t* halves, const Weights& weights,
                                                  Ints (&totals)[kRows][kVectors]) {
    constexpr Format format = kFormats[kFormat];
    constexpr int kQuadsPerScale = kQuads / format.scales;
    constexpr int kRun = std::min(kQuadsPerSum<format.bits>, kQuadsPerScale);
    constexpr int kStride = kBlockGroups;  // from row to row, in groups
    for (int r = 0; r < kRows; ++r) {
        int offset = 0;
        if constexpr (kZero<kFormat> != 0) {
            const int32_t* half = halves + r * kStride * 2;
            offset = -kZero<kFormat> * (format.scales == 1 ? half[0] + half[1] : half[s]);
        }
        for (int v = 0; v < kVectors; ++v) totals[r][v] = all(offset);
    }
    for (int run = 0; run < kQuadsPerScale / kRun; ++run) {
        Ints sums[kRows][kVectors];
        for (int r = 0; r < kRows; ++r) {
            for (int v = 0; v < kVectors; ++v) sums[r][v] = kHasShortSums ? Ints{} : totals[r][v];
        }
#pragma GCC unroll kUnrolled
        for (int i = 0; i < kRun; ++i) {
            const int quad = s * kQuadsPerScale + run * kRun + i;
            Bytes w[kVectors];
            for (int v = 0; v < kVectors; ++v) w[v] = weights(quad, v);
            for (int r = 0; r < kRows; ++r) {
                for (int v = 0; v < kVectors; ++v) {
                    sums[r][v] = add_products<format.bits>(sums[r][v], w[v], numbers + r * kStride * kGroup + 4 * quad);
                }
            }
        }
        for (int r = 0; r < kRows; ++r) {
            for (int v = 0; v < kVectors; ++v) {
                totals[r][v] = kHasShortSums ? totals[r][v] + widen(sums[r][v]) : sums[r][v];
            }
        }
    }
}

// Add the products of a group to sums. `scales(s, vector)` and `minimums(vector)` return those of the weights.
template <int kFormat, int kRows, int kVectors, typename Weights, typename Scales, typename Minimums>
inline __attribute__((always_inline)) void add_group(const Activations& x, int64_t place, bool is_fine, const Weights& weights,
                                                     const Scales& scales, const Minimums& minimums,
                                                     Floats (&sums)[kRows][kVectors]) {
    constexpr Format format = kFormats[kFormat];
    for (int s = 0; s < format.scales; ++s) {
        Ints totals[kRows][kVectors];
        Floats products[kRows][kVectors];
        add_up<kFormat>(s, x.coarse + place * kGroup, x.halves + 2 * place, weights, totals);
        for (int r = 0; r < kRows; ++r) {
            for (int v = 0; v < kVectors; ++v) products[r][v] = to_floats(totals[r][v]);
        }
        if (__builtin_expect(is_fine, false)) {
            asm volatile("" ::: "memory");  // read weights again: keeping them would take the sums' registers
            add_up<kFormat>(s, x.fine + place * kGroup, x.fine_halves + 2 * place, weights, totals);
            for (int r = 0; r < kRows; ++r) {
                for (int v = 0; v < kVectors; ++v) {
                    products[r][v] = multiply_add(to_floats(totals[r][v]), all(1.0f / kFineSteps), products[r][v]);
                }
            }
        }
        for (int v = 0; v < kVectors; ++v) {
            const Floats scale = scales(s, v);
            for (int r = 0; r < kRows; ++r) {
                sums[r][v] = multiply_add(products[r][v], scale * x.scales[place + r * kBlockGroups], sums[r][v]);
            }
        }
    }
    if constexpr (format.has_minimum) {
        for (int v = 0; v < kVectors; ++v) {
            const Floats minimum = minimums(v);
            for (int r = 0; r < kRows; ++r) {
                sums[r][v] = multiply_add(minimum, all(x.sums[place + r * kBlockGroups]), sums[r][v]);
            }
        }
    }
}

// The groups of a block that have second bytes in any of kRows rows, as bits.
template <int kRows>
inline int fine_groups(const Activations& x, int64_t place) {
    int groups = 0;
    for (int r = 0; r < kRows; ++r) groups |= x.fine_groups[place / kBlockGroups + r];
    return groups;
}

// ---- few rows: weights are unpacked where they are used ----

template <int kFormat, int kRows>
__attribute__((noinline)) void multiply_rows(const PackedMatrix& w, const Activations& x, int row, int panel, bool is_first,
                                             const float* bias, float* out, int64_t out_stride, bool accumulate) {
    constexpr Format format = kFormats[kFormat];
    constexpr size_t kBytes = format.all_bytes();
    for (int part = 0; part < kParts; ++part) {
        const int first_lane = panel * kPanelRows + part * kLanes;
        const int lanes = std::min(kLanes, w.rows - first_lane);
        if (lanes <= 0) return;
        const uint8_t* ahead = w.panel(panel) + kAhead<format.bits, kRows>;
        Floats sums[kRows][1];
        for (auto& sum : sums) sum[0] = all(0.0f);
        for (int first = 0; first < w.groups(); first += kBlockGroups) {
            const uint8_t* group = w.numbers(panel, first);
            const uint16_t* scales = w.scales(panel, first) + part * kLanes;
            const int64_t place = x.place(row, first / kBlockGroups);
            const int fine = fine_groups<kRows>(x, place), groups = std::min(kBlockGroups, w.groups() - first);
            for (int g = 0; g < groups; ++g, group += format.group_bytes(), scales += format.scale_values()) {
                if (is_first && part == 0) {
                    fetch_ahead<kBytes>(ahead);
                    ahead += kBytes;
                }
                add_group<kFormat>(
                    x, place + g, fine >> g & 1, [&](int quad, int) { return unpack<format.bits>(group, quad, part); },
                    [&](int s, int) { return load_half(scales + s * kPanelRows); },
                    [&](int) { return load_half(scales + format.scales * kPanelRows); }, sums);
            }
        }
        for (int r = 0; r < kRows; ++r) {
            write_tile(sums[r][0], bias ? bias + first_lane : nullptr, out + (row + r) * out_stride + first_lane, lanes,
                       accumulate);
        }
    }
}

// Multiply the rows, kRows at a time while they fit, then fewer.
template <int kFormat, int kRows>
inline void multiply_few(const PackedMatrix& w, const Activations& x, int row, int end_row, int panel, bool is_first,
                         const float* bias, float* out, int64_t out_stride, bool accumulate) {
    if constexpr (kRows > 0) {
        for (; row + kRows <= end_row; row += kRows, is_first = false) {
            multiply_rows<kFormat, kRows>(w, x, row, panel, is_first, bias, out, out_stride, accumulate);
        }
        constexpr int kFewer = kRows > 4 ? kRows - 2 : kRows - 1;  // skips some numbers: each takes time to compile
        multiply_few<kFormat, kFewer>(w, x, row, end_row, panel, is_first, bias, out, out_stride, accumulate);
    }
}

// ---- many rows: weights are unpacked once for all rows ----

// A span is two blocks of columns, plus a short block at the end, because the beginning and end of a tile cost time. A
// tile's unpacked weights stay in the L1 cache.
constexpr int kSpanGroups = 2 * kBlockGroups, kMaxRest = 4;

// Some unpacked groups of kLanes rows of a panel.
struct UnpackedSpan {
    Bytes numbers[kSpanGroups + kMaxRest][kQuads];
    Floats scales[kSpanGroups + kMaxRest][2];
    Floats minimums[kSpanGroups + kMaxRest];
};

template <int kFormat>
inline void unpack_span(const PackedMatrix& w, int panel, int part, int first_group, int groups, UnpackedSpan& span) {
    constexpr Format format = kFormats[kFormat];
    for (int g = 0; g < groups; ++g) {
        const uint8_t* group = w.numbers(panel, first_group + g);
        const uint16_t* scales = w.scales(panel, first_group + g) + part * kLanes;
#pragma GCC unroll 8
        for (int quad = 0; quad < kQuads; ++quad) span.numbers[g][quad] = unpack<format.bits>(group, quad, part);
        for (int s = 0; s < format.scales; ++s) span.scales[g][s] = load_half(scales + s * kPanelRows);
        if (format.has_minimum) span.minimums[g] = load_half(scales + format.scales * kPanelRows);
    }
}

// Add the products of kRows rows with kTileVectors spans to the rows' sums; with is_first the sums start from 0.
template <int kFormat, int kRows>
__attribute__((noinline)) void multiply_span(const UnpackedSpan* spans, int groups, const Activations& x, int64_t place,
                                              bool is_first, bool is_last, const Results& results) {
    for (int r = 0; is_last && r < kRows; ++r) {
        for (int v = 0; v < kTileVectors; ++v) __builtin_prefetch(results.out + r * results.stride + v * kLanes, 1);
    }
    Floats sums[kRows][kTileVectors];
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kTileVectors; ++v) {
            sums[r][v] = is_first ? all(0.0f) : load(results.sums + (r * kTileVectors + v) * kLanes);
        }
    }
    for (int first = 0; first < groups; first += kBlockGroups, place += x.rows * kBlockGroups) {
        const int fine = fine_groups<kRows>(x, place), end = std::min(groups, first + kBlockGroups);
        for (int g = first; g < end; ++g) {
            const int64_t own = place + g - first;
            for (int r = 0; r < kRows; r += 2) {  // for the next tile
                __builtin_prefetch(x.coarse + (own + (kRows + r) * kBlockGroups) * kGroup);
            }
            add_group<kFormat>(
                x, own, fine >> (g - first) & 1, [&](int quad, int v) { return spans[v].numbers[g][quad]; },
                [&](int s, int v) { return spans[v].scales[g][s]; }, [&](int v) { return spans[v].minimums[g]; }, sums);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kTileVectors; ++v) store(results.sums + (r * kTileVectors + v) * kLanes, sums[r][v]);
    }
    if (!is_last) return;
#pragma GCC unroll 1
    for (int i = 0; i < kRows * kTileVectors; ++i) {
        const int r = i / kTileVectors, first = i % kTileVectors * kLanes;
        write_tile(load(results.sums + i * kLanes), results.bias ? results.bias + first : nullptr,
                   results.out + r * results.stride + first, std::min(kLanes, results.columns - first), results.accumulate);
    }
}

// Multiply all rows, kRows at a time while they fit, then fewer. Each tile also prefetches some of the next weights, as
// for 16 bits.
template <int kFormat, int kRows>
inline void multiply_span_rows(const UnpackedSpan* spans, int groups, const Activations& x, int64_t place, int rows,
                                bool is_first, bool is_last, Results results, const uint8_t* ahead, size_t panel_bytes) {
    if constexpr (kRows > 0) {
        for (; rows >= kRows; rows -= kRows, place += kRows * kBlockGroups, results = results.after(kRows)) {
            for (int panel = 0; panel < std::max(1, kTileVectors / kParts); ++panel) {
                __builtin_prefetch(ahead + panel * panel_bytes, 0, 2);
                __builtin_prefetch(ahead + panel * panel_bytes + 64, 0, 2);
            }
            ahead += 128;
            multiply_span<kFormat, kRows>(spans, groups, x, place, is_first, is_last, results);
        }
        multiply_span_rows<kFormat, (kRows > 3 ? 2 : kRows - 1)>(spans, groups, x, place, rows, is_first, is_last, results,
                                                                 ahead, panel_bytes);
    }
}

// Multiply up to kManyPanels panels. For each span of columns all panels are processed in turn, so that the span's
// rounded rows stay in the cache.
template <int kFormat>
void multiply_many(const PackedMatrix& w, const Activations& x, int first_row, int end_row, int first_panel,
                   int end_panel, const float* bias, float* out, int64_t out_stride, bool accumulate) {
    constexpr Format format = kFormats[kFormat];
    alignas(64) UnpackedSpan unpacked[kTileVectors] = {};
    alignas(64) float sums[kManyVectors / kTileVectors][kMaxTaskRows * kTileVectors * kLanes];
    const int vectors = (end_panel - first_panel) * kParts, columns = std::min(w.rows, end_panel * kPanelRows);
    for (int first = 0, groups; first < w.groups(); first += groups) {
        const int rest = w.groups() - first;
        groups = rest <= kSpanGroups + kMaxRest ? rest : kSpanGroups;
        for (int vector = 0; vector < vectors; vector += kTileVectors) {
            for (int v = 0; v < std::min(kTileVectors, vectors - vector); ++v) {  // a missing one is not written
                const int panel = first_panel + (vector + v) / kParts;
                unpack_span<kFormat>(w, panel, (vector + v) % kParts, first, groups, unpacked[v]);
            }
            const int next = first_panel + (vector + kTileVectors) / kParts;
            const uint8_t* ahead = next < end_panel               ? w.numbers(next, first)
                                   : first + groups < w.groups() ? w.numbers(first_panel, first + groups)
                                                                  : w.panel(end_panel);
            const int column = first_panel * kPanelRows + vector * kLanes;
            const Results results{sums[vector / kTileVectors], bias ? bias + column : nullptr,
                                  out + first_row * out_stride + column, out_stride, columns - column, accumulate};
            multiply_span_rows<kFormat, kTileRows>(unpacked, groups, x, x.place(first_row, first / kBlockGroups),
                                                   end_row - first_row, first == 0, first + groups == w.groups(), results,
                                                   ahead, format.panel_bytes(w.columns));
        }
    }
}

template <int kFormat>
void multiply_format(const PackedMatrix& w, const Activations& x, int first_row, int end_row, int first_panel,
                     int end_panel, const float* bias, float* out, int64_t out_stride, bool accumulate) {
    if (end_row - first_row < kMany) {
        for (int panel = first_panel; panel < end_panel; ++panel) {
            multiply_few<kFormat, kMaxRows>(w, x, first_row, end_row, panel, true, bias, out, out_stride, accumulate);
        }
        return;
    }
    for (int panel = first_panel; panel < end_panel; panel += kManyPanels) {
        multiply_many<kFormat>(w, x, first_row, end_row, panel, std::min(panel + kManyPanels, end_panel), bias, out,
                               out_stride, accumulate);
    }
}

}  // namespace infinilm::INFINILM_ISA::bytes
