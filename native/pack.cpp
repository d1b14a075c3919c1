#include "pack.h"

#include <cstring>
#include <stdexcept>

#include "half.h"

namespace infinilm {
namespace {

// One row's group of 32 columns, for all formats.
struct Group {
    uint8_t q[kGroup];
    uint16_t scale[2];
    uint16_t minimum;
};

uint16_t read_u16(const uint8_t* bytes) { return uint16_t(bytes[0] | bytes[1] << 8); }

void low_and_high_halves(const uint8_t* bytes, uint8_t* q) {
    for (int i = 0; i < 16; ++i) {
        q[i] = bytes[i] & 15;
        q[i + 16] = bytes[i] >> 4;
    }
}

// Eight bits at a time: a byte is repeated eight times, and each copy keeps one bit. A carry moves the bit to the top
// of its byte, and a shift to bit 4.
void add_fifth_bits(const uint8_t* bytes, uint8_t* q) {
    for (int i = 0; i < kGroup / 8; ++i) {
        const uint64_t own = uint64_t(bytes[i]) * 0x0101010101010101 & 0x8040201008040201;
        uint64_t eight;
        std::memcpy(&eight, q + 8 * i, sizeof eight);
        eight |= ((own + 0x7f7f7f7f7f7f7f7f) & 0x8080808080808080) >> 3;
        std::memcpy(q + 8 * i, &eight, sizeof eight);
    }
}

// Q4_K and Q5_K: eight scales and minimums of six bits, in twelve bytes.
void read_k_scale(const uint8_t* block, int index, Group& group) {
    const uint8_t* packed = block + 4;
    int scale, minimum;
    if (index < 4) {
        scale = packed[index] & 63;
        minimum = packed[index + 4] & 63;
    } else {
        scale = (packed[index + 4] & 15) | (packed[index - 4] >> 6) << 4;
        minimum = packed[index + 4] >> 4 | (packed[index] >> 6) << 4;
    }
    group.scale[0] = float_to_half(half_to_float(read_u16(block)) * float(scale));
    group.minimum = float_to_half(-half_to_float(read_u16(block + 2)) * float(minimum));
}

void read_q4_0(const uint8_t* block, int, Group& group) {
    group.scale[0] = read_u16(block);
    low_and_high_halves(block + 2, group.q);
}

void read_q4_1(const uint8_t* block, int, Group& group) {
    group.scale[0] = read_u16(block);
    group.minimum = read_u16(block + 2);
    low_and_high_halves(block + 4, group.q);
}

void read_q5_0(const uint8_t* block, int, Group& group) {
    group.scale[0] = read_u16(block);
    low_and_high_halves(block + 6, group.q);
    add_fifth_bits(block + 2, group.q);
}

void read_q5_1(const uint8_t* block, int, Group& group) {
    group.scale[0] = read_u16(block);
    group.minimum = read_u16(block + 2);
    low_and_high_halves(block + 8, group.q);
    add_fifth_bits(block + 4, group.q);
}

void read_q8_0(const uint8_t* block, int, Group& group) {
    group.scale[0] = read_u16(block);
    for (int i = 0; i < kGroup; ++i) group.q[i] = block[2 + i] ^ 0x80;  // -128 becomes 0
}

void read_q4_k(const uint8_t* block, int index, Group& group) {
    read_k_scale(block, index, group);
    const uint8_t* bytes = block + 16 + index / 2 * 32;
    for (int i = 0; i < kGroup; ++i) group.q[i] = bytes[i] >> 4 * (index % 2) & 15;
}

void read_q5_k(const uint8_t* block, int index, Group& group) {
    read_k_scale(block, index, group);
    const uint8_t* bytes = block + 48 + index / 2 * 32;
    for (int i = 0; i < kGroup; ++i) {
        group.q[i] = uint8_t((bytes[i] >> 4 * (index % 2) & 15) | (block[16 + i] >> index & 1) << 4);
    }
}

void read_q6_k(const uint8_t* block, int index, Group& group) {
    const int half = index / 4, part = index % 4;  // the half of 128 columns; the 32 columns in it
    const uint8_t* low = block + 64 * half + 32 * (part % 2);
    const uint8_t* high = block + 128 + 32 * half;
    for (int i = 0; i < kGroup; ++i) {
        group.q[i] = uint8_t((low[i] >> 4 * (part / 2) & 15) | (high[i] >> 2 * part & 3) << 4);
    }
    const float scale = half_to_float(read_u16(block + 208));
    for (int i = 0; i < 2; ++i) {
        group.scale[i] = float_to_half(scale * float(int8_t(block[192 + 2 * index + i])));
    }
}

// Read the number in vector `quad`, byte `place`.
uint8_t get(const uint8_t* numbers, int bits, int quad, int place) {
    if (bits == 8) return numbers[quad * kVectorBytes + place];
    uint8_t q = numbers[quad / 2 * kVectorBytes + place] >> 4 * (quad % 2) & 15;
    const uint8_t* high = numbers + 4 * kVectorBytes + place;
    if (bits == 5) q |= uint8_t((*high >> quad & 1) << 4);
    if (bits == 6) q |= uint8_t((high[quad / 4 * kVectorBytes] >> 2 * (quad % 4) & 3) << 4);
    return q;
}

// A group of a panel: 8 vectors, each with the same four columns of 16 rows, one word per row.
using Tile = uint32_t[kQuads][kPanelRows];

// Write the numbers of a tile with `bits` bits each. A word holds four numbers; shifts do not mix their bits.
template <int bits>
void write_tile(const Tile& tile, uint8_t* numbers) {
    Tile out{};
    if (bits == 8) {
        std::memcpy(out, tile, sizeof out);
    } else {
        for (int quad = 0; quad < kQuads; ++quad) {
            uint32_t* low = out[quad / 2];
            uint32_t* high = bits == 6 ? out[4 + quad / 4] : out[4];
            const int low_shift = 4 * (quad % 2), high_shift = bits == 6 ? 2 * (quad % 4) : quad;
            for (int lane = 0; lane < kPanelRows; ++lane) {
                low[lane] |= (tile[quad][lane] & 0x0f0f0f0f) << low_shift;
            }
            if (bits == 4) continue;
            for (int lane = 0; lane < kPanelRows; ++lane) {
                high[lane] |= (tile[quad][lane] >> 4 & 0x03030303) << high_shift;
            }
        }
    }
    std::memcpy(numbers, out, size_t(bits) * kVectorBytes);  // 8 vectors with `bits` bits per number
}

using ReadGroup = void (*)(const uint8_t* block, int index, Group& group);
using PackPanel = void (*)(const Format& format, int columns, const uint8_t* const* rows, uint8_t* panel);

// One function per format, so that the compiler knows how a group is read and how many bits its numbers have.
template <ReadGroup read, int bits>
void pack_panel_of(const Format& format, int columns, const uint8_t* const* rows, uint8_t* panel) {
    const int groups = columns / kGroup, groups_per_block = format.block_columns / kGroup;
    for (int g = 0; g < groups; ++g) {
        uint8_t* numbers = panel + format.numbers_at(g);
        auto* scales = reinterpret_cast<uint16_t*>(panel + format.scales_at(g, groups));
        Tile tile;
        for (int lane = 0; lane < kPanelRows; ++lane) {
            Group group;
            if (rows[lane] == nullptr) {
                for (int i = 0; i < kGroup; ++i) group.q[i] = get(numbers, bits, i / 4, 4 * lane + i % 4);
            } else {
                read(rows[lane] + size_t(g / groups_per_block) * format.block_bytes, g % groups_per_block, group);
                for (int i = 0; i < format.scales; ++i) scales[i * kPanelRows + lane] = group.scale[i];
                if (format.has_minimum) scales[format.scales * kPanelRows + lane] = group.minimum;
            }
            uint32_t words[kQuads];
            std::memcpy(words, group.q, sizeof words);
            for (int quad = 0; quad < kQuads; ++quad) tile[quad][lane] = words[quad];
        }
        write_tile<bits>(tile, numbers);
    }
}

constexpr PackPanel kPackers[] = {pack_panel_of<read_q4_0, 4>, pack_panel_of<read_q4_1, 4>, pack_panel_of<read_q5_0, 5>,
                                  pack_panel_of<read_q5_1, 5>, pack_panel_of<read_q8_0, 8>, pack_panel_of<read_q4_k, 4>,
                                  pack_panel_of<read_q5_k, 5>, pack_panel_of<read_q6_k, 6>};
static_assert(sizeof kPackers / sizeof *kPackers == sizeof kFormats / sizeof *kFormats);

}  // namespace

const Format& find_format(const std::string& name) {
    std::string known;
    for (const Format& format : kFormats) {
        if (name == format.name) return format;
        known += known.empty() ? "" : ", ";
        known += format.name;
    }
    throw std::invalid_argument("format '" + name + "' is unknown; known are " + known);
}

void pack_panel(const Format& format, int columns, const uint8_t* const* rows, uint8_t* panel) {
    kPackers[&format - kFormats](format, columns, rows, panel);
}

void unpack_row(const PackedMatrix& matrix, int row, float* out) {
    const Format& format = *matrix.format;
    const int lane = row % kPanelRows, columns_per_scale = kGroup / format.scales;
    for (int g = 0; g < matrix.groups(); ++g) {
        const uint8_t* numbers = matrix.numbers(row / kPanelRows, g);
        const uint16_t* scales = matrix.scales(row / kPanelRows, g);
        for (int i = 0; i < kGroup; ++i) {
            const float scale = half_to_float(scales[i / columns_per_scale * kPanelRows + lane]);
            const int q = get(numbers, format.bits, i / 4, 4 * lane + i % 4) - format.zero;
            const float minimum = format.has_minimum ? half_to_float(scales[format.scales * kPanelRows + lane]) : 0.0f;
            const float product = float(q) * scale;
            out[g * kGroup + i] = product + minimum;
        }
    }
}

}  // namespace infinilm
