// Latent attention: all heads attend to one vector per token, the key. Its first part is also the value.
#pragma once

#include <algorithm>

#include "attention.h"
#include "kernels.h"
#include "simd.h"

namespace infinilm::INFINILM_ISA {

// Processes the keys for the rows of a LatentTask, in tiles that begin at fixed positions of a request.
class LatentRows {
public:
    LatentRows(const LatentTask& task, const CacheView& cache) : task_(task), cache_(cache) {
        rows_ = task.tokens * task.heads;
        wide_ = padded(cache.head_dim), deep_ = padded(task.rank);
        for (int r = 0; r < rows_; ++r) {
            const float* query = task.query + place(r) * cache.head_dim;
            for (int d = 0; d < wide_; ++d) queries_[r * wide_ + d] = d < cache.head_dim ? query[d] * task.scale : 0.0f;
            clear(row(r), deep_);
        }
    }

    void run() {
        const int64_t end_key = task_.position + task_.tokens;
        for (int64_t begin = 0; begin < end_key; begin += kTileKeys) {
            const int count = int(std::min<int64_t>(kTileKeys, end_key - begin));
            switch (cache_.type) {
                case FloatType::kFloat32: read_tile<FloatType::kFloat32>(begin, count); break;
                case FloatType::kFloat16: read_tile<FloatType::kFloat16>(begin, count); break;
                default: read_tile<FloatType::kBFloat16>(begin, count); break;
            }
            meet_tile(begin, count);
        }
        for (int r = 0; r < rows_; ++r) normalize(row(r), task_.rank, nullptr, task_.out + place(r) * task_.rank);
    }

private:
    int64_t place(int r) const { return int64_t(r / task_.heads) * task_.all_heads + r % task_.heads; }
    Gathered row(int r) { return gathered_at(sums_ + r * (deep_ + 2), deep_); }

    template <FloatType kType>
    void read_tile(int64_t first_key, int count) {
        for (int k = 0; k < count; ++k) {
            const int64_t key = first_key + k;
            const int64_t slot = task_.blocks[key / cache_.block_size] * cache_.block_size + key % cache_.block_size;
            read_head<kType>(cache_.data, slot * cache_.head_dim, cache_.head_dim, keys_ + k * wide_, nullptr, 0);
        }
        std::fill(keys_ + count * wide_, keys_ + kTileKeys * wide_, 0.0f);
    }

    void meet_tile(int64_t first_key, int count) {
        for (int r = 0; r < rows_; r += kTogether) {
            if (r + kTogether <= rows_) {
                score<0, kTogether>(queries_ + r * wide_, keys_, wide_, scores_ + r * kTileKeys);
            } else {
                for (int i = r; i < rows_; ++i) score<0, 1>(queries_ + i * wide_, keys_, wide_, scores_ + i * kTileKeys);
            }
        }
        for (int r = 0; r < rows_; ++r) {
            const int end = int(std::clamp<int64_t>(task_.position + r / task_.heads + 1 - first_key, 0, count));
            if (end == 0) continue;
            float* weights = scores_ + r * kTileKeys;
            weigh(weights, 0, end, deep_, row(r));
            int d = 0;
            for (; d + kAtOnce * kLanes <= deep_; d += kAtOnce * kLanes) {
                add_values<1, kAtOnce>(weights, keys_, 0, end, wide_, d, row(r).values, 0);
            }
            for (; d < deep_; d += kLanes) add_values<1, 1>(weights, keys_, 0, end, wide_, d, row(r).values, 0);
        }
    }

    static constexpr int kTogether = 4, kAtOnce = 8;

    const LatentTask& task_;
    const CacheView& cache_;
    int rows_, wide_, deep_;
    alignas(64) float queries_[kMaxLatentRows * kMaxLatentDim];
    alignas(64) float keys_[kTileKeys * kMaxLatentDim];
    alignas(64) float scores_[kMaxLatentRows * kTileKeys];
    alignas(64) float sums_[kMaxLatentRows * (kMaxLatentDim + 2)];
};

void attend_latents(const LatentTask& task, const CacheView& cache) { LatentRows(task, cache).run(); }

}  // namespace infinilm::INFINILM_ISA
