#include "experts.h"

#include <algorithm>
#include <stdexcept>

#include "dispatch.h"
#include "threads.h"

namespace infinilm {

namespace {

// Memory for what lies between two kernels; a thread that computes steps has one.
struct Workspace {
    QuantizedRows rows;
    Buffer<float> gate_up, results;
    std::vector<int64_t> ends, order, places;
    std::vector<Product> products;
};

Workspace& workspace() {
    static thread_local Workspace own;
    return own;
}

constexpr int64_t kRowsPerTask = 4;

}  // namespace

Experts::Experts(std::vector<std::shared_ptr<const Linear>> gate_up, std::vector<std::shared_ptr<const Linear>> down)
    : gate_up_(std::move(gate_up)), down_(std::move(down)) {
    if (down_.empty() || gate_up_.size() != down_.size()) throw std::invalid_argument("an expert has two linear layers");
    for (size_t i = 0; i < down_.size(); ++i) {
        const bool fits = gate_up_[i]->in_features() == hidden() && down_[i]->out_features() == hidden() &&
                          down_[i]->in_features() == down_[0]->in_features() &&
                          gate_up_[i]->out_features() == 2 * down_[i]->in_features();
        if (!fits) throw std::invalid_argument("the experts' weights do not fit together");
    }
}

void Experts::mix(const float* x, int64_t rows, const int32_t* ids, const float* weights, int top_k, float* out,
                  bool accumulate) const {
    const Kernels& k = kernels();
    Workspace& space = workspace();
    const int64_t pairs = rows * top_k, size = hidden(), inner = down_.front()->in_features();
    // Sort the pairs of a row and an expert by expert.
    std::vector<int64_t>&ends = space.ends, &order = space.order, &places = space.places;
    ends.assign(count() + 1, 0);
    for (int64_t pair = 0; pair < pairs; ++pair) ++ends[ids[pair] + 1];
    for (int expert = 0; expert < count(); ++expert) ends[expert + 1] += ends[expert];
    order.resize(pairs), places.resize(pairs);
    for (int64_t pair = 0; pair < pairs; ++pair) {  // ends[e] is the first place of e, and then that after its last
        places[pair] = ends[ids[pair]]++;
        order[places[pair]] = pair;
    }
    const auto multiply = [&](const std::vector<std::shared_ptr<const Linear>>& linears, const Activations& from, float* to) {
        space.products.clear();
        for (int expert = 0; expert < count(); ++expert) {
            const int64_t first = expert ? ends[expert - 1] : 0;
            if (first < ends[expert]) linears[expert]->list_products(first, ends[expert], to, false, space.products);
        }
        multiply_all(space.products, from);
    };

    const Activations rounded = space.rows.reserve(pairs, int(size));
    parallel_for(pairs, kRowsPerTask, [&](int64_t place) {
        k.quantize(x + order[place] / top_k * size, 0, nullptr, 0.0f, int(place), rounded);
    });
    float* gate_up = space.gate_up.reserve(pairs * 2 * inner);
    multiply(gate_up_, rounded, gate_up);
    const Activations activated = space.rows.reserve(pairs, int(inner));
    parallel_for(pairs, kRowsPerTask, [&](int64_t place) {
        k.gate_quantize(gate_up, 2 * inner, Activation::kSilu, int(place), activated);
    });
    float* results = space.results.reserve(pairs * size);
    multiply(down_, activated, results);
    parallel_for(rows, 1, [&](int64_t row) {
        float* target = out + row * size;
        if (!accumulate) std::fill(target, target + size, 0.0f);
        for (int64_t pair = row * top_k; pair < (row + 1) * top_k; ++pair) {
            const float* from = results + places[pair] * size;
            const float weight = weights[pair];
            for (int64_t i = 0; i < size; ++i) target[i] += weight * from[i];
        }
    });
}

}  // namespace infinilm
