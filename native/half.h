// float16, bfloat16 and 8-bit floats (e4m3) without special instructions. Functions are static, because each file that
// is compiled for another instruction set needs its own copy.
#pragma once

#include <cstdint>
#include <cstring>

namespace infinilm {

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16;
    const uint32_t rest = half & 0x7fff;
    if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // infinity, NaN
    if (rest < 0x400) return float_of(sign | bits_of(float(rest) * 0x1p-24f));      // below the normal range
    return float_of(sign | ((rest << 13) + 0x38000000));
}

// Rounds to nearest, ties to even, like the hardware instructions.
static inline uint16_t float_to_half(float value) {
    const uint32_t bits = bits_of(value);
    const uint16_t sign = bits >> 16 & 0x8000;
    uint32_t rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return sign | 0x7e00;   // NaN
    if (rest >= 0x47800000) return sign | 0x7c00;  // too large
    if (rest < 0x38800000) {                       // below the normal range: the sum's last bits are the result
        return sign | uint16_t(bits_of(float_of(rest) + 0.5f) - bits_of(0.5f));
    }
    rest += 0xfff + (rest >> 13 & 1);
    return sign | uint16_t((rest - 0x38000000) >> 13);
}

static inline float bfloat16_to_float(uint16_t value) { return float_of(uint32_t(value) << 16); }

static inline uint16_t float_to_bfloat16(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);  // NaN stays NaN
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// For numbers up to 448. Rounds to nearest, ties to even.
static inline uint8_t float_to_float8(float value) {
    const uint32_t bits = bits_of(value);
    const uint8_t sign = bits >> 24 & 0x80;
    const uint32_t rest = bits & 0x7fffffff;
    if (rest < 121u << 23) {  // below the normal range: the sum's last bits are the result
        return sign | uint8_t(bits_of(float_of(rest) + 0x1p14f) - bits_of(0x1p14f));
    }
    return sign | uint8_t((rest + 0x7ffff + (rest >> 20 & 1) - (120u << 23)) >> 20);
}

}  // namespace infinilm
