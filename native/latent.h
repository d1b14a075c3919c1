// Multi-head latent attention: a token mixer that keeps one small vector per token.
#pragma once

#include <memory>

#include "decoder.h"

namespace infinilm {

// The heads of latent attention, between its products. infinilm/layers/latent_attention.py defines what they compute.
struct LatentHeads {
    RopeStore rope;  // k_norm [rank]
    int rank;
    int plain_dim, value_dim;
    const float* expansion;  // per head: the rows for its key [plain_dim, rank], then for its value [value_dim, rank]
    float scale;
    int64_t max_len;

    int count() const { return rope.num_heads; }
    int kept_size() const { return rank + rope.rotary_dim; }
    int query_size() const { return count() * (plain_dim + rope.rotary_dim); }
    int result_size() const { return count() * value_dim; }
    void check(const LayerCache& cache, const Step& step) const;
    // latents [tokens, stride]: each token's vector that is kept. Changes latents and queries [tokens, query_size]; out
    // [tokens, result_size] may be the memory of queries.
    void run(float* latents, int64_t stride, float* queries, const Step& step, const CacheView& cache, float* out) const;

private:
    void attend(const Step& step, const CacheView& cache, const float* absorbed, float* attended) const;
};

struct LatentAttention : TokenMixer {
    std::shared_ptr<const Linear> latents;  // the vectors for queries, if query_rank > 0, and the vectors that are kept
    std::shared_ptr<const Linear> query, out;
    const float* query_norm;  // [query_rank]
    int query_rank;           // 0: queries are computed from the hidden state
    LatentHeads heads;

    int hidden() const override { return latents->in_features(); }
    void check(const LayerCache& cache, const Step& step) const override { heads.check(cache, step); }
    void run(const Surroundings& around, const Step& step, const LayerCache& cache, float* hidden) const override;
};

}  // namespace infinilm
