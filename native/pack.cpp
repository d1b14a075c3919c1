#include "pack.h"

#include <cstring>
#include <stdexcept>

#include "half.h"

namespace infinilm {
namespace {

// One row's group of 32 columns, whatever it was stored as.
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

void add_fifth_bits(const uint8_t* bytes, uint8_t* q) {
    for (int i = 0; i < kGroup; ++i) q[i] |= uint8_t((bytes[i / 8] >> i % 8 & 1) << 4);
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
    const int half = index / 4, part = index % 4;  // of 128 columns; of 32 in it
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

using ReadGroup = void (*)(const uint8_t* block, int index, Group& group);
constexpr ReadGroup kReaders[] = {read_q4_0, read_q4_1, read_q5_0, read_q5_1, read_q8_0, read_q4_k, read_q5_k, read_q6_k};
static_assert(sizeof kReaders / sizeof *kReaders == sizeof kFormats / sizeof *kFormats);

// Where the bits of a number lie: vector `quad`, byte `place` in it.
void put(uint8_t* numbers, int bits, int quad, int place, uint8_t q) {
    if (bits == 8) {
        numbers[quad * kVectorBytes + place] = q;
        return;
    }
    numbers[quad / 2 * kVectorBytes + place] |= uint8_t((q & 15) << 4 * (quad % 2));
    uint8_t* high = numbers + 4 * kVectorBytes + place;
    if (bits == 5) *high |= uint8_t((q >> 4) << quad);
    if (bits == 6) high[quad / 4 * kVectorBytes] |= uint8_t((q >> 4) << 2 * (quad % 4));
}

uint8_t get(const uint8_t* numbers, int bits, int quad, int place) {
    if (bits == 8) return numbers[quad * kVectorBytes + place];
    uint8_t q = numbers[quad / 2 * kVectorBytes + place] >> 4 * (quad % 2) & 15;
    const uint8_t* high = numbers + 4 * kVectorBytes + place;
    if (bits == 5) q |= uint8_t((*high >> quad & 1) << 4);
    if (bits == 6) q |= uint8_t((high[quad / 4 * kVectorBytes] >> 2 * (quad % 4) & 3) << 4);
    return q;
}

void clear(uint8_t* numbers, int bits, int lane) {
    for (size_t vector = 0; vector < size_t(bits); ++vector) {  // as many vectors as bits: 8 share 64 bytes each
        std::memset(numbers + vector * kVectorBytes + 4 * lane, 0, 4);
    }
}

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

void pack_row(const Format& format, int columns, const uint8_t* blocks, int row, uint8_t* data) {
    const ReadGroup read = kReaders[&format - kFormats];
    const int lane = row % kPanelRows, groups = columns / kGroup, groups_per_block = format.block_columns / kGroup;
    uint8_t* panel = data + size_t(row / kPanelRows) * format.panel_bytes(columns);
    for (int g = 0; g < groups; ++g) {
        uint8_t* numbers = panel + format.numbers_at(g);
        auto* scales = reinterpret_cast<uint16_t*>(panel + format.scales_at(g, groups));
        Group group{};
        read(blocks + size_t(g / groups_per_block) * format.block_bytes, g % groups_per_block, group);
        clear(numbers, format.bits, lane);
        for (int i = 0; i < kGroup; ++i) put(numbers, format.bits, i / 4, 4 * lane + i % 4, group.q[i]);
        for (int i = 0; i < format.scales; ++i) scales[i * kPanelRows + lane] = group.scale[i];
        if (format.has_minimum) scales[format.scales * kPanelRows + lane] = group.minimum;
    }
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
