// Mixtures of experts: rows are multiplied with the matrices of their chosen experts.
#pragma once

#include <memory>
#include <vector>

#include "decoder.h"

namespace infinilm {

class Experts {
public:
    // Both lists have one item per expert.
    Experts(std::vector<std::shared_ptr<const Linear>> gate_up, std::vector<std::shared_ptr<const Linear>> down,
            const Gating& gating);

    int count() const { return int(down_.size()); }
    int hidden() const { return down_.front()->out_features(); }
    // out [rows, hidden] = or += for each row of x [rows, hidden] the sum of the results of its experts ids
    // [rows, top_k], times their weights [rows, top_k]. A row's experts are added in the order of its ids. Experts that
    // no row chose are not read.
    void mix(const float* x, int64_t rows, const int32_t* ids, const float* weights, int top_k, float* out,
             bool accumulate) const;

private:
    std::vector<std::shared_ptr<const Linear>> gate_up_, down_;
    Gating gating_;
};

// How experts are chosen by a router's logits; infinilm/kernels/experts_torch.py explains the fields.
struct Routing {
    int top_k;
    bool renormalizes, is_sigmoid;
    int num_groups, top_groups, group_best;
    float scale;
};

// The top_k experts of a row, best first, and their weights. `correction` [count], which may be null, changes the ranks
// but not the weights.
void choose_experts(const float* logits, int count, const Routing& routing, const float* correction, int32_t* ids,
                    float* weights);

// How a row's logits are computed. All but the weight may be null.
struct Router {
    const float* weight;      // [hidden, experts]
    const float* bias;        // [experts]
    const float* correction;  // [experts], see choose_experts
    const float* norm;        // [hidden]: the router sees the layer's input after this norm, not the experts' input
    const float* factors;     // [experts], factors of the weights of chosen experts
};

// A channel mixer: the experts that a router chooses, and shared experts, which all rows use.
class SparseMLP : public ChannelMixer {
public:
    // The shared experts and their gate [hidden] may be null.
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
    const float* shared_gate_;  // the shared experts' result is multiplied by sigmoid(gate . row)
};

}  // namespace infinilm
