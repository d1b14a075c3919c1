// What happens to a row or a head by itself: norms, rounding, turning by position, storing.
#pragma once

#include <cmath>
#include <limits>

#include "kernels.h"
#include "simd.h"

namespace infinilm::INFINILM_ISA {

// 1 / rms(x); columns need not be a multiple of anything.
inline float norm_factor(const float* x, int columns, float eps) {
    Floats squares = all(0.0f);
    int i = 0;
    for (; i + kLanes <= columns; i += kLanes) squares = multiply_add(load(x + i), load(x + i), squares);
    float total = sum_of(squares);
    for (; i < columns; ++i) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / float(columns) + eps);
}

void rms_norm(const float* x, const float* weight, float eps, int columns, float* out) {
    const float factor = norm_factor(x, columns, eps);
    int i = 0;
    for (; i + kLanes <= columns; i += kLanes) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < columns; ++i) out[i] = x[i] * factor * weight[i];
}

void score(const float* x, const float* weight, int columns, int count, float* out) {
    constexpr int kVectors = 4;
    int i = 0;
    for (; i + kVectors * kLanes <= count; i += kVectors * kLanes) {
        Floats sums[kVectors] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
        for (int c = 0; c < columns; ++c) {
            const float* line = weight + int64_t(c) * count + i;
            for (int v = 0; v < kVectors; ++v) sums[v] = multiply_add(all(x[c]), load(line + v * kLanes), sums[v]);
        }
        for (int v = 0; v < kVectors; ++v) store(out + i + v * kLanes, sums[v]);
    }
    for (; i < count; ++i) {
        float sum = 0.0f;
        for (int c = 0; c < columns; ++c) sum += x[c] * weight[int64_t(c) * count + i];
        out[i] = sum;
    }
}

// Round one group of 32 floats. What is no number becomes 0, but a scale that is none either shows in the results.
inline void quantize_group(const Floats (&x)[kGroup / kLanes], int row, int group, const Activations& out) {
    constexpr int kPerHalf = kGroup / kLanes / 2;
    Floats largest = absolute(x[0]);
    for (Floats part : x) largest = larger(absolute(part), largest);
    const float scale = largest_of(largest) / float(kLargest);
    const float inverse = scale >= std::numeric_limits<float>::min() ? 1.0f / scale : 0.0f;
    const int64_t place = int64_t(row) * (out.columns / kGroup) + group;
    Floats sums[2] = {all(0.0f), all(0.0f)};  // of whole numbers, too small to be rounded
    for (int i = 0; i < kGroup / kLanes; ++i) {
        Floats whole = round_to_even(x[i] * inverse);
        whole = whole == whole ? whole : all(0.0f);
        sums[i / kPerHalf] += whole;
        const Floats coarse = round_to_even(whole * (1.0f / kCoarseStep));
        store_bytes(out.coarse + place * kGroup + i * kLanes, coarse);
        store_bytes(out.fine + place * kGroup + i * kLanes, whole - coarse * float(kCoarseStep));
    }
    const float halves[2] = {sum_of(sums[0]), sum_of(sums[1])};
    out.scales[place] = scale;
    out.sums[place] = scale * (halves[0] + halves[1]);
    out.halves[2 * place] = int32_t(halves[0]);
    out.halves[2 * place + 1] = int32_t(halves[1]);
}

void quantize(const float* x, int64_t stride, const float* norm, float eps, int row, const Activations& out) {
    x += row * stride;
    const float factor = norm ? norm_factor(x, out.columns, eps) : 1.0f;
    for (int g = 0; g < out.columns / kGroup; ++g) {
        Floats parts[kGroup / kLanes];
        for (int i = 0; i < kGroup / kLanes; ++i) {
            const int column = g * kGroup + i * kLanes;
            parts[i] = load(x + column);
            if (norm) parts[i] = parts[i] * factor * load(norm + column);
        }
        quantize_group(parts, row, g, out);
    }
}

void silu_quantize(const float* gate_up, int64_t stride, int row, const Activations& out) {
    const float* gate = gate_up + row * stride;
    const float* up = gate + out.columns;
    for (int g = 0; g < out.columns / kGroup; ++g) {
        Floats parts[kGroup / kLanes];
        for (int i = 0; i < kGroup / kLanes; ++i) {
            const int column = g * kGroup + i * kLanes;
            const Floats x = load(gate + column);
            parts[i] = x / (exponential(-x) + 1.0f) * load(up + column);
        }
        quantize_group(parts, row, g, out);
    }
}

// Norm a head and turn it: number i is paired with number i + head_dim / 2.
inline void turn(float* head, int head_dim, const float* norm, float eps, const float* angles) {
    if (norm) rms_norm(head, norm, eps, head_dim, head);
    const int half = head_dim / 2;
    for (int i = 0; i < half; ++i) {
        const float a = head[i], b = head[i + half], cosine = angles[i], sine = angles[i + half];
        head[i] = a * cosine - b * sine;
        head[i + half] = b * cosine + a * sine;
    }
}

inline void store_numbers(const float* from, int count, CacheType type, void* to, int64_t place) {
    if (type == CacheType::kFloat32) {
        std::memcpy(static_cast<float*>(to) + place, from, count * sizeof(float));
        return;
    }
    uint16_t* halves = static_cast<uint16_t*>(to) + place;
    const bool is_half = type == CacheType::kFloat16;
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        is_half ? store_half(halves + i, load(from + i)) : store_bfloat16(halves + i, load(from + i));
    }
    for (; i < count; ++i) halves[i] = is_half ? float_to_half(from[i]) : float_to_bfloat16(from[i]);
}

void rope_store(float* qkv, int64_t position, int64_t slot, const RopeStore& how, const CacheView& cache) {
    const int dim = cache.head_dim;
    float* keys = qkv + int64_t(how.num_heads) * dim;
    if (how.rotary) {
        const float* angles = how.rotary + position * dim;
        for (int head = 0; head < how.num_heads; ++head) turn(qkv + head * dim, dim, how.q_norm, how.eps, angles);
        for (int head = 0; head < cache.kv_heads; ++head) turn(keys + head * dim, dim, how.k_norm, how.eps, angles);
    }
    if (slot < 0) return;
    // Keys and values of all heads lie side by side, here and in the cache.
    const int count = 2 * cache.kv_heads * dim;
    store_numbers(keys, count, cache.type, cache.data, slot * count);
}

}  // namespace infinilm::INFINILM_ISA
