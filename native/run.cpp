#include "run.h"

#include <algorithm>
#include <stdexcept>

#include "logprobs.h"
#include "sampling.h"
#include "threads.h"

namespace infinilm {

DecodeRun::DecodeRun(const TokenModel& model, const std::vector<LayerCache>& caches, const std::vector<size_t>& groups,
                     const std::vector<const int64_t*>& tables, int64_t max_blocks, const RunRows& rows, int64_t steps)
    : model_(model),
      caches_(caches),
      rows_(rows),
      positions_(rows.count),
      query_lens_(rows.count, 1),
      context_lens_(rows.count),
      slots_(tables.size(), std::vector<int64_t>(rows.count)),
      block_sizes_(tables.size()) {
    for (size_t group = 0; group < tables.size(); ++group) {
        steps_.push_back({rows.count, rows.count, max_blocks, positions_.data(), slots_[group].data(), tables[group],
                          query_lens_.data(), context_lens_.data()});
    }
    for (size_t layer = 0; layer < groups.size(); ++layer) {
        if (groups[layer] >= tables.size()) throw std::invalid_argument("a layer's group has no block table");
        layer_steps_.push_back(&steps_[groups[layer]]);
        const CacheView* own = std::get_if<CacheView>(&caches[layer]);
        if (!own) throw std::invalid_argument("recurrent layers can't decode by themselves");
        block_sizes_[groups[layer]] = own->block_size;
    }
    for (int64_t i = 0; i < rows.count; ++i) {
        if (rows.starts[i] < 0) throw std::invalid_argument("a row needs a token to go on from");
        positions_[i] = rows.starts[i] + steps - 1;
        context_lens_[i] = rows.starts[i] + steps;
    }
    check_steps(layer_steps_, caches);  // checks the last step, which has all blocks of the others
}

void DecodeRun::move_to(int64_t step) {
    for (int64_t i = 0; i < rows_.count; ++i) {
        positions_[i] = rows_.starts[i] + step;
        context_lens_[i] = positions_[i] + 1;
        for (size_t group = 0; group < steps_.size(); ++group) {
            const Step& own = steps_[group];
            const int64_t size = block_sizes_[group];
            const int64_t block = own.block_tables[i * own.max_blocks + positions_[i] / size];
            slots_[group][i] = block * size + positions_[i] % size;
        }
    }
}

void DecodeRun::step(const int64_t* tokens, int64_t* drawn, bool* are_finite) {
    static thread_local Buffer<float> hidden_memory, logits_memory;
    const int64_t width = model_.embedding->view().columns, vocab_size = model_.head->out_features();
    float* hidden = hidden_memory.reserve(rows_.count * width);
    float* logits = logits_memory.reserve(rows_.count * vocab_size);
    move_to(next_++);
    model_.embedding->dequantize(tokens, rows_.count, hidden);
    if (model_.embedding_scale != 1.0f) {
        for (int64_t i = 0; i < rows_.count * width; ++i) hidden[i] *= model_.embedding_scale;
    }
    model_.decoder->run(caches_, layer_steps_, rows_.count, nullptr, 0, hidden);
    model_.head->multiply(hidden, rows_.count, logits, false);
    scale_logits(logits, rows_.count * vocab_size, model_.logit_scale, model_.logit_cap);
    // The drawn token's position is the length of the row's context.
    draw_rows(logits, rows_.count, vocab_size, rows_.settings, rows_.numbers, context_lens_.data(), drawn, are_finite);
}

}  // namespace infinilm
