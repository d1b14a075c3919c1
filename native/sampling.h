// Drawing tokens from logits.
#pragma once

#include <cstdint>

namespace infinilm {

// How a row draws; infinilm/sampling says what it means.
struct DrawSettings {
    uint64_t seed;       // scrambled
    double temperature;  // 0: greedily
    int64_t top_k;       // at least the vocabulary: no limit
    double top_p;        // 1: no limit
    double log_min_p;    // -infinity: no limit
};

// The token drawn at a position, or -1 if the greatest logit is not a finite number.
int64_t draw(const float* logits, int64_t vocab_size, const DrawSettings& settings, int64_t position);

}  // namespace infinilm
