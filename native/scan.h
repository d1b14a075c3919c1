// The parts of drawing a token that look at all logits. The rest is in sampling.cpp and looks at few of them.
#pragma once

#include <limits>

#include "kernels.h"
#include "simd.h"

namespace infinilm::INFINILM_ISA {

typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int64_t Longs __attribute__((vector_size(8 * kLanes)));

// Up to a vector of numbers, padded with `beyond`.
inline Floats load_some(const float* from, int count, float beyond) {
    if (count >= kLanes) return load(from);
    Floats to = all(beyond);
    for (int i = 0; i < count; ++i) to[i] = from[i];
    return to;
}

inline Words mix(Words value, uint32_t upper, uint32_t lower) {
    value = ((value ^ upper) * 0x85ebca6bu) ^ lower;
    value = (value ^ (value >> 13)) * 0xc2b2ae35u;
    return value ^ (value >> 16);
}

void scan(const float* logits, int count, uint32_t first_token, const Contest& contest, float* maximum, float* bound) {
    constexpr float kLowest = -std::numeric_limits<float>::infinity();
    Words tokens{};
    for (int i = 0; i < kLanes; ++i) tokens[i] = first_token + uint32_t(i);
    Floats greatest = all(kLowest), bounds = all(kLowest);
    Ints is_nan{};
    for (int i = 0; i < count; i += kLanes, tokens += kLanes) {
        const Floats x = load_some(logits + i, count - i, kLowest);
        is_nan |= x != x;
        greatest = larger(x, greatest);
        if (contest.is_greedy) continue;
        const Words hashes = mix(mix(tokens, 0, 0), contest.upper, contest.lower);
        const Ints bits = (Ints)__builtin_convertvector(hashes, Floats);
        const Floats found = x * contest.rate - to_floats(bits) * kUlp;
        bounds = larger(x < contest.cutoff ? all(kLowest) : found, bounds);
    }
    bool has_nan = false;
    for (int i = 0; i < kLanes; ++i) has_nan |= is_nan[i] != 0;
    *maximum = has_nan ? std::numeric_limits<float>::infinity() : largest_of(greatest);
    *bound = contest.is_greedy ? *maximum : largest_of(bounds);
}

void weigh(const float* logits, int count, float row_max, float temperature, int64_t* weights) {
    for (int i = 0; i < count; i += kLanes) {
        const Floats x = load_some(logits + i, count - i, row_max);
        const Longs found = __builtin_convertvector(exponential((x - row_max) / temperature) * kWeightUnits, Longs);
        const int left = count - i < kLanes ? count - i : kLanes;
        std::memcpy(weights + i, &found, left * sizeof(int64_t));
    }
}

}  // namespace infinilm::INFINILM_ISA
