// Attention over the paged KV cache, read where it lies, block by block.
//
// Keys are taken in tiles of 32, at fixed places of a request; a row's maximum, weight and sums are carried from tile to
// tile, put aside at every multiple of kSplit keys and merged in order. So a token's result is the same bits whether it
// is computed alone or in a chunk, by one thread or several.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"
#include "simd.h"

namespace infinilm::INFINILM_ISA {

constexpr int kTileKeys = 32;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline int padded(int head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

// Numbers of the cache as floats, zeros up to a whole vector.
template <CacheType kType>
inline void read_head(const void* cache, int64_t place, int count, float* out) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        if constexpr (kType == CacheType::kFloat32) store(out + i, load(static_cast<const float*>(cache) + place + i));
        if constexpr (kType == CacheType::kFloat16) {
            store(out + i, load_half(static_cast<const uint16_t*>(cache) + place + i));
        }
        if constexpr (kType == CacheType::kBFloat16) {
            store(out + i, load_bfloat16(static_cast<const uint16_t*>(cache) + place + i));
        }
    }
    for (; i < padded(count); ++i) {
        float value = 0.0f;
        if (i < count) {
            if constexpr (kType == CacheType::kFloat32) value = static_cast<const float*>(cache)[place + i];
            if constexpr (kType == CacheType::kFloat16) {
                value = half_to_float(static_cast<const uint16_t*>(cache)[place + i]);
            }
            if constexpr (kType == CacheType::kBFloat16) {
                value = bfloat16_to_float(static_cast<const uint16_t*>(cache)[place + i]);
            }
        }
        out[i] = value;
    }
}

// What a row has gathered so far: sums of values [head_dim], the largest score, the sum of weights.
struct Gathered {
    float* values;
    float& maximum;
    float& weight;
};

inline Gathered gathered_at(float* place, int dim) { return {place, place[dim], place[dim + 1]}; }

inline void clear(Gathered row, int dim) {
    for (int d = 0; d < dim; ++d) row.values[d] = 0.0f;
    row.maximum = kNothing;
    row.weight = 0.0f;
}

inline void scale_values(float* values, float factor, int dim) {
    for (int d = 0; d < dim; d += kLanes) store(values + d, load(values + d) * factor);
}

inline float exponential_of(float x) { return exponential(all(x))[0]; }

// Put another split's part, whose keys come later, to what there is. Rows are padded to whole vectors.
inline void merge_into(Gathered row, Gathered part, int dim) {
    if (part.maximum == kNothing) return;
    const float maximum = std::max(row.maximum, part.maximum);
    const float old = row.maximum == kNothing ? 0.0f : exponential_of(row.maximum - maximum);
    const float add = exponential_of(part.maximum - maximum);
    for (int d = 0; d < dim; d += kLanes) {
        store(row.values + d, multiply_add(load(part.values + d), all(add), load(row.values + d) * old));
    }
    row.weight = row.weight * old + part.weight * add;
    row.maximum = maximum;
}

inline void normalize(Gathered row, int dim, float* out) {
    const float factor = row.weight > 0.0f ? 1.0f / row.weight : 0.0f;
    for (int d = 0; d < dim; ++d) out[d] = row.values[d] * factor;
}

// A row's scores for the keys of a tile. Where kDim is the heads' size, known here, all addresses are constants.
template <int kDim>
inline void score(const float* query, const float* keys, int any_dim, float* scores) {
    const int dim = kDim ? kDim : any_dim;
    for (int first = 0; first < kTileKeys; first += kLanes) {
        Floats sums[kLanes];
#pragma GCC unroll 16
        for (int k = 0; k < kLanes; ++k) sums[k] = all(0.0f);
#pragma GCC unroll 1
        for (int d = 0; d < dim; d += kLanes) {
            const Floats q = load(query + d);
#pragma GCC unroll 16
            for (int k = 0; k < kLanes; ++k) sums[k] = multiply_add(q, load(keys + (first + k) * dim + d), sums[k]);
        }
        store(scores + first, sums_of(sums));
    }
}

// A row's weighted sum of a tile's values, on top of `out`.
template <int kDim>
inline void add_values(const float* weights, const float* values, int keys, int any_dim, float* out) {
    const int dim = kDim ? kDim : any_dim;
    constexpr int kAtOnce = 4;
    int d = 0;
    for (; d + kAtOnce * kLanes <= dim; d += kAtOnce * kLanes) {
        Floats sums[kAtOnce];
        for (int i = 0; i < kAtOnce; ++i) sums[i] = load(out + d + i * kLanes);
        for (int k = 0; k < keys; ++k) {
            const Floats weight = all(weights[k]);
            for (int i = 0; i < kAtOnce; ++i) {
                sums[i] = multiply_add(weight, load(values + k * dim + d + i * kLanes), sums[i]);
            }
        }
        for (int i = 0; i < kAtOnce; ++i) store(out + d + i * kLanes, sums[i]);
    }
    for (; d < dim; d += kLanes) {
        Floats sum = load(out + d);
        for (int k = 0; k < keys; ++k) sum = multiply_add(all(weights[k]), load(values + k * dim + d), sum);
        store(out + d, sum);
    }
}

// Turn a row's scores into weights, of which those from `first` up to `end` count, and make room for them: the row's
// maximum is theirs, too, and what it has gathered is scaled accordingly.
inline void weigh(float* scores, int first, int end, int dim, Gathered row) {
    for (int k = 0; k < first; ++k) scores[k] = kNothing;
    for (int k = end; k < kTileKeys; ++k) scores[k] = kNothing;
    Floats largest = load(scores);
    for (int k = kLanes; k < kTileKeys; k += kLanes) largest = larger(largest, load(scores + k));
    const float maximum = std::max(row.maximum, largest_of(largest));
    Floats total = all(0.0f);
    for (int k = 0; k < kTileKeys; k += kLanes) {
        const Floats weights = exponential(load(scores + k) - maximum);
        store(scores + k, weights);
        total += weights;
    }
    if (row.maximum != kNothing && row.maximum != maximum) {
        const float factor = exponential_of(row.maximum - maximum);
        scale_values(row.values, factor, dim);
        row.weight *= factor;
    }
    row.weight += sum_of(total);
    row.maximum = maximum;
}

template <CacheType kType, int kDim>
void attend_typed(const AttentionTask& task, const CacheView& cache) {
    constexpr int kMaxRow = kMaxHeadDim + 2;
    constexpr int kRowsAtOnce = kMaxGroupHeads;
    alignas(64) float keys[kTileKeys * kMaxHeadDim], values[kTileKeys * kMaxHeadDim];
    alignas(64) float queries[kRowsAtOnce * kMaxHeadDim], scores[kRowsAtOnce * kTileKeys];
    alignas(64) float split[kRowsAtOnce * kMaxRow], total[kRowsAtOnce * kMaxRow];

    const int dim = kDim ? kDim : cache.head_dim, wide = padded(dim), row_size = wide + 2;
    const int64_t token_size = 2 * int64_t(cache.kv_heads) * dim;
    // Rows are a token's heads, as many tokens at a time as fit.
    const int tokens_at_once = std::max(1, std::min(kRowsAtOnce / task.heads, task.tokens));
    for (int first_token = 0; first_token < task.tokens; first_token += tokens_at_once) {
        const int tokens = std::min(tokens_at_once, task.tokens - first_token), rows = tokens * task.heads;
        for (int r = 0; r < rows; ++r) {
            const float* query =
                task.query + (first_token + r / task.heads) * task.query_stride + (r % task.heads) * int64_t(dim);
            for (int d = 0; d < wide; ++d) queries[r * wide + d] = d < dim ? query[d] * task.scale : 0.0f;
            clear(gathered_at(total + r * row_size, wide), wide);
        }
        const int64_t position = task.position + first_token;
        const int64_t end_key = std::min(task.end_key, position + tokens);
        // Keys before the first row's window are seen by none.
        const int64_t seen_from = task.window ? std::max<int64_t>(0, position - task.window + 1) : 0;
        const int64_t begin = std::max(task.first_key, seen_from / kTileKeys * kTileKeys);
        for (int64_t split_begin = begin; split_begin < end_key;) {
            const int64_t split_end = std::min((split_begin / kSplit + 1) * kSplit, end_key);
            for (int r = 0; r < rows; ++r) clear(gathered_at(split + r * row_size, wide), wide);
            for (int64_t tile = split_begin; tile < split_end; tile += kTileKeys) {
                const int count = int(std::min<int64_t>(kTileKeys, split_end - tile));
                for (int k = 0; k < count; ++k) {
                    const int64_t key = tile + k;
                    const int64_t slot =
                        task.blocks[key / cache.block_size] * cache.block_size + key % cache.block_size;
                    const int64_t place = slot * token_size + int64_t(task.kv_head) * dim;
                    read_head<kType>(cache.data, place, dim, keys + k * wide);
                    read_head<kType>(cache.data, place + int64_t(cache.kv_heads) * dim, dim, values + k * wide);
                }
                std::fill(keys + count * wide, keys + kTileKeys * wide, 0.0f);
                // Which of the tile's keys a row sees.
                const auto first_of = [&](int r) {
                    const int64_t first = task.window ? position + r / task.heads - task.window + 1 - tile : 0;
                    return int(std::clamp<int64_t>(first, 0, kTileKeys));
                };
                const auto end_of = [&](int r) {
                    return int(std::clamp<int64_t>(position + r / task.heads + 1 - tile, 0, count));
                };
                // One thing after the other for all rows, so that a row need not wait for its own results.
                for (int r = 0; r < rows; ++r) {
                    if (end_of(r) > first_of(r)) score<kDim>(queries + r * wide, keys, wide, scores + r * kTileKeys);
                }
                for (int r = 0; r < rows; ++r) {
                    if (end_of(r) <= first_of(r)) continue;
                    weigh(scores + r * kTileKeys, first_of(r), end_of(r), wide, gathered_at(split + r * row_size, wide));
                }
                for (int r = 0; r < rows; ++r) {
                    if (end_of(r) <= first_of(r)) continue;
                    add_values<kDim>(scores + r * kTileKeys, values, end_of(r), wide, split + r * row_size);
                }
            }
            for (int r = 0; r < rows; ++r) {
                merge_into(gathered_at(total + r * row_size, wide), gathered_at(split + r * row_size, wide), wide);
            }
            split_begin = split_end;
        }
        for (int r = 0; r < rows; ++r) {
            const Gathered row = gathered_at(total + r * row_size, wide);
            if (task.partial) {
                const int64_t index = int64_t(first_token) * task.heads + r;
                std::copy(row.values, row.values + row_size, task.partial + index * row_size);
            } else {
                const int64_t token = first_token + r / task.heads;
                normalize(row, dim, task.out + token * task.out_stride + (r % task.heads) * int64_t(dim));
            }
        }
    }
}

template <CacheType kType>
void attend_sized(const AttentionTask& task, const CacheView& cache) {
    switch (cache.head_dim) {
        case 64: return attend_typed<kType, 64>(task, cache);
        case 128: return attend_typed<kType, 128>(task, cache);
        default: return attend_typed<kType, 0>(task, cache);
    }
}

void attend(const AttentionTask& task, const CacheView& cache) {
    switch (cache.type) {
        case CacheType::kFloat32: return attend_sized<CacheType::kFloat32>(task, cache);
        case CacheType::kFloat16: return attend_sized<CacheType::kFloat16>(task, cache);
        case CacheType::kBFloat16: return attend_sized<CacheType::kBFloat16>(task, cache);
    }
}

int partial_size(int head_dim) { return padded(head_dim) + 2; }

void merge(const float* partials, int64_t stride, int splits, int head_dim, float* out) {
    alignas(64) float total[kMaxHeadDim + 2];
    alignas(64) float part[kMaxHeadDim + 2];
    const int wide = padded(head_dim);
    clear(gathered_at(total, wide), wide);
    for (int s = 0; s < splits; ++s) {
        std::copy(partials + s * stride, partials + s * stride + wide + 2, part);
        merge_into(gathered_at(total, wide), gathered_at(part, wide), wide);
    }
    normalize(gathered_at(total, wide), head_dim, out);
}

}  // namespace infinilm::INFINILM_ISA
