// Reading floats of any type from memory.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace infinilm::INFINILM_ISA {

template <FloatType kType>
constexpr int kNumberBytes = kType == FloatType::kFloat32 ? 4 : kType == FloatType::kFloat8 ? 1 : 2;

template <FloatType kType>
inline Floats load_numbers(const void* from, int64_t place) {
    if constexpr (kType == FloatType::kFloat32) return load(static_cast<const float*>(from) + place);
    if constexpr (kType == FloatType::kFloat16) return load_half(static_cast<const uint16_t*>(from) + place);
    if constexpr (kType == FloatType::kBFloat16) return load_bfloat16(static_cast<const uint16_t*>(from) + place);
    if constexpr (kType == FloatType::kFloat8) return load_float8(static_cast<const uint8_t*>(from) + place);
}

template <FloatType kType>
inline float load_number(const void* from, int64_t place) {
    if constexpr (kType == FloatType::kFloat32) return static_cast<const float*>(from)[place];
    if constexpr (kType == FloatType::kFloat16) return half_to_float(static_cast<const uint16_t*>(from)[place]);
    if constexpr (kType == FloatType::kBFloat16) return bfloat16_to_float(static_cast<const uint16_t*>(from)[place]);
    if constexpr (kType == FloatType::kFloat8) {
        const uint8_t codes[kLanes] = {static_cast<const uint8_t*>(from)[place]};
        return load_float8(codes)[0];
    }
}

// Up to a vector of numbers, padded with zeros.
template <FloatType kType>
inline Floats load_some_numbers(const void* from, int64_t place, int count) {
    if (count >= kLanes) return load_numbers<kType>(from, place);
    uint32_t raw[kLanes] = {};  // large enough for a vector of any type
    std::memcpy(raw, static_cast<const uint8_t*>(from) + place * kNumberBytes<kType>, size_t(count) * kNumberBytes<kType>);
    return load_numbers<kType>(raw, 0);
}

}  // namespace infinilm::INFINILM_ISA
