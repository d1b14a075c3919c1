#include "experts.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <utility>

#include "dispatch.h"
#include "threads.h"

namespace infinilm {

namespace {

// Memory for results between two kernels; one per thread that computes steps.
struct Workspace {
    QuantizedRows rows;
    Buffer<float> gate_up, results;
    Buffer<float> normed, seen, logits, weights, mixed, shared;
    Buffer<int32_t> ids;
    std::vector<int64_t> ends, order, places;
    std::vector<Product> products;
};

Workspace& workspace() {
    static thread_local Workspace own;
    return own;
}

constexpr int64_t kRowsPerTask = 4;

}  // namespace

Experts::Experts(std::vector<std::shared_ptr<const Linear>> gate_up, std::vector<std::shared_ptr<const Linear>> down,
                 const Gating& gating)
    : gate_up_(std::move(gate_up)), down_(std::move(down)), gating_(gating) {
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
    // Sort the (row, expert) pairs by expert.
    std::vector<int64_t>&ends = space.ends, &order = space.order, &places = space.places;
    ends.assign(count() + 1, 0);
    for (int64_t pair = 0; pair < pairs; ++pair) ++ends[ids[pair] + 1];
    for (int expert = 0; expert < count(); ++expert) ends[expert + 1] += ends[expert];
    order.resize(pairs), places.resize(pairs);
    for (int64_t pair = 0; pair < pairs; ++pair) {  // moves ends[e] from e's first place to its end
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

    const Activations rounded = space.rows.reserve(pairs, int(size), gate_up_.front()->activation_bits(), 1);
    parallel_for(pairs, kRowsPerTask, [&](int64_t place) {
        k.quantize(x + order[place] / top_k * size, 0, nullptr, 0.0f, int(place), rounded);
    });
    float* gate_up = space.gate_up.reserve(pairs * 2 * inner);
    multiply(gate_up_, rounded, gate_up);
    const Activations activated = space.rows.reserve(pairs, int(inner), down_.front()->activation_bits(), 1);
    parallel_for(pairs, kRowsPerTask, [&](int64_t place) {
        k.gate_quantize(gate_up, 2 * inner, gating_, int(place), activated);
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

namespace {

// Exclude the experts of all groups but the top_groups best ones. A group is ranked by the sum of its group_best best
// experts.
void keep_best_groups(const Routing& routing, std::vector<float>& ranks) {
    const size_t size = ranks.size() / routing.num_groups;
    std::vector<std::pair<float, int>> groups;
    for (int group = 0; group < routing.num_groups; ++group) {
        std::vector<float> own(ranks.begin() + group * size, ranks.begin() + (group + 1) * size);
        std::partial_sort(own.begin(), own.begin() + routing.group_best, own.end(), std::greater<>());
        float sum = 0.0f;
        for (int i = 0; i < routing.group_best; ++i) sum += own[i];
        groups.emplace_back(-sum, group);
    }
    std::sort(groups.begin(), groups.end());
    for (int place = routing.top_groups; place < routing.num_groups; ++place) {
        const auto first = ranks.begin() + groups[place].second * size;
        std::fill(first, first + size, -std::numeric_limits<float>::infinity());
    }
}

}  // namespace

void choose_experts(const float* logits, int count, const Routing& routing, const float* correction, int32_t* ids,
                    float* weights) {
    std::vector<float> scores(logits, logits + count);
    if (routing.is_sigmoid) {
        for (float& score : scores) score = 1.0f / (1.0f + std::exp(-score));
    } else {
        const float largest = *std::max_element(scores.begin(), scores.end());
        float total = 0.0f;
        for (float& score : scores) total += score = std::exp(score - largest);
        for (float& score : scores) score /= total;
    }
    std::vector<float> ranks = scores;
    for (int i = 0; correction && i < count; ++i) ranks[i] += correction[i];
    if (routing.num_groups > 1) keep_best_groups(routing, ranks);
    std::vector<bool> is_chosen(count);
    float sum = 0.0f;
    for (int k = 0; k < routing.top_k; ++k) {
        int best = 0;
        while (is_chosen[best]) ++best;  // always an expert, even if all ranks are NaN
        for (int i = best + 1; i < count; ++i) {
            if (!is_chosen[i] && ranks[i] > ranks[best]) best = i;
        }
        is_chosen[best] = true;
        ids[k] = best;
        sum += weights[k] = scores[best];
    }
    for (int k = 0; k < routing.top_k; ++k) {
        if (routing.renormalizes) weights[k] /= sum;
        weights[k] *= routing.scale;
    }
}

void SparseMLP::add_shared(const float* normed, int64_t tokens, float* out) const {
    const Surroundings alone{nullptr, nullptr, 0.0f, 1.0f};
    if (!shared_gate_) return shared_->run(alone, normed, tokens, out);
    const int size = hidden();
    float* shared = workspace().shared.reserve(tokens * size);
    std::fill(shared, shared + tokens * size, 0.0f);
    shared_->run(alone, normed, tokens, shared);
    parallel_for(tokens, kRowsPerTask, [&](int64_t t) {
        float gate;
        kernels().score(normed + t * size, shared_gate_, size, 1, &gate);
        kernels().add_normed(shared + t * size, nullptr, 0.0f, 1.0f / (1.0f + std::exp(-gate)), size, out + t * size);
    });
}

void SparseMLP::run(const Surroundings& around, const float* x, int64_t tokens, float* out) const {
    const Kernels& k = kernels();
    Workspace& space = workspace();
    const int size = hidden(), count = experts_->count(), top_k = routing_.top_k;
    float* normed = space.normed.reserve(tokens * size);
    float* seen = router_.norm ? space.seen.reserve(tokens * size) : nullptr;
    float* logits = space.logits.reserve(tokens * count);
    float* weights = space.weights.reserve(tokens * top_k);
    int32_t* ids = space.ids.reserve(tokens * top_k);
    parallel_for(tokens, 1, [&](int64_t t) {
        float *row = normed + t * size, *own = logits + t * count;
        if (around.norm_before) {
            k.rms_norm(x + t * size, around.norm_before, around.eps, size, row);
        } else {
            std::copy(x + t * size, x + (t + 1) * size, row);
        }
        if (seen) k.rms_norm(x + t * size, router_.norm, around.eps, size, seen + t * size);
        k.score(seen ? seen + t * size : row, router_.weight, size, count, own);
        for (int i = 0; router_.bias && i < count; ++i) own[i] += router_.bias[i];
        choose_experts(own, count, routing_, router_.correction, ids + t * top_k, weights + t * top_k);
        for (int64_t i = t * top_k; router_.factors && i < (t + 1) * top_k; ++i) weights[i] *= router_.factors[ids[i]];
    });
    float* target = out;
    if (!around.add_directly()) {
        target = space.mixed.reserve(tokens * size);
        std::fill(target, target + tokens * size, 0.0f);
    }
    if (shared_) add_shared(normed, tokens, target);
    experts_->mix(normed, tokens, ids, weights, top_k, target, true);
    if (target == out) return;
    parallel_for(tokens, kRowsPerTask, [&](int64_t t) {
        k.add_normed(target + t * size, around.norm_after, around.eps, around.scale, size, out + t * size);
    });
}

}  // namespace infinilm
