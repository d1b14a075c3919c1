// Multi-head latent attention: a token mixer that keeps one small vector per token.
#pragma once

#include <memory>

#include "decoder.h"

namespace infinilm {

// infinilm/layers/latent_attention.py says what it computes.
struct LatentAttention : TokenMixer {
    std::shared_ptr<const Linear> latents;  // what queries are made from, if there is such a vector, and what is kept
    std::shared_ptr<const Linear> query, out;
    RopeStore rope;          // q_norm [query_rank], k_norm [rank]
    int rank, query_rank;    // query_rank 0: queries are made from the hidden state
    int plain_dim, value_dim;
    const float* expansion;  // by head: the rows that make a key [plain_dim, rank], then a value [value_dim, rank]
    float scale;
    int64_t max_len;

    int hidden() const override { return latents->in_features(); }
    int kept_size() const { return rank + rope.rotary_dim; }
    void check(const LayerCache& cache, const Step& step) const override;
    void run(const Surroundings& around, const Step& step, const LayerCache& cache, float* hidden) const override;

private:
    void attend(const Step& step, const CacheView& cache, const float* absorbed, float* attended) const;
};

}  // namespace infinilm
