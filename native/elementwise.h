// Kernels on a single row or head: norms, rounding, rotation (RoPE), storing.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"
#include "simd.h"

namespace infinilm::INFINILM_ISA {

constexpr float kNoLimit = std::numeric_limits<float>::infinity();

// 1 / rms(x), for any number of columns.
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

// The sums over the half groups of a block.
inline void add_halves(Floats (&sums)[2 * kBlockGroups / kLanes][kLanes], float (&halves)[2 * kBlockGroups]) {
    for (int i = 0; i < 2 * kBlockGroups / kLanes; ++i) store(halves + i * kLanes, sums_of(sums[i]));
}

// Round a block of up to kBlockGroups groups. NaN becomes 0, but then the scale is NaN too, so the results are NaN.
inline void quantize_block(const float* x, int groups, int row, int block, const Activations& out) {
    constexpr int kHalf = kGroup / 2;
    Ints largest{};  // compared as integers: infinity is larger than finite numbers, NaN larger still
    for (int i = 0; i < groups * kGroup; i += kLanes) largest = larger((Ints)absolute(load(x + i)), largest);
    const float scale = float_of(uint32_t(largest_of(largest))) / float(kLargest);
    const float inverse = scale >= std::numeric_limits<float>::min() && scale < kNoLimit ? 1.0f / scale : 0.0f;
    const int64_t place = out.place(row, block);
    Floats sums[2 * kBlockGroups / kLanes][kLanes] = {};  // exact: the whole numbers are small
    for (int i = 0; i < groups * kGroup; i += kLanes) {
        Floats whole = round_to_even(load(x + i) * inverse);
        whole = whole == whole ? whole : all(0.0f);
        sums[i / kHalf / kLanes][i / kHalf % kLanes] += whole;
        if (out.whole) store_shorts(out.whole + place * kGroup + i, whole);
        if (out.coarse) {
            const Floats coarse = round_to_even(whole * (1.0f / kCoarseStep));
            store_bytes(out.coarse + place * kGroup + i, coarse);
            store_bytes(out.fine + place * kGroup + i, whole - coarse * float(kCoarseStep));
        }
    }
    float halves[2 * kBlockGroups];
    add_halves(sums, halves);
    out.scales[place / kBlockGroups] = scale;
    for (int g = 0; g < kBlockGroups; ++g) out.sums[place + g] = halves[2 * g] + halves[2 * g + 1];
    for (int i = 0; i < 2 * kBlockGroups; ++i) out.halves[2 * place + i] = int32_t(halves[i]);
}

// The sums over the halves of kGroups groups of bytes.
template <int kGroups>
inline void add_bytes(const int8_t* numbers, int32_t* halves) {
    constexpr int kVectors = 4;  // combined to one vector of sums
    Ints order{};
    for (int i = 0; i < kLanes; ++i) order[i] = 4 * (i % (kLanes / 4)) + i / (kLanes / 4);
    for (int first = 0; first < kGroups * kGroup; first += kVectors * 4 * kLanes) {
        Floats sums[kVectors];
        for (int v = 0; v < kVectors; ++v) {
            const int at = first + v * 4 * kLanes;
            sums[v] = (Floats)(at < kGroups * kGroup ? add_quads(numbers + at) : Ints{});
        }
        const Floats found = combine_each<2>(sums, [](Floats a, Floats b) { return (Floats)((Ints)a + (Ints)b); });
        const Floats ordered = pick(found, found, order);
        std::memcpy(halves + first / (kGroup / 2), &ordered, std::min<size_t>(sizeof ordered, kGroups * 2 * sizeof *halves));
    }
}

// Round kGroups groups to 8 bits. A group whose scale is not a normal number (all zero, or not all finite) becomes
// zeros.
template <int kGroups>
inline void quantize_bytes(const float* x, int64_t place, const Activations& out) {
    constexpr int kSet = std::min(kGroups, kLanes);  // groups with one number each in a vector
    const auto larger_bits = [](Floats a, Floats b) { return (Floats)larger((Ints)a, (Ints)b); };
    float scales[kGroups + kLanes], inverses[kGroups + kLanes], largest[kGroups + kLanes];
    Floats squares = all(0.0f);
    for (int first = 0; first < kGroups; first += kSet) {
        Floats each[kSet] = {};
#pragma GCC unroll 8
        for (int g = 0; g < kSet; ++g) {
            for (int i = 0; i < kGroup; i += kLanes) {
                const Floats numbers = load(x + (first + g) * kGroup + i);
                each[g] = larger_bits(absolute(numbers), each[g]);
                squares = multiply_add(numbers, numbers, squares);
            }
        }
        const Floats own = combine_each<kLanes / 2>(each, larger_bits), scale = own / float(kLargestByte);
        const Ints is_normal = (scale >= std::numeric_limits<float>::min()) & (scale < kNoLimit);
        store(largest + first, own);
        store(scales + first, scale);
        store(inverses + first, is_normal ? 1.0f / scale : all(0.0f));
    }
    int8_t *coarse = out.coarse + place * kGroup, *fine = out.fine + place * kGroup;
    std::memset(fine, 0, kGroups * kGroup);
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
        for (int i = 0; i < kGroup; i += kLanes) {
            const Floats numbers = load(x + g * kGroup + i) * inverses[g];
            store_bytes(coarse + g * kGroup + i, round_to_even(numbers == numbers ? numbers : all(0.0f)));
        }
    }
    add_bytes<kGroups>(coarse, out.halves + 2 * place);
    for (int g = 0; g < kGroups; ++g) {
        const int32_t* halves = out.halves + 2 * (place + g);
        out.scales[place + g] = scales[g];
        out.sums[place + g] = scales[g] * float(halves[0] + halves[1]);
    }
    std::memset(out.fine_halves + 2 * place, 0, 2 * kGroups * sizeof(int32_t));
    int fine_groups = 0;
    const float outlier = kOutlierShare * sum_of(squares);
    for (int g = 0; g < kGroups; ++g) {
        if (!(largest[g] * largest[g] > outlier)) continue;
        fine_groups |= 1 << g;
        for (int i = 0; i < kGroup; i += kLanes) {
            const Floats numbers = load(x + g * kGroup + i) * inverses[g];
            store_bytes(fine + g * kGroup + i, round_to_even((numbers - round_to_even(numbers)) * float(kFineSteps)));
        }
        int32_t* halves = out.fine_halves + 2 * (place + g);
        for (int i = 0; i < kGroup; ++i) halves[i / (kGroup / 2)] += fine[g * kGroup + i];
        out.sums[place + g] += scales[g] * (float(halves[0] + halves[1]) / float(kFineSteps));
    }
    out.fine_groups[place / kBlockGroups] = uint8_t(fine_groups);
}

// The same for a block, padded with zeros to a number of groups that is a compile-time constant.
inline void quantize_bytes(float* x, int groups, int row, int block, const Activations& out) {
    const int padded = groups <= 2 ? 2 : groups <= 4 ? 4 : kBlockGroups;
    const auto round = padded == 2 ? quantize_bytes<2> : padded == 4 ? quantize_bytes<4> : quantize_bytes<kBlockGroups>;
    std::fill(x + groups * kGroup, x + padded * kGroup, 0.0f);
    round(x, out.place(row, block), out);
}

// Round a row, or copy it if `out` is plain. `numbers(column)` returns a vector of the row.
template <typename Numbers>
inline void quantize_row(int row, const Activations& out, const Numbers& numbers) {
    if (out.bits == kPlainBits) {
        float* plain = out.plain + int64_t(row) * out.columns;
        for (int i = 0; i < out.columns; i += kLanes) store(plain + i, numbers(i));
        return;
    }
    constexpr int kBlock = kBlockGroups * kGroup;
    alignas(64) float x[kBlock];
    for (int first = 0; first < out.columns; first += kBlock) {
        const int count = std::min(kBlock, out.columns - first);
        for (int i = 0; i < count; i += kLanes) store(x + i, numbers(first + i));
        if (out.bits == 8) {
            quantize_bytes(x, count / kGroup, row, first / kBlock, out);
        } else {
            quantize_block(x, count / kGroup, row, first / kBlock, out);
        }
    }
}

void quantize(const float* x, int64_t stride, const float* norm, float eps, int row, const Activations& out) {
    x += row * stride;
    if (norm == nullptr) return quantize_row(row, out, [&](int column) { return load(x + column); });
    const float factor = norm_factor(x, out.columns, eps);
    quantize_row(row, out, [&](int column) { return load(x + column) * factor * load(norm + column); });
}

void add_normed(const float* x, const float* norm, float eps, float scale, int columns, float* hidden) {
    const float factor = norm ? norm_factor(x, columns, eps) : 1.0f;
    int i = 0;
    for (; i + kLanes <= columns; i += kLanes) {
        Floats part = load(x + i);
        if (norm) part = part * factor * load(norm + i);
        store(hidden + i, load(hidden + i) + part * all(scale));
    }
    for (; i < columns; ++i) hidden[i] += (norm ? x[i] * factor * norm[i] : x[i]) * scale;
}

template <Activation kActivation>
inline Floats activate(Floats x) {
    if constexpr (kActivation == Activation::kSilu) {
        return x / (exponential(-x) + 1.0f);
    } else {
        // 1 + tanh(y) is 2 / (1 + e^-2y), and y is sqrt(2 / pi) (x + 0.044715 x^3).
        const Floats inner = multiply_add(x * x * x, all(0.044715f), x);
        return x / (exponential(inner * -1.59576912f) + 1.0f);
    }
}

// NaN stays NaN.
inline Floats at_most(Floats x, float limit) { return x > limit ? all(limit) : x; }

template <Activation kActivation>
inline void activate_all_as(const float* x, int count, float* out) {
    for (int i = 0; i < count; i += kLanes) store_some(out + i, activate<kActivation>(load_some(x + i, count - i)), count - i);
}

void activate_all(const float* x, int count, Activation activation, float* out) {
    if (activation == Activation::kSilu) return activate_all_as<Activation::kSilu>(x, count, out);
    activate_all_as<Activation::kGeluTanh>(x, count, out);
}

template <Activation kActivation>
inline void gate_quantize_as(const float* gate, const float* up, int row, const Activations& out) {
    quantize_row(row, out, [&](int column) { return activate<kActivation>(load(gate + column)) * load(up + column); });
}

void gate_quantize(const float* gate_up, int64_t stride, const Gating& gating, int row, const Activations& out) {
    const float* gate = gate_up + row * stride;
    const float* up = gate + out.columns;
    switch (gating.activation) {
        case Activation::kSilu: return gate_quantize_as<Activation::kSilu>(gate, up, row, out);
        case Activation::kGeluTanh: return gate_quantize_as<Activation::kGeluTanh>(gate, up, row, out);
        case Activation::kClamped:
            return quantize_row(row, out, [&](int column) {
                const Floats own = at_most(load(gate + column), gating.limit);
                const Floats other = -at_most(-at_most(load(up + column), gating.limit), gating.limit);
                return own / (exponential(own * -gating.alpha) + 1.0f) * (other + 1.0f);
            });
    }
}

// Rotate a head by a position's cosines and sines. Rounds like torch's addcmul, which the Python layers use.
inline void turn(float* head, const float* angles, const RopeStore& how) {
    const int half = how.rotary_dim / 2;
    const float* sines = angles + half;
    if (how.is_interleaved) {
        for (int i = 0; i < half; ++i) {
            const float a = head[2 * i], b = head[2 * i + 1];
            head[2 * i] = multiply_add(-b, sines[i], a * angles[i]);
            head[2 * i + 1] = multiply_add(a, sines[i], b * angles[i]);
        }
        return;
    }
    float* partners = head + half;
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Floats a = load(head + i), b = load(partners + i), cosine = load(angles + i), sine = load(sines + i);
        store(head + i, multiply_add(-b, sine, a * cosine));
        store(partners + i, multiply_add(a, sine, b * cosine));
    }
    for (; i < half; ++i) {
        const float a = head[i], b = partners[i];
        head[i] = multiply_add(-b, sines[i], a * angles[i]);
        partners[i] = multiply_add(a, sines[i], b * angles[i]);
    }
}

// Norm and rotate some adjacent heads of a token.
inline void norm_and_turn(float* heads, int count, int dim, const float* norm, const float* angles, const RopeStore& how) {
    if (norm && how.norms_all_heads) rms_norm(heads, norm, how.eps, count * dim, heads);
    for (int i = 0; i < count; ++i) {
        if (norm && !how.norms_all_heads) rms_norm(heads + i * dim, norm, how.eps, dim, heads + i * dim);
        turn(heads + i * dim, angles, how);
    }
}

inline void store_numbers(const float* from, int count, FloatType type, void* to, int64_t place) {
    if (type == FloatType::kFloat32) {
        std::memcpy(static_cast<float*>(to) + place, from, count * sizeof(float));
        return;
    }
    uint16_t* halves = static_cast<uint16_t*>(to) + place;
    const bool is_half = type == FloatType::kFloat16;
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        is_half ? store_half(halves + i, load(from + i)) : store_bfloat16(halves + i, load(from + i));
    }
    for (; i < count; ++i) halves[i] = is_half ? float_to_half(from[i]) : float_to_bfloat16(from[i]);
}

// The bits of the largest magnitude; those of infinity or larger if a number is not finite.
inline uint32_t largest_bits(const float* numbers, int count) {
    uint32_t largest = 0;
    for (int i = 0; i < count; ++i) largest = std::max(largest, bits_of(numbers[i]) & 0x7fffffff);
    return largest;
}

// Write a head as 8-bit floats and a scale, the smallest power of 2 for which no code exceeds 448. Non-finite heads
// become zeros; with is_nan the scale becomes NaN.
inline void store_codes(const float* from, int count, uint32_t largest, bool is_nan, uint8_t* to, uint16_t* scale) {
    constexpr uint32_t kInfinite = 0x7f800000;
    const bool is_zero = is_nan || largest >= kInfinite;
    // One more if the mantissa is above 1.75, the mantissa of 448. At least 10, so that products with codes are normal.
    const int exponent = is_zero ? 10 : std::max(int((largest + 0x1fffff) >> 23) - 8, 10);
    const float inverse = float_of(uint32_t(254 - exponent) << 23);
    for (int i = 0; i < count; ++i) to[i] = is_zero ? 0 : float_to_float8(from[i] * inverse);
    *scale = is_nan ? 0x7fc0 : uint16_t(exponent << 7);
}

// Write a token's keys and values as 8-bit floats. If a head's key or value is not finite, its key becomes NaN, and a
// non-finite value becomes 0.
inline void store_codes(const float* keys, int64_t slot, const CacheView& cache) {
    const int dim = cache.head_dim, size = cache.kv_heads * dim;
    uint8_t* codes = static_cast<uint8_t*>(cache.data) + slot * 2 * size;
    for (int head = 0; head < cache.kv_heads; ++head) {
        const int place = head * dim;
        const uint32_t key = largest_bits(keys + place, dim), value = largest_bits(keys + size + place, dim);
        uint16_t* scales = cache.scales_of(slot, head);
        store_codes(keys + place, dim, key, std::max(key, value) >= 0x7f800000, codes + place, scales);
        store_codes(keys + size + place, dim, value, false, codes + size + place, scales + 1);
    }
}

void rope_store(float* qkv, int64_t position, int64_t slot, const RopeStore& how, const CacheView& cache) {
    const int dim = cache.head_dim, kv_heads = how.has_keys ? cache.kv_heads : 0;
    float* keys = qkv + int64_t(how.num_heads) * dim;
    if (how.rotary) {
        const float* angles = how.rotary + position * how.rotary_dim;
        norm_and_turn(qkv, how.num_heads, dim, how.q_norm, angles, how);
        norm_and_turn(keys, kv_heads, dim, how.k_norm, angles, how);
    }
    for (int head = kv_heads; how.v_norm && head < 2 * kv_heads; ++head) {
        rms_norm(keys + head * dim, how.v_norm, how.eps, dim, keys + head * dim);
    }
    if (how.query_scale) {
        for (float* query = qkv; query < keys; ++query) *query *= how.query_scale[position];
    }
    if (slot < 0 || !how.has_keys) return;
    // Keys and values of all heads are adjacent, here and in the cache.
    const int count = 2 * cache.kv_heads * dim;
    if (cache.type == FloatType::kFloat8) return store_codes(keys, slot, cache);
    store_numbers(keys, count, cache.type, cache.data, slot * count);
}

void turn_head(float* head, const float* angles, const RopeStore& how) { turn(head, angles, how); }

void store_latent(float* latent, int rank, int64_t position, int64_t slot, const RopeStore& how, const CacheView& cache) {
    rms_norm(latent, how.k_norm, how.eps, rank, latent);
    turn(latent + rank, how.rotary + position * how.rotary_dim, how);
    if (slot >= 0) store_numbers(latent, cache.head_dim, cache.type, cache.data, slot * cache.head_dim);
}

void dots(const float* x, const float* weight, int columns, int count, float* out) {
    for (int i = 0; i < count; ++i) {
        Floats sum = all(0.0f);
        int c = 0;
        for (; c + kLanes <= columns; c += kLanes) sum = multiply_add(load(x + c), load(weight + c), sum);
        float total = sum_of(sum);
        for (; c < columns; ++c) total += x[c] * weight[c];
        out[i] = total;
        weight += columns;
    }
}

}  // namespace infinilm::INFINILM_ISA
