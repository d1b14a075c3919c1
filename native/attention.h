// Attention over the paged KV cache, which is read in place, block by block.
//
// Keys are processed in tiles of 32, which begin at fixed positions of a request. A row's maximum, weight and sums are
// carried from tile to tile; they restart at every multiple of kSplit keys, and the splits are merged in order. So a
// token's result has the same bits whether it is computed alone or in a chunk, by one thread or several.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "kernels.h"
#include "numbers.h"
#include "simd.h"

namespace infinilm::INFINILM_ISA {

constexpr int kTileKeys = 32;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline int padded(int head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

// Read `count` numbers of the cache as floats and pad them with zeros to a whole vector. 8-bit floats are multiplied by
// scales[which].
template <FloatType kType>
inline void read_head(const void* cache, int64_t place, int count, float* out, const uint16_t* scales, int which) {
    int i = 0;
    if constexpr (kType == FloatType::kFloat8) {
        const float factor = bfloat16_to_float(scales[which]);
        for (; i + kLanes <= count; i += kLanes) store(out + i, load_numbers<kType>(cache, place + i) * factor);
        for (; i < count; ++i) out[i] = load_number<kType>(cache, place + i) * factor;
    }
    for (; i + kLanes <= count; i += kLanes) store(out + i, load_numbers<kType>(cache, place + i));
    for (; i < count; ++i) out[i] = load_number<kType>(cache, place + i);
    for (; i < padded(count); ++i) out[i] = 0.0f;
}

// A row's running result: sums of values [head_dim], the largest score, the sum of weights.
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

// Merge the part of a later split into a row. Rows are padded to whole vectors.
inline void merge_into(Gathered row, Gathered part, int dim) {
    if (part.weight == 0.0f) return;  // no key was seen
    const float maximum = std::max(row.maximum, part.maximum);
    const float old = row.maximum == kNothing ? 0.0f : exponential_of(row.maximum - maximum);
    const float add = exponential_of(part.maximum - maximum);
    for (int d = 0; d < dim; d += kLanes) {
        store(row.values + d, multiply_add(load(part.values + d), all(add), load(row.values + d) * old));
    }
    row.weight = row.weight * old + part.weight * add;
    row.maximum = maximum;
}

// A sink adds to the weights and not to the values.
inline void normalize(Gathered row, int dim, const float* sink, float* out) {
    const float weight = row.weight + (sink ? exponential_of(*sink - row.maximum) : 0.0f);
    const float factor = weight == 0.0f ? 0.0f : 1.0f / weight;
    for (int d = 0; d < dim; ++d) out[d] = row.values[d] * factor;
}

// The scores of kRows rows, `dim` numbers apart, for the keys of a tile. If the head size is known at compile time as
// kDim, all addresses are constants. A score is summed within lanes first, then across lanes, so its bits do not depend
// on kRows.
template <int kDim, int kRows>
inline void score(const float* queries, const float* keys, int any_dim, float* scores) {
    constexpr int kAtOnce = std::max(1, kLanes / (kRows == 3 ? 4 : kRows));  // keys
    const int dim = kDim ? kDim : any_dim;
    for (int first = 0; first < kTileKeys; first += kLanes) {
        Floats sums[kRows][kLanes];
        for (int part = 0; part < kLanes; part += kAtOnce) {
            Floats own[kRows][kAtOnce];
            for (int r = 0; r < kRows; ++r) {
                for (int k = 0; k < kAtOnce; ++k) own[r][k] = all(0.0f);
            }
#pragma GCC unroll 1
            for (int d = 0; d < dim; d += kLanes) {
                Floats key[kAtOnce];
                for (int k = 0; k < kAtOnce; ++k) key[k] = load(keys + (first + part + k) * dim + d);
                for (int r = 0; r < kRows; ++r) {
                    const Floats query = load(queries + r * dim + d);
                    for (int k = 0; k < kAtOnce; ++k) own[r][k] = multiply_add(query, key[k], own[r][k]);
                }
            }
            for (int r = 0; r < kRows; ++r) {
                for (int k = 0; k < kAtOnce; ++k) sums[r][part + k] = own[r][k];
            }
        }
        for (int r = 0; r < kRows; ++r) store(scores + r * kTileKeys + first, sums_of(sums[r]));
    }
}

// Transpose keys [kLanes, dim] to [dim, kLanes].
inline void turn_keys(const float* keys, int dim, float* turned) {
    for (int d = 0; d < dim; d += kLanes) {
        Floats block[kLanes];
        for (int k = 0; k < kLanes; ++k) block[k] = load(keys + k * dim + d);
        transpose(block);
        for (int i = 0; i < kLanes; ++i) store(turned + (d + i) * kLanes, block[i]);
    }
}

// For kRows rows and kLanes transposed keys: the sum of the kCount lanes from kFirst on that `score` has before it adds
// across lanes, added in the same order as by `sums_of`.
template <int kDim, int kRows, int kFirst, int kCount>
inline __attribute__((always_inline)) void score_lanes(const float* queries, const float* turned, int any_dim,
                                                       Floats (&sums)[kRows]) {
    if constexpr (kCount == 1) {
        const int dim = kDim ? kDim : any_dim;
        for (Floats& sum : sums) sum = all(0.0f);
#pragma GCC unroll 4
        for (int d = kFirst; d < dim; d += kLanes) {
            const Floats keys = load(turned + d * kLanes);
            for (int r = 0; r < kRows; ++r) sums[r] = multiply_add(all(queries[r * dim + d]), keys, sums[r]);
        }
    } else {
        Floats others[kRows];
        score_lanes<kDim, kRows, kFirst, kCount / 2>(queries, turned, any_dim, sums);
        score_lanes<kDim, kRows, kFirst + kCount / 2, kCount / 2>(queries, turned, any_dim, others);
        for (int r = 0; r < kRows; ++r) sums[r] += others[r];
    }
}

// Computes the same bits as `score`, for kLanes transposed keys, without additions across a vector.
template <int kDim, int kRows>
inline void score_turned(const float* queries, const float* turned, int dim, float* scores) {
    Floats sums[kRows];
    score_lanes<kDim, kRows, 0, kLanes>(queries, turned, dim, sums);
    for (int r = 0; r < kRows; ++r) store(scores + r * kTileKeys, sums[r]);
}

// cap * tanh(score / cap) of a row's scores.
inline void cap_scores(float* scores, float cap) {
    for (int k = 0; k < kTileKeys; k += kLanes) {
        const Floats grown = exponential(load(scores + k) * (2.0f / cap));
        store(scores + k, all(cap) - all(2.0f * cap) / (grown + 1.0f));
    }
}

constexpr int kValueVectors = kLanes < 16 ? 2 : 4;  // vectors of a value that are summed at a time

// Add the weighted sums of the values `first` to `end` of a tile to `out`, for kRows rows and the values' numbers from
// `d` on. The rows' weights are kTileKeys apart, their sums `out_stride`. Keys are added in order.
template <int kRows, int kVectors>
inline void add_values(const float* weights, const float* values, int first, int end, int dim, int d, float* out,
                       int out_stride) {
    Floats sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < kVectors; ++i) sums[r][i] = load(out + r * out_stride + d + i * kLanes);
    }
    for (int k = first; k < end; ++k) {
        Floats value[kVectors];
        for (int i = 0; i < kVectors; ++i) value[i] = load(values + k * dim + d + i * kLanes);
        for (int r = 0; r < kRows; ++r) {
            const Floats weight = all(weights[r * kTileKeys + k]);
            for (int i = 0; i < kVectors; ++i) sums[r][i] = multiply_add(weight, value[i], sums[r][i]);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < kVectors; ++i) store(out + r * out_stride + d + i * kLanes, sums[r][i]);
    }
}

// Turn a row's scores for a tile into weights; those outside of `first` ... `end` become 0. Updates the row's maximum,
// rescales the sums that it has so far, and adds the weights to its sum of weights.
inline void weigh(float* scores, int first, int end, int dim, Gathered row) {
    for (int k = 0; k < first; ++k) scores[k] = kNothing;
    for (int k = end; k < kTileKeys; ++k) scores[k] = kNothing;
    Floats largest = load(scores);
    for (int k = kLanes; k < kTileKeys; k += kLanes) largest = larger(largest, load(scores + k));
    if (is_any_larger(largest, all(row.maximum))) {  // rare after the first tiles
        // `larger` takes the second of two if one is NaN: a NaN is not the maximum, but makes the weights NaN.
        const float maximum = largest_of(larger(largest, all(row.maximum)));
        if (row.maximum != kNothing) {
            const float factor = exponential_of(row.maximum - maximum);
            scale_values(row.values, factor, dim);
            row.weight *= factor;
        }
        row.maximum = maximum;
    }
    Floats total = all(0.0f);
    for (int k = 0; k < kTileKeys; k += kLanes) {
        const Floats weights = exponential(load(scores + k) - row.maximum);
        store(scores + k, weights);
        total += weights;
    }
    row.weight += sum_of(total);
}

// Processes the keys for some tokens' heads at once. Each head of a token is a row; all rows share each tile that is
// read from the cache.
template <FloatType kType, int kDim>
class Rows {
public:
    static int most_tokens(const AttentionTask& task) { return std::max(1, kMaxRows / task.heads); }

    Rows(const AttentionTask& task, const CacheView& cache, int first_token, int tokens)
        : task_(task), cache_(cache), first_token_(first_token), rows_(tokens * task.heads) {
        dim_ = kDim ? kDim : cache.head_dim;
        position_ = task.position + first_token;
        for (int r = 0; r < rows_; ++r) {
            const float* query = task.query + offset(r, task.query_stride);
            for (int d = 0; d < wide(); ++d) queries_[r * wide() + d] = d < dim_ ? query[d] * task.scale : 0.0f;
            clear(row(total_, r), wide());
        }
        end_key_ = std::min(task.end_key, position_ + tokens);
    }

    void run() {
        // No row sees keys before the first row's window.
        const int64_t seen_from = task_.window ? std::max<int64_t>(0, position_ - task_.window + 1) : 0;
        int64_t begin = std::max(task_.first_key, seen_from / kTileKeys * kTileKeys);
        while (begin < end_key_) {
            const int64_t end = std::min((begin / kSplit + 1) * kSplit, end_key_);
            for (int r = 0; r < rows_; ++r) clear(row(split_, r), wide());
            for (; begin < end; begin += kTileKeys) {
                const int count = int(std::min<int64_t>(kTileKeys, end - begin));
                read_tile(begin, count);
                meet_tile(begin, count);
            }
            for (int r = 0; r < rows_; ++r) merge_into(row(total_, r), row(split_, r), wide());
        }
        write();
    }

private:
    static constexpr int kMaxRows = kMaxGroupHeads;
    static constexpr int kTogether = 4;   // the most rows that share a read
    static constexpr int kTurnFrom = 12;  // with this many rows or more, transposing the keys pays off

    int wide() const { return padded(kDim ? kDim : dim_); }  // a constant if kDim is set

    Gathered row(float* all_rows, int r) const { return gathered_at(all_rows + r * (wide() + 2), wide()); }

    // The offset of a row's head in the query or the output.
    int64_t offset(int r, int64_t stride) const {
        return (first_token_ + r / task_.heads) * stride + (r % task_.heads) * int64_t(dim_);
    }

    void read_tile(int64_t first_key, int count) {
        const int64_t value_offset = int64_t(cache_.kv_heads) * dim_;
        for (int k = 0; k < count; ++k) {
            const int64_t key = first_key + k;
            const int64_t slot = task_.blocks[key / cache_.block_size] * cache_.block_size + key % cache_.block_size;
            const int64_t place = slot * 2 * value_offset + int64_t(task_.kv_head) * dim_;
            const uint16_t* scales = cache_.scales ? cache_.scales_of(slot, task_.kv_head) : nullptr;
            read_head<kType>(cache_.data, place, dim_, keys_ + k * wide(), scales, 0);
            read_head<kType>(cache_.data, place + value_offset, dim_, values_ + k * wide(), scales, 1);
        }
        std::fill(keys_ + count * wide(), keys_ + kTileKeys * wide(), 0.0f);
    }

    void meet_tile(int64_t first_key, int count) {
        // The range of the tile's keys that each row sees.
        int first[kMaxRows], end[kMaxRows];
        for (int r = 0; r < rows_; ++r) {
            const int64_t own = position_ + r / task_.heads - first_key;
            first[r] = task_.window ? int(std::clamp<int64_t>(own - task_.window + 1, 0, kTileKeys)) : 0;
            end[r] = int(std::clamp<int64_t>(own + 1, 0, count));
        }
        // Each operation runs over all rows before the next one, so that a row need not wait for its own results. Up to
        // kTogether neighbouring rows that see keys share what is read: `act(first row, number of rows)`.
        const auto for_rows = [&](const auto& act) {
            for (int r = 0; r < rows_;) {
                int seeing = 0;
                while (seeing < kTogether && r + seeing < rows_ && first[r + seeing] < end[r + seeing]) ++seeing;
                switch (seeing) {
                    case 4: act(r, std::integral_constant<int, 4>()); break;
                    case 3: act(r, std::integral_constant<int, 3>()); break;
                    case 2: act(r, std::integral_constant<int, 2>()); break;
                    case 1: act(r, std::integral_constant<int, 1>()); break;
                }
                r += std::max(1, seeing);
            }
        };
        if (rows_ < kTurnFrom) {
            for_rows([&](int r, auto count_of) {
                score<kDim, decltype(count_of)::value>(queries_ + r * wide(), keys_, wide(), scores_ + r * kTileKeys);
            });
        } else {
            for (int k = 0; k < count; k += kLanes) {
                turn_keys(keys_ + k * wide(), wide(), turned_);
                for_rows([&](int r, auto count_of) {
                    score_turned<kDim, decltype(count_of)::value>(queries_ + r * wide(), turned_, wide(),
                                                                  scores_ + r * kTileKeys + k);
                });
            }
        }
        for (int r = 0; r < rows_ && task_.cap > 0.0f; ++r) {
            if (first[r] < end[r]) cap_scores(scores_ + r * kTileKeys, task_.cap);
        }
        for (int r = 0; r < rows_; ++r) {
            if (first[r] < end[r]) weigh(scores_ + r * kTileKeys, first[r], end[r], wide(), row(split_, r));
        }
        const auto add = [&](int d, auto vectors) {
            constexpr int kVectors = decltype(vectors)::value;
            for_rows([&](int r, auto count_of) {
                constexpr int kRows = decltype(count_of)::value;
                // Keys that not all rows see are added row by row. A key that a row does not see is not even multiplied
                // by 0: it may be NaN, and before the window it may be another request's.
                const int shared_end = *std::min_element(end + r, end + r + kRows);
                const int shared = std::min(*std::max_element(first + r, first + r + kRows), shared_end);
                const auto add_own = [&](int i, int from, int to) {
                    if (from >= to) return;
                    add_values<1, kVectors>(scores_ + i * kTileKeys, values_, from, to, wide(), d, row(split_, i).values, 0);
                };
                for (int i = r; i < r + kRows; ++i) add_own(i, first[i], shared);
                add_values<kRows, kVectors>(scores_ + r * kTileKeys, values_, shared, shared_end, wide(), d,
                                            row(split_, r).values, wide() + 2);
                for (int i = r; i < r + kRows; ++i) add_own(i, std::max(first[i], shared_end), end[i]);
            });
        };
        // Process some of the values' numbers for all rows, then the next, so that the values stay in the cache.
        int d = 0;
        for (; d + kValueVectors * kLanes <= wide(); d += kValueVectors * kLanes) {
            add(d, std::integral_constant<int, kValueVectors>());
        }
        for (; d < wide(); d += kLanes) add(d, std::integral_constant<int, 1>());
    }

    void write() {
        for (int r = 0; r < rows_; ++r) {
            const Gathered result = row(total_, r);
            if (task_.partial) {
                const int64_t index = int64_t(first_token_) * task_.heads + r;
                std::copy(result.values, result.values + wide() + 2, task_.partial + index * (wide() + 2));
            } else {
                const float* sink = task_.sinks ? task_.sinks + r % task_.heads : nullptr;
                normalize(result, dim_, sink, task_.out + offset(r, task_.out_stride));
            }
        }
    }

    const AttentionTask& task_;
    const CacheView& cache_;
    int first_token_, rows_, dim_;
    int64_t position_, end_key_;
    alignas(64) float keys_[kTileKeys * kMaxHeadDim];
    alignas(64) float turned_[kLanes * kMaxHeadDim];
    alignas(64) float values_[kTileKeys * kMaxHeadDim];
    alignas(64) float queries_[kMaxRows * kMaxHeadDim];
    alignas(64) float scores_[kMaxRows * kTileKeys];
    alignas(64) float split_[kMaxRows * (kMaxHeadDim + 2)];
    alignas(64) float total_[kMaxRows * (kMaxHeadDim + 2)];
};

template <FloatType kType, int kDim>
void attend_typed(const AttentionTask& task, const CacheView& cache) {
    const int most = Rows<kType, kDim>::most_tokens(task);
    for (int first = 0; first < task.tokens; first += most) {
        Rows<kType, kDim>(task, cache, first, std::min(most, task.tokens - first)).run();
    }
}

template <FloatType kType>
void attend_sized(const AttentionTask& task, const CacheView& cache) {
    switch (cache.head_dim) {
        case 64: return attend_typed<kType, 64>(task, cache);
        case 128: return attend_typed<kType, 128>(task, cache);
        case 256: return attend_typed<kType, 256>(task, cache);
        default: return attend_typed<kType, 0>(task, cache);
    }
}

void attend(const AttentionTask& task, const CacheView& cache) {
    switch (cache.type) {
        case FloatType::kFloat32: return attend_sized<FloatType::kFloat32>(task, cache);
        case FloatType::kFloat16: return attend_sized<FloatType::kFloat16>(task, cache);
        case FloatType::kBFloat16: return attend_sized<FloatType::kBFloat16>(task, cache);
        case FloatType::kFloat8: return attend_sized<FloatType::kFloat8>(task, cache);
    }
}

int partial_size(int head_dim) { return padded(head_dim) + 2; }

void merge(const float* partials, int64_t stride, int splits, int head_dim, const float* sink, float* out) {
    alignas(64) float total[kMaxHeadDim + 2];
    alignas(64) float part[kMaxHeadDim + 2];
    const int wide = padded(head_dim);
    clear(gathered_at(total, wide), wide);
    for (int s = 0; s < splits; ++s) {
        std::copy(partials + s * stride, partials + s * stride + wide + 2, part);
        merge_into(gathered_at(total, wide), gathered_at(part, wide), wide);
    }
    normalize(gathered_at(total, wide), head_dim, sink, out);
}

}  // namespace infinilm::INFINILM_ISA
