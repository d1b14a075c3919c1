// The kernels of gated delta nets. They process a text's tokens one by one, so that chunking it does not change a bit.
#pragma once

#include <algorithm>
#include <cmath>

#include "elementwise.h"
#include "kernels.h"
#include "simd.h"

namespace infinilm::INFINILM_ISA {

void convolve(const ConvTask& task) {
    const int kept = task.width - 1;
    for (int first = 0; first < task.count; first += kLanes) {
        const int count = std::min(kLanes, task.count - first);
        Floats weight[kMaxConvWidth], seen[kMaxConvWidth];
        for (int i = 0; i < task.width; ++i) {
            weight[i] = load_some(task.weight + i * task.weight_stride + first, count);
            seen[i] = all(0.0f);
        }
        for (int i = 0; task.source && i < kept; ++i) {
            for (int lane = 0; lane < count; ++lane) seen[i][lane] = task.source[(first + lane) * kept + i];
        }
        for (int64_t t = 0; t < task.tokens; ++t) {
            float* place = task.channels + t * task.stride + first;
            seen[kept] = load_some(place, count);
            Floats sum = weight[0] * seen[0];
            for (int i = 1; i < task.width; ++i) sum = multiply_add(weight[i], seen[i], sum);
            store_some(place, activate<Activation::kSilu>(sum), count);
            for (int i = 0; i < kept; ++i) seen[i] = seen[i + 1];
        }
        for (int i = 0; task.target && i < kept; ++i) {
            for (int lane = 0; lane < count; ++lane) task.target[(first + lane) * kept + i] = seen[i][lane];
        }
    }
}

void normalize_heads(float* x, int heads, int dim, float length) {
    for (; heads > 0; --heads, x += dim) {
        Floats squares = all(0.0f);
        for (int i = 0; i < dim; i += kLanes) {
            const Floats part = load_some(x + i, dim - i);
            squares = multiply_add(part, part, squares);
        }
        const float factor = length / std::sqrt(sum_of(squares) + 1e-6f);
        for (int i = 0; i < dim; i += kLanes) store_some(x + i, load_some(x + i, dim - i) * factor, dim - i);
    }
}

void delta_rule(const DeltaTask& task) {
    // Columns of the state are independent, so strips of them are processed one by one, which fit in the cache.
    constexpr int kVectors = 4, kStrip = kVectors * kLanes;
    alignas(64) float state[kMaxKeyDim * kStrip];
    for (int first = 0; first < task.value_dim; first += kStrip) {
        const int count = std::min(kStrip, task.value_dim - first);
        for (int r = 0; r < task.key_dim; ++r) {
            float* row = state + r * kStrip;
            int i = 0;
            if (task.source) {
                std::memcpy(row, task.source + int64_t(r) * task.value_dim + first, count * sizeof(float));
                i = count;
            }
            std::fill(row + i, row + kStrip, 0.0f);
        }
        for (int64_t t = 0; t < task.tokens; ++t) {
            const float *query = task.query + t * task.stride, *key = task.key + t * task.stride;
            float* value = task.value + t * task.stride + first;
            const float decay = task.decay[t * task.stride], rate = task.rate[t * task.stride];
            Floats change[kVectors], sums[kVectors];
            for (int v = 0; v < kVectors; ++v) change[v] = sums[v] = all(0.0f);
            for (int r = 0; r < task.key_dim; ++r) {
                const Floats own = all(key[r]);
                for (int v = 0; v < kVectors; ++v) {
                    change[v] = multiply_add(own, load(state + r * kStrip + v * kLanes), change[v]);
                }
            }
            for (int v = 0; v < kVectors; ++v) {
                change[v] = (load_some(value + v * kLanes, count - v * kLanes) - change[v] * decay) * rate;
            }
            for (int r = 0; r < task.key_dim; ++r) {
                const Floats own = all(key[r]), asked = all(query[r]);
                for (int v = 0; v < kVectors; ++v) {
                    float* place = state + r * kStrip + v * kLanes;
                    const Floats next = multiply_add(own, change[v], load(place) * decay);
                    store(place, next);
                    sums[v] = multiply_add(asked, next, sums[v]);
                }
            }
            for (int v = 0; v < kVectors; ++v) store_some(value + v * kLanes, sums[v], count - v * kLanes);
        }
        for (int r = 0; task.target && r < task.key_dim; ++r) {
            std::memcpy(task.target + int64_t(r) * task.value_dim + first, state + r * kStrip, count * sizeof(float));
        }
    }
}

void gate_heads(float* x, const float* gate, const float* norm, float eps, int heads, int dim) {
    for (; heads > 0; --heads, x += dim, gate += dim) {
        const float factor = norm ? norm_factor(x, dim, eps) : 1.0f;
        for (int i = 0; i < dim; i += kLanes) {
            const int count = dim - i;
            const Floats own = load_some(gate + i, count), part = load_some(x + i, count);
            const Floats open = 1.0f / (exponential(-own) + 1.0f);
            store_some(x + i, norm ? part * factor * load_some(norm + i, count) * (own * open) : part * open, count);
        }
    }
}

}  // namespace infinilm::INFINILM_ISA
