// Multi-head latent attention: a token mixer that keeps one small vector per token.
#pragma once

#include <memory>

#include "decoder.h"

namespace infinilm {

// The heads of latent attention, between its products. infinilm/layers/latent_attention.py says what they compute.
struct LatentHeads {
    RopeStore rope;  // k_norm [rank]
    int rank;
    int plain_dim, value_dim;
    const float* expansion;  // by head: the rows that make a key [plain_dim, rank], then a value [value_dim, rank]
    float scale;
    int64_t max_len;

    int count() const { return rope.num_heads; }
    int kept_size() const { return rank + rope.rotary_dim; }
    int query_size() const { return count() * (plain_dim + rope.rotary_dim); }
    int result_size() const { return count() * value_dim; }
    void check(const LayerCache& cache, const Step& step) const;
    // latents [tokens, stride]: of each token the vector that is kept. queries [tokens, query_size] are changed, too, and
    // out [tokens, result_size] may lie in their place.
    void run(float* latents, int64_t stride, float* queries, const Step& step, const CacheView& cache, float* out) const;

private:
    void attend(const Step& step, const CacheView& cache, const float* absorbed, float* attended) const;
};

struct LatentAttention : TokenMixer {
    std::shared_ptr<const Linear> latents;  // what queries are made from, if there is such a vector, and what is kept
    std::shared_ptr<const Linear> query, out;
    const float* query_norm;  // [query_rank]
    int query_rank;           // 0: queries are made from the hidden state
    LatentHeads heads;

    int hidden() const override { return latents->in_features(); }
    void check(const LayerCache& cache, const Step& step) const override { heads.check(cache, step); }
    void run(const Surroundings& around, const Step& step, const LayerCache& cache, float* hidden) const override;
};

}  // namespace infinilm
