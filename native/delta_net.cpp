#include "delta_net.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "dispatch.h"
#include "threads.h"

namespace infinilm {

namespace {

// New tokens of a request in one block, the block whose state they begin with (source), and the block where the state
// after them is kept (target); -1: none.
struct Segment {
    int64_t first, tokens, source, target;
};

struct Workspace {
    Buffer<float> projected;
    std::vector<Segment> segments;
    std::vector<int64_t> firsts;  // [requests + 1], each request's first segment, and the number of segments
};

Workspace& workspace() {
    static thread_local Workspace own;
    return own;
}

int64_t block_of(const Step& step, int64_t request, int64_t position, int64_t block_size) {
    return step.block_tables[request * step.max_blocks + position / block_size];
}

// A request of a warm-up step keeps no state: its slots are negative. All its tokens are one segment.
void list_segments(const Step& step, int64_t block_size, Workspace& space) {
    space.segments.clear();
    space.firsts.assign(1, 0);
    int64_t token = 0;
    for (int64_t n = 0; n < step.requests; ++n) {
        const int64_t end = step.context_lens[n], start = end - step.query_lens[n];
        const bool is_kept = step.slots[token + step.query_lens[n] - 1] >= 0;
        int64_t source = start ? block_of(step, n, start - 1, block_size) : -1;
        for (int64_t position = start, next; position < end; position = next) {
            next = is_kept ? std::min(end, (position / block_size + 1) * block_size) : end;
            const int64_t target = is_kept ? block_of(step, n, position, block_size) : -1;
            space.segments.push_back({token, next - position, source, target});
            token += next - position;
            source = target;
        }
        space.firsts.push_back(int64_t(space.segments.size()));
    }
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace

void DeltaHeads::check(const LayerCache& cache, const Step& step) const {
    const StateView* own = std::get_if<StateView>(&cache);
    if (!own || own->heads != value_heads || own->key_dim != key_dim || own->value_dim != value_dim ||
        own->channels != channels() || own->kept != conv_width - 1) {
        throw std::invalid_argument("a cache does not fit its layer");
    }
    int64_t total = 0;
    for (int64_t n = 0; n < step.requests; ++n) {
        const int64_t end = step.context_lens[n], start = end - step.query_lens[n];
        if (step.query_lens[n] < 1 || start < 0) {
            throw std::invalid_argument("a request needs at least one new token, and a context that holds all of them");
        }
        total += step.query_lens[n];
        if (total > step.tokens) break;
        if ((end + own->block_size - 1) / own->block_size > step.max_blocks) {
            throw std::invalid_argument("a context is longer than its row of the block table");
        }
        const bool is_kept = step.slots[total - 1] >= 0;
        const int64_t first = start ? (start - 1) / own->block_size * own->block_size : 0;
        for (int64_t p = first; p < (is_kept ? end : start); p += own->block_size) {
            const int64_t block = block_of(step, n, p, own->block_size);
            if (block < 0 || block >= own->blocks) throw std::invalid_argument("a block lies outside of the cache");
        }
    }
    if (total != step.tokens) throw std::invalid_argument("the requests' new tokens are not as many as the batch has");
}

int DeltaHeads::run(float* rows, const Step& step, const StateView& states) const {
    const Kernels& k = kernels();
    Workspace& space = workspace();
    const int64_t tokens = step.tokens, width = row_size();
    const int keys = key_heads * key_dim, values = result_size(), group = value_heads / key_heads;
    list_segments(step, states.block_size, space);

    constexpr int kPiece = 256;  // channels
    const int64_t pieces = (channels() + kPiece - 1) / kPiece;
    const std::vector<Segment>& segments = space.segments;
    const std::vector<int64_t>& firsts = space.firsts;
    parallel_for(step.requests * pieces, 1, [&](int64_t task) {
        const int first = int(task % pieces) * kPiece, count = std::min(kPiece, channels() - first);
        for (int64_t s = firsts[task / pieces]; s < firsts[task / pieces + 1]; ++s) {
            const Segment& own = segments[s];
            const auto place = [&](int64_t block) {
                return block < 0 ? nullptr : states.inputs + (block * channels() + first) * states.kept;
            };
            k.convolve({rows + own.first * width + first, width, own.tokens, count, conv_width, conv + first, channels(),
                        place(own.source), place(own.target)});
        }
    });
    float* rates = rows + 2 * (keys + values);
    float* decays = rates + value_heads;
    parallel_for(tokens, 4, [&](int64_t t) {
        float* row = rows + t * width;
        k.normalize_heads(row, key_heads, key_dim, 1.0f / std::sqrt(float(key_dim)));
        k.normalize_heads(row + keys, key_heads, key_dim, 1.0f);
        for (int h = 0; h < value_heads; ++h) {
            float &rate = rates[t * width + h], &change = decays[t * width + h];
            rate = 1.0f / (1.0f + std::exp(-rate));
            change = std::exp(decay[h] * softplus(change + dt_bias[h]));
        }
    });
    parallel_for(step.requests * value_heads, 1, [&](int64_t task) {
        const int64_t head = task % value_heads, size = int64_t(key_dim) * value_dim;
        for (int64_t s = firsts[task / value_heads]; s < firsts[task / value_heads + 1]; ++s) {
            const Segment& own = segments[s];
            float* row = rows + own.first * width;
            const auto place = [&](int64_t block) {
                return block < 0 ? nullptr : states.memory + (block * value_heads + head) * size;
            };
            const float* query = row + head / group * key_dim;
            k.delta_rule({query, query + keys, row + 2 * keys + head * value_dim, decays + own.first * width + head,
                          rates + own.first * width + head, width, own.tokens, key_dim, value_dim, place(own.source),
                          place(own.target)});
        }
    });
    for (int64_t n = 0; n < step.requests; ++n) {
        int64_t end = step.context_lens[n] - step.query_lens[n];
        for (int64_t s = firsts[n]; s < firsts[n + 1]; ++s) {
            end += segments[s].tokens;
            if (segments[s].target >= 0) states.ends[segments[s].target] = end;
        }
    }
    parallel_for(tokens, 4, [&](int64_t t) {
        float* mixed = rows + t * width + 2 * keys;
        k.gate_heads(mixed, mixed + values, norm, eps, value_heads, value_dim);
    });
    return 2 * keys;
}

void DeltaNet::check(const LayerCache& cache, const Step& step) const {
    heads.check(cache, step);
    const StateView& states = std::get<StateView>(cache);
    for (int64_t n = 0; n < step.requests; ++n) {
        const int64_t start = step.context_lens[n] - step.query_lens[n];
        if (start > 0 && states.ends[block_of(step, n, start - 1, states.block_size)] != start) {
            throw std::invalid_argument("a text goes on after a token whose recurrent state is not kept");
        }
    }
}

void DeltaNet::run(const Surroundings& around, const Step& step, const LayerCache& cache, float* hidden) const {
    const int64_t tokens = step.tokens, width = heads.row_size();
    float* rows = workspace().projected.reserve(tokens * width);
    in->multiply(round_input(around, hidden, tokens, *in), tokens, rows, false);
    const int first = heads.run(rows, step, std::get<StateView>(cache));
    add_output(*out, round_rows(rows + first, width, tokens, *out), around, tokens, hidden);
}

}  // namespace infinilm
