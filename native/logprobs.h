// Log-probabilities of tokens.
#pragma once

#include <cstdint>

namespace infinilm {

// Of one row of logits: the rank of the target, 1 for the greatest, and the top tokens, best first, equal ones by index,
// into ids [1 + top]; the log-probabilities of the target and of them into values [1 + top].
void logprobs(const float* logits, int64_t vocab_size, int64_t target, int64_t top, int64_t* ids, float* values);

// Each number times the scale, then cap * tanh(x / cap) of it if there is a cap, in place.
void scale_logits(float* logits, int64_t count, float scale, float cap);

}  // namespace infinilm
