// Several decode steps of the same rows: what a row draws is what it computes next.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "decoder.h"

namespace infinilm {

// From tokens to the logits of those after them.
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
    const int64_t* starts;    // [count], the positions of their last tokens
    const int64_t* settings;  // of draws, [all rows, 5]
    const int64_t* numbers;   // [count], the rows' places in settings
};

class DecodeRun {
public:
    // `groups` says for each layer which of the `tables` [count, max_blocks] it has. Throws std::invalid_argument if the
    // blocks of `steps` steps lie outside of a table or of the cache, or if a layer is recurrent: a step whose tokens can't be
    // drawn is computed again, and its states are those after it already.
    DecodeRun(const TokenModel& model, const std::vector<LayerCache>& caches, const std::vector<size_t>& groups,
              const std::vector<const int64_t*>& tables, int64_t max_blocks, const RunRows& rows, int64_t steps);

    // Compute the rows' last tokens [count] and draw the next ones. Where one can't be drawn, `are_sound` is false.
    void step(const int64_t* tokens, int64_t* drawn, bool* are_sound);

    // Before the first step: the last one's batch, as each layer has it.
    const std::vector<const Step*>& last_batches() const { return layer_steps_; }

private:
    void move_to(int64_t step);

    const TokenModel& model_;
    const std::vector<LayerCache>& caches_;
    const RunRows rows_;
    int64_t next_ = 0;                                            // step
    std::vector<int64_t> positions_, query_lens_, context_lens_;  // [count]
    std::vector<std::vector<int64_t>> slots_;                     // by group, [count]
    std::vector<Step> steps_;                                     // by group
    std::vector<int64_t> block_sizes_;                            // by group
    std::vector<const Step*> layer_steps_;
};

}  // namespace infinilm
