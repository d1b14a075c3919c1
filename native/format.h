// Packed weights: the formats that can be loaded, and the one layout that the kernels read.
//
// A matrix is divided into panels of 16 rows, a panel into groups of 32 columns. Every format becomes
//
//     weight = scale * q + minimum        q an unsigned number of 4, 5, 6 or 8 bits
//
// with one scale (float16) per row of a group, or two for its halves, and in some formats a minimum (float16). The
// other formats have the fixed minimum -zero * scale.
//
// A group is stored as 8 vectors of 16 rows x 4 columns, so that a vector of 16 int32 accumulates the products of four
// columns for all rows of a panel. If numbers have fewer than 8 bits, the vectors 2i and 2i + 1 share 64 bytes. The
// lower four bits of all numbers come first, in 4 x 64 bytes. Then come the fifth bits in 64 bytes, one bit per vector,
// or the fifth and sixth bits in 2 x 64 bytes, two bits per vector.
//
//     block of 8 groups:  numbers of group 0, of group 1, ... | scales (and minimums) of group 0, of group 1, ...
//     panel:              block 0, block 1, ...       the last block may have fewer groups
//
// So a panel is read from beginning to end. If all scales followed the panel's numbers, every panel would begin with a
// wait for its scales.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinilm {

constexpr int kPanelRows = 16;
constexpr int kGroup = 32;
constexpr int kQuads = kGroup / 4;  // vectors in a group
constexpr int kBlockGroups = 8;     // groups in a block
constexpr int kVectorBytes = kPanelRows * 4;

struct Format {
    const char* name;   // GGML's name
    int block_columns;  // columns of a GGML block
    int block_bytes;
    int bits;
    int scales;  // per group
    bool has_minimum;
    int zero;

    constexpr size_t group_bytes() const { return size_t(kPanelRows) * kGroup * bits / 8; }
    constexpr size_t scale_values() const { return size_t(kPanelRows) * (scales + has_minimum); }
    // Bytes of a group with its scales.
    constexpr size_t all_bytes() const { return group_bytes() + scale_values() * sizeof(uint16_t); }
    constexpr size_t panel_bytes(int columns) const { return (columns / kGroup * all_bytes() + 63) / 64 * 64; }
    // The offsets of a group's numbers and of its scales in a panel; `groups` is the panel's number of groups.
    constexpr size_t numbers_at(int group) const {
        return group / kBlockGroups * kBlockGroups * all_bytes() + group % kBlockGroups * group_bytes();
    }
    constexpr size_t scales_at(int group, int groups) const {
        const int first = group / kBlockGroups * kBlockGroups, own = groups - first < kBlockGroups ? groups - first : kBlockGroups;
        return first * all_bytes() + own * group_bytes() + (group - first) * scale_values() * sizeof(uint16_t);
    }
};

inline constexpr Format kFormats[] = {
    {"Q4_0", 32, 18, 4, 1, false, 8},    {"Q4_1", 32, 20, 4, 1, true, 0},   {"Q5_0", 32, 22, 5, 1, false, 16},
    {"Q5_1", 32, 24, 5, 1, true, 0},     {"Q8_0", 32, 34, 8, 1, false, 128}, {"Q4_K", 256, 144, 4, 1, true, 0},
    {"Q5_K", 256, 176, 5, 1, true, 0},   {"Q6_K", 256, 210, 6, 2, false, 32},
};

// A packed weight in memory.
struct PackedMatrix {
    const Format* format;
    int rows;
    int columns;
    const uint8_t* data;
    int activation_bits;  // bits of the rows that it is multiplied with

    int panels() const { return (rows + kPanelRows - 1) / kPanelRows; }
    int groups() const { return columns / kGroup; }
    const uint8_t* panel(int index) const { return data + size_t(index) * format->panel_bytes(columns); }
    const uint8_t* numbers(int panel_index, int group) const { return panel(panel_index) + format->numbers_at(group); }
    const uint16_t* scales(int panel_index, int group) const {
        return reinterpret_cast<const uint16_t*>(panel(panel_index) + format->scales_at(group, groups()));
    }
};

}  // namespace infinilm
