#include "latent.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "dispatch.h"
#include "threads.h"

namespace infinilm {

namespace {

struct Workspace {
    Buffer<float> latents, queries, absorbed, attended;
    std::vector<LatentTask> tasks;
};

Workspace& workspace() {
    static thread_local Workspace own;
    return own;
}

constexpr int64_t kTileTokens = 16;  // tokens for which a head's matrices are read once

// Call `function(token, head)` for all tokens and heads. A head's tokens of a tile are processed together.
template <typename Function>
void for_heads(int64_t tokens, int heads, const Function& function) {
    const int64_t tiles = (tokens + kTileTokens - 1) / kTileTokens;
    parallel_for(tiles * heads, 1, [&](int64_t task) {
        const int64_t first = task / heads * kTileTokens, end = std::min(tokens, first + kTileTokens);
        for (int64_t t = first; t < end; ++t) function(t, int(task % heads));
    });
}

}  // namespace

void LatentHeads::check(const LayerCache& cache, const Step& step) const {
    const CacheView* own = std::get_if<CacheView>(&cache);
    if (!own || !own->is_latent || own->head_dim != kept_size()) throw std::invalid_argument("a cache does not fit its layer");
    check_positions(step, max_len);
}

void LatentHeads::attend(const Step& step, const CacheView& cache, const float* absorbed, float* attended) const {
    std::vector<LatentTask>& tasks = workspace().tasks;
    tasks.clear();
    const int all = rope.num_heads;
    // As many rows per task as possible, because they share reads of the cache, unless that leaves threads idle.
    const int64_t most = std::max<int64_t>(1, step.tokens * all / (4 * num_threads()));
    const int heads = int(std::min<int64_t>({kMaxLatentRows, all, most}));
    const int64_t tile = std::max<int64_t>(1, std::min<int64_t>(kMaxLatentRows, most) / heads);
    int64_t token = 0;
    for (int64_t n = 0; n < step.requests; ++n) {
        const int64_t cached = step.context_lens[n] - step.query_lens[n];
        for (int64_t first = 0; first < step.query_lens[n]; first += tile) {
            const int count = int(std::min(tile, step.query_lens[n] - first));
            for (int head = 0; head < all; head += heads) {
                const int64_t place = (token + first) * all + head;
                tasks.push_back({absorbed + place * kept_size(), attended + place * rank, count, std::min(heads, all - head),
                                 all, rank, cached + first, step.block_tables + n * step.max_blocks, scale});
            }
        }
        token += step.query_lens[n];
    }
    const Kernels& k = kernels();
    parallel_for(int64_t(tasks.size()), 1, [&](int64_t i) { k.attend_latents(tasks[i], cache); });
}

void LatentHeads::run(float* latents, int64_t stride, float* queries, const Step& step, const CacheView& cache,
                      float* out) const {
    const Kernels& k = kernels();
    Workspace& space = workspace();
    const int heads = count(), query_dim = plain_dim + rope.rotary_dim, kept = kept_size();
    const int64_t tokens = step.tokens, head_size = int64_t(plain_dim + value_dim) * rank;
    parallel_for(tokens, 4, [&](int64_t t) {
        k.store_latent(latents + t * stride, rank, step.positions[t], step.slots[t], rope, cache);
    });
    float* absorbed = space.absorbed.reserve(tokens * heads * kept);
    for_heads(tokens, heads, [&](int64_t t, int head) {
        float* own = queries + (t * heads + head) * query_dim;
        float* to = absorbed + (t * heads + head) * kept;
        k.score(own, expansion + head * head_size, plain_dim, rank, to);
        k.turn_head(own + plain_dim, rope.rotary + step.positions[t] * rope.rotary_dim, rope);
        std::copy(own + plain_dim, own + query_dim, to + rank);
    });
    float* attended = space.attended.reserve(tokens * heads * rank);
    attend(step, cache, absorbed, attended);
    for_heads(tokens, heads, [&](int64_t t, int head) {
        const float* values = expansion + head * head_size + int64_t(plain_dim) * rank;
        k.dots(attended + (t * heads + head) * rank, values, rank, value_dim, out + (t * heads + head) * value_dim);
    });
}

void LatentAttention::run(const Surroundings& around, const Step& step, const LayerCache& cache, float* hidden) const {
    Workspace& space = workspace();
    const int64_t tokens = step.tokens, width = latents->out_features();
    const Activations* from = &round_input(around, hidden, tokens, *latents);
    float* made = space.latents.reserve(tokens * width);
    latents->multiply(*from, tokens, made, false);
    if (query_rank) from = &round_rows(made, width, tokens, *query, query_norm, heads.rope.eps);
    const int size = heads.result_size();  // results overwrite queries
    float* queries = space.queries.reserve(tokens * std::max(heads.query_size(), size));
    query->multiply(*from, tokens, queries, false);
    heads.run(made + query_rank, width, queries, step, std::get<CacheView>(cache), queries);
    add_output(*out, round_rows(queries, size, tokens, *out), around, tokens, hidden);
}

}  // namespace infinilm
