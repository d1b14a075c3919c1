// Drawing tokens from logits.
#pragma once

#include <cstdint>

namespace infinilm {

// How a row draws; infinilm/sampling explains the settings.
struct DrawSettings {
    uint64_t seed;       // scrambled
    double temperature;  // 0: greedy
    int64_t top_k;       // the vocabulary size or more: no limit
    double top_p;        // 1: no limit
    double log_min_p;    // -infinity: no limit
};

// The token drawn at a position, or -1 if the greatest logit is not a finite number.
int64_t draw(const float* logits, int64_t vocab_size, const DrawSettings& settings, int64_t position);

// The same for each row i of logits [count, vocab], with row `rows[i]` of the settings [rows, 5]. If no token can be
// drawn, tokens[i] is 0 and are_finite[i] is false.
void draw_rows(const float* logits, int64_t count, int64_t vocab_size, const int64_t* settings, const int64_t* rows,
               const int64_t* positions, int64_t* tokens, bool* are_finite);

}  // namespace infinilm
