// Mixtures of experts: products with the packed matrices of the experts that rows chose.
#pragma once

#include <memory>
#include <vector>

#include "decoder.h"

namespace infinilm {

class Experts {
public:
    // By expert: gate and up, and down.
    Experts(std::vector<std::shared_ptr<const Linear>> gate_up, std::vector<std::shared_ptr<const Linear>> down,
            const Gating& gating);

    int count() const { return int(down_.size()); }
    int hidden() const { return down_.front()->out_features(); }
    // out [rows, hidden] = or += the sum of the experts ids [rows, top_k] of each row of x [rows, hidden], times their
    // weights [rows, top_k]. The experts of a row are added in the order of its ids. Others are not read.
    void mix(const float* x, int64_t rows, const int32_t* ids, const float* weights, int top_k, float* out,
             bool accumulate) const;

private:
    std::vector<std::shared_ptr<const Linear>> gate_up_, down_;
    Gating gating_;
};

// How a router's logits choose experts; infinilm/kernels/experts_torch.py says what it means.
struct Routing {
    int top_k;
    bool renormalizes, is_sigmoid;
    int num_groups, top_groups, group_best;
    float scale;
};

// The top_k experts of a row, the best first, and their weights. A correction [count] of ranks, not of weights, may be null.
void choose_experts(const float* logits, int count, const Routing& routing, const float* correction, int32_t* ids,
                    float* weights);

// What gives a row's logits; all but the weight may be null.
struct Router {
    const float* weight;      // [hidden, experts]
    const float* bias;        // [experts]
    const float* correction;  // [experts], see choose_experts
    const float* norm;        // [hidden], of what it sees: the layer's input instead of what the experts see
    const float* factors;     // [experts], what the weights of chosen experts are multiplied by
};

// A channel mixer: the experts that a router chooses, and those that all rows share.
class SparseMLP : public ChannelMixer {
public:
    // The shared experts, and their gate [hidden], may be null.
    SparseMLP(std::shared_ptr<const Experts> experts, const Routing& routing, const Router& router,
              std::shared_ptr<const ChannelMixer> shared, const float* shared_gate)
        : experts_(std::move(experts)), routing_(routing), router_(router), shared_(std::move(shared)),
          shared_gate_(shared_gate) {}

    int hidden() const override { return experts_->hidden(); }
    void run(const Surroundings& around, const float* x, int64_t tokens, float* out) const override;

private:
    std::shared_ptr<const Experts> experts_;
    Routing routing_;
    void add_shared(const float* normed, int64_t tokens, float* out) const;

    Router router_;
    std::shared_ptr<const ChannelMixer> shared_;
    const float* shared_gate_;  // the shared experts' result is multiplied by the sigmoid of its product with a row
};

}  // namespace infinilm
