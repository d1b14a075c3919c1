// The gated delta net: a token mixer that keeps a state of fixed size per text.
#pragma once

#include <memory>
#include <vector>

#include "decoder.h"

namespace infinilm {

// The heads of a gated delta net, between its two products: the convolution, the delta rule, the norm and the gates.
// infinilm/layers/delta_net.py defines what they compute. The state after a token does not depend on how the text is
// divided into steps.
struct DeltaHeads {
    int key_heads, value_heads, key_dim, value_dim, conv_width;
    const float* conv;     // [conv_width, channels of q, k and v]
    const float* decay;    // [value_heads], -exp(A_log)
    const float* dt_bias;  // [value_heads]
    const float* norm;     // [value_dim]
    float eps;

    int channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
    int result_size() const { return value_heads * value_dim; }
    int row_size() const { return channels() + result_size() + 2 * value_heads; }
    // Throws std::invalid_argument if the cache, or a step on it, does not fit. The caller has to check that the states
    // from which texts continue are kept: layers share `ends`, and the first layer that runs updates them.
    void check(const LayerCache& cache, const Step& step) const;
    // rows [tokens, row_size]: q, k, v, gates, rates and changes. Returns the offset of the results in a row.
    int run(float* rows, const Step& step, const StateView& states) const;
};

struct DeltaNet : TokenMixer {
    std::shared_ptr<const Linear> in, out;
    DeltaHeads heads;

    int hidden() const override { return in->in_features(); }
    void check(const LayerCache& cache, const Step& step) const override;
    void run(const Surroundings& around, const Step& step, const LayerCache& cache, float* hidden) const override;
};

}  // namespace infinilm
