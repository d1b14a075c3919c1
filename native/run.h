// Several decode steps of the same rows. The token that a row draws is its input of the next step.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "decoder.h"

namespace infinilm {

// A model from input tokens to the logits of the next tokens.
struct TokenModel {
    std::shared_ptr<const Matrix> embedding;
    float embedding_scale;
    const Decoder* decoder;
    std::shared_ptr<const Linear> head;
    float logit_scale;
    float logit_cap;  // 0: none
};

// The rows of a run. Arrays belong to the caller.
struct RunRows {
    int64_t count;
    const int64_t* starts;    // [count], the positions of the rows' last tokens
    const int64_t* settings;  // [all rows, 5], see DrawSettings
    const int64_t* numbers;   // [count], the rows' indices in settings
};

class DecodeRun {
public:
    // `groups` has for each layer the index of its table in `tables`, each [count, max_blocks]. Throws
    // std::invalid_argument if the blocks of `steps` steps lie outside of a table or of the cache, or if a layer is
    // recurrent. Recurrent layers can't run here because a step whose tokens can't be drawn is computed again, and
    // their states would already include it.
    DecodeRun(const TokenModel& model, const std::vector<LayerCache>& caches, const std::vector<size_t>& groups,
              const std::vector<const int64_t*>& tables, int64_t max_blocks, const RunRows& rows, int64_t steps);

    // Compute the rows' last tokens [count] and draw the next ones. `are_finite` is false for rows that can't draw.
    void step(const int64_t* tokens, int64_t* drawn, bool* are_finite);

    // The batch of the last step, for each layer. Only valid before the first step.
    const std::vector<const Step*>& last_batches() const { return layer_steps_; }

private:
    void move_to(int64_t step);

    const TokenModel& model_;
    const std::vector<LayerCache>& caches_;
    const RunRows rows_;
    int64_t next_ = 0;                                            // the next step
    std::vector<int64_t> positions_, query_lens_, context_lens_;  // [count]
    std::vector<std::vector<int64_t>> slots_;                     // by group, [count]
    std::vector<Step> steps_;                                     // by group
    std::vector<int64_t> block_sizes_;                            // by group
    std::vector<const Step*> layer_steps_;
};

}  // namespace infinilm
