// Probabilities are added as integers, so that neither other rows nor the order of additions change a row's bits.
#include "logprobs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "dispatch.h"
#include "threads.h"

namespace infinilm {
namespace {

constexpr int kBlock = 256;  // tokens

// log(sum(exp(x))); NaN unless the greatest logit is finite.
double log_sum(const float* logits, int64_t count, float greatest) {
    if (!std::isfinite(greatest)) return std::numeric_limits<double>::quiet_NaN();
    int64_t weights[kBlock], total = 0;
    for (int64_t first = 0; first < count; first += kBlock) {
        const int left = int(std::min<int64_t>(kBlock, count - first));
        kernels().weigh(logits + first, left, greatest, 1.0f, weights);
        total = std::accumulate(weights, weights + left, total);
    }
    return double(greatest) + std::log(double(total) / double(kWeightUnits));
}

}  // namespace

void logprobs(const float* logits, int64_t vocab_size, int64_t target, int64_t top, int64_t* ids, float* values) {
    float greatest = logits[0];
    int64_t above = 0;
    for (int64_t i = 0; i < vocab_size; ++i) {
        greatest = logits[i] > greatest || std::isnan(logits[i]) ? logits[i] : greatest;
        above += logits[i] > logits[target];
    }
    const double total = log_sum(logits, vocab_size, greatest);
    ids[0] = above + 1;
    values[0] = float(logits[target] - total);
    if (top == 0) return;
    const auto is_before = [=](int64_t a, int64_t b) {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    };
    // A heap of the best tokens so far; the worst of them is on top.
    std::vector<int64_t> best(top);
    std::iota(best.begin(), best.end(), 0);
    std::make_heap(best.begin(), best.end(), is_before);
    for (int64_t i = top; i < vocab_size; ++i) {
        if (!(logits[i] > logits[best.front()])) continue;
        std::pop_heap(best.begin(), best.end(), is_before);
        best.back() = i;
        std::push_heap(best.begin(), best.end(), is_before);
    }
    std::sort_heap(best.begin(), best.end(), is_before);
    for (int64_t i = 0; i < top; ++i) {
        ids[1 + i] = best[i];
        values[1 + i] = float(logits[best[i]] - total);
    }
}

void scale_logits(float* logits, int64_t count, float scale, float cap) {
    if (scale == 1.0f && cap == 0.0f) return;
    constexpr int64_t kPiece = 4096;
    parallel_for((count + kPiece - 1) / kPiece, 1, [&](int64_t piece) {
        for (int64_t i = piece * kPiece; i < std::min(count, (piece + 1) * kPiece); ++i) {
            if (scale != 1.0f) logits[i] *= scale;
            if (cap != 0.0f) logits[i] = cap * std::tanh(logits[i] / cap);
        }
    });
}

}  // namespace infinilm
