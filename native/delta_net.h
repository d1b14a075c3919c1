// The gated delta net: a token mixer whose memory of a text is a state of fixed size.
#pragma once

#include <memory>
#include <vector>

#include "decoder.h"

namespace infinilm {

// infinilm/layers/delta_net.py says what it computes. The state after every token does not depend on how a text is
// divided into steps.
struct DeltaNet : TokenMixer {
    std::shared_ptr<const Linear> in, out;  // in: q, k, v, gates, rates, changes
    int key_heads, value_heads, key_dim, value_dim, conv_width;
    const float* conv;     // [conv_width, channels of q, k and v]
    const float* decay;    // [value_heads], -exp(A_log)
    const float* dt_bias;  // [value_heads]
    const float* norm;     // [value_dim]
    float eps;

    int channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
    int hidden() const override { return in->in_features(); }
    void check(const LayerCache& cache, const Step& step) const override;
    void run(const Surroundings& around, const Step& step, const LayerCache& cache, float* hidden) const override;
};

}  // namespace infinilm
