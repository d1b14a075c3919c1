// Log-probabilities of tokens.
#pragma once

#include <cstdint>

namespace infinilm {

// For one row of logits. ids [1 + top] gets the rank of the target, 1 for the greatest, and the top tokens, best first,
// equal ones by index. values [1 + top] gets the log-probabilities of the target and of these tokens.
void logprobs(const float* logits, int64_t vocab_size, int64_t target, int64_t top, int64_t* ids, float* values);

// Multiply each number by the scale, then apply cap * tanh(x / cap) if cap is not 0, in place.
void scale_logits(float* logits, int64_t count, float scale, float cap);

}  // namespace infinilm
