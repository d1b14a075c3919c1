// Mixtures of experts: products with the packed matrices of the experts that rows chose.
#pragma once

#include <memory>
#include <vector>

#include "decoder.h"

namespace infinilm {

class Experts {
public:
    // By expert: gate and up, and down.
    Experts(std::vector<std::shared_ptr<const Linear>> gate_up, std::vector<std::shared_ptr<const Linear>> down);

    int count() const { return int(down_.size()); }
    int hidden() const { return down_.front()->out_features(); }
    // out [rows, hidden] = or += the sum of the experts ids [rows, top_k] of each row of x [rows, hidden], times their
    // weights [rows, top_k]. The experts of a row are added in the order of its ids. Others are not read.
    void mix(const float* x, int64_t rows, const int32_t* ids, const float* weights, int top_k, float* out,
             bool accumulate) const;

private:
    std::vector<std::shared_ptr<const Linear>> gate_up_, down_;
};

}  // namespace infinilm
