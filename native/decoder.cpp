#include "decoder.h"

#include <algorithm>
#include <array>
#include <map>
#include <new>
#include <stdexcept>

#include "dense.h"
#include "dispatch.h"
#include "threads.h"

namespace infinilm {

Matrix::Matrix(const std::string& format, int rows, int columns, int activation_bits)
    : view_{&find_format(format), rows, columns, nullptr, activation_bits} {
    if (activation_bits != 8 && activation_bits != 16) {
        throw std::invalid_argument("activation_bits=" + std::to_string(activation_bits) + " must be 8 or 16");
    }
    if (rows < 1 || columns < 1 || columns % view_.format->block_columns != 0) {
        throw std::invalid_argument(format + " can't hold [" + std::to_string(rows) + ", " + std::to_string(columns) +
                                    "]: columns must be a multiple of " + std::to_string(view_.format->block_columns));
    }
    memory_ = allocate_weights(num_bytes());
    view_.data = memory_.get();
}

Matrix::Matrix(const FloatMatrix& floats)
    : view_{nullptr, floats.outputs, floats.inputs, nullptr, kPlainBits}, floats_(floats) {
    if (floats.inputs % kLeastColumns != 0 || floats.is_table) {
        throw std::invalid_argument("a matrix of floats must be [in, out], with a multiple of " +
                                    std::to_string(kLeastColumns) + " inputs");
    }
}

size_t Matrix::num_bytes() const { return floats_ ? 0 : view_.panels() * view_.format->panel_bytes(view_.columns); }

void Matrix::load(const uint8_t* blocks, const int64_t* rows, int64_t count) {
    const Format& format = *view_.format;
    const size_t row_bytes = size_t(view_.columns / format.block_columns) * format.block_bytes;
    // If a row is given twice, the last one counts.
    std::map<int64_t, std::array<const uint8_t*, kPanelRows>> panels;
    for (int64_t i = 0; i < count; ++i) panels[rows[i] / kPanelRows][rows[i] % kPanelRows] = blocks + i * row_bytes;
    for (const auto& [panel, sources] : panels) {
        pack_panel(format, view_.columns, sources.data(), memory_.get() + panel * format.panel_bytes(view_.columns));
    }
}

void Matrix::dequantize(const int64_t* rows, int64_t count, float* out) const {
    for (int64_t i = 0; i < count; ++i) unpack_row(view_, int(rows[i]), out + i * view_.columns);
}

const Activations& QuantizedRows::reserve(int64_t rows, int columns, int bits, int64_t fewest) {
    if (bits == kPlainBits) {
        view_ = {};
        view_.rows = rows, view_.columns = columns, view_.bits = bits, view_.plain = plain_.reserve(size_t(rows) * columns);
        return view_;
    }
    const int blocks = (columns / kGroup + kBlockGroups - 1) / kBlockGroups;
    const size_t count = size_t(rows) * blocks, groups = count * kBlockGroups;
    const bool is_short = bits == 8, has_bytes = is_short || fewest < kAlwaysMany, has_whole = !is_short && rows >= kAlwaysFew;
    view_ = {rows,
             columns,
             bits,
             has_bytes ? coarse_.reserve(groups * kGroup) : nullptr,
             has_bytes ? fine_.reserve(groups * kGroup) : nullptr,
             has_whole ? whole_.reserve(groups * kGroup) : nullptr,
             scales_.reserve(is_short ? groups : count),
             sums_.reserve(groups),
             halves_.reserve(2 * groups),
             is_short ? fine_halves_.reserve(2 * groups) : nullptr,
             is_short ? fine_groups_.reserve(count) : nullptr,
             nullptr};
    return view_;
}

Linear::Linear(std::vector<std::shared_ptr<const Matrix>> matrices, const float* bias)
    : matrices_(std::move(matrices)), bias_(bias) {
    if (matrices_.empty()) throw std::invalid_argument("a linear layer needs a matrix");
    columns_ = matrices_.front()->view().columns;
    for (const auto& matrix : matrices_) {
        if (matrix->view().columns != columns_) throw std::invalid_argument("matrices must have as many columns");
        if (matrix->view().activation_bits != activation_bits()) {
            throw std::invalid_argument("matrices must have the same activation_bits");
        }
        rows_ += matrix->view().rows;
    }
}

void Linear::multiply(const Activations& x, int64_t rows, float* out, bool accumulate) const {
    std::vector<Product> products;
    list_products(0, rows, out, accumulate, products);
    multiply_all(products, x);
}

void Linear::multiply(const float* x, int64_t rows, float* out, bool accumulate) const {
    static thread_local QuantizedRows memory;
    const Activations rounded = memory.reserve(rows, columns_, activation_bits());
    parallel_for(rows, 4, [&](int64_t t) { kernels().quantize(x, columns_, nullptr, 0.0f, int(t), rounded); });
    multiply(rounded, rows, out, accumulate);
}

void Linear::multiply_columns(const Activations& x, int64_t rows, int first_column, int end_column, float* out) const {
    std::vector<Product> products, chosen;
    list_products(0, rows, out, false, products);
    for (const Product& each : products) {
        const int64_t first = each.out - out;
        if (first < end_column && first + each.matrix->rows > first_column) chosen.push_back(each);
    }
    multiply_all(chosen, x);
}

void Linear::list_products(int64_t first_row, int64_t end_row, float* out, bool accumulate,
                           std::vector<Product>& products) const {
    int first = 0;
    for (const auto& matrix : matrices_) {
        const float* bias = bias_ ? bias_ + first : nullptr;
        products.push_back({&matrix->view(), matrix->floats(), first_row, end_row, bias, out + first, rows_, accumulate});
        first += matrix->view().rows;
    }
}

namespace {

void multiply_plain(const std::vector<Product>& products, const Activations& x) {
    static thread_local std::vector<DenseProduct> dense;
    dense.clear();
    for (const Product& each : products) {
        const FloatProduct product{*each.floats, x.plain + each.first_row * x.columns, each.end_row - each.first_row,
                                   each.out + each.first_row * each.stride, each.stride};
        dense.push_back({product, each.bias, each.accumulate});
    }
    multiply_dense(dense);
}

}  // namespace

void multiply_all(const std::vector<Product>& products, const Activations& x) {
    if (x.bits == kPlainBits) return multiply_plain(products, x);
    // A task is some panels times some rows. It is large enough to be worth scheduling, and there are more tasks than
    // threads, so that one delayed thread does not delay the others.
    constexpr int kTaskPanels = 4;  // for many rows, which are read once for all these panels
    constexpr size_t kTaskBytes = 16 << 10;
    struct Piece {
        int panels_per_task;
        int64_t panel_tasks, row_blocks, first_task;
    };
    const auto row_blocks_of = [](const Product& each) {
        return (each.end_row - each.first_row + kMaxTaskRows - 1) / kMaxTaskRows;
    };
    int64_t all_panels = 0;
    for (const Product& each : products) all_panels += row_blocks_of(each) * each.matrix->panels();
    // Many rows are multiplied with two panels at a time.
    const int many_panels = all_panels >= 8 * kTaskPanels * num_threads() ? kTaskPanels : 2;
    std::vector<Piece> pieces;
    pieces.reserve(products.size());
    int64_t tasks = 0;
    for (const Product& each : products) {
        const PackedMatrix& matrix = *each.matrix;
        const int most = std::max(1, int(kTaskBytes / matrix.format->panel_bytes(matrix.columns)));
        const int even = std::max(1, matrix.panels() / (8 * num_threads()));
        const int per_task = each.end_row - each.first_row < kAlwaysMany ? std::min(most, even) : many_panels;
        const int64_t row_blocks = row_blocks_of(each);
        const int64_t panel_tasks = (matrix.panels() + per_task - 1) / per_task;
        pieces.push_back({per_task, panel_tasks, row_blocks, tasks});
        tasks += row_blocks * panel_tasks;
    }
    const Kernels& k = kernels();
    parallel_for(tasks, 1, [&](int64_t task) {
        const auto after = std::upper_bound(pieces.begin(), pieces.end(), task,
                                            [](int64_t value, const Piece& piece) { return value < piece.first_task; });
        const Piece& piece = *(after - 1);
        const Product& own = products[after - 1 - pieces.begin()];
        const int64_t place = task - piece.first_task;
        // Tasks are ordered by rows. So in a long prompt a thread gets the rows that it had in the previous kernel, which
        // are in memory near to it.
        const int64_t block = place / piece.panel_tasks;
        const int panel = int(place % piece.panel_tasks) * piece.panels_per_task;
        // Blocks have about equally many rows; all but the last are whole units.
        const int64_t units = (own.end_row - own.first_row + kTaskUnit - 1) / kTaskUnit;
        const auto first_of = [&](int64_t index) {
            return int(std::min(own.end_row, own.first_row + units * index / piece.row_blocks * kTaskUnit));
        };
        k.multiply(*own.matrix, x, first_of(block), first_of(block + 1), panel,
                   std::min(panel + piece.panels_per_task, own.matrix->panels()), own.bias, own.out, own.stride,
                   own.accumulate);
    });
}

void Step::check(const CacheView& cache) const {
    const int64_t num_slots = cache.blocks * cache.block_size;
    for (int64_t t = 0; t < tokens; ++t) {
        if (slots[t] >= num_slots) throw std::invalid_argument("a slot lies outside of the cache");
    }
    int64_t total = 0;
    for (int64_t n = 0; n < requests; ++n) {
        if (query_lens[n] < 1 || context_lens[n] < query_lens[n]) {
            throw std::invalid_argument("a request needs at least one new token, and a context that holds all of them");
        }
        total += query_lens[n];
        const int64_t blocks = (context_lens[n] + cache.block_size - 1) / cache.block_size;
        if (blocks > max_blocks) throw std::invalid_argument("a context is longer than its row of the block table");
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t block = block_tables[n * max_blocks + b];
            if (block < 0 || block >= cache.blocks) throw std::invalid_argument("a block lies outside of the cache");
        }
    }
    if (total != tokens) throw std::invalid_argument("the requests' new tokens are not as many as the batch has");
}

void check_steps(const std::vector<const Step*>& steps, const std::vector<LayerCache>& caches) {
    for (size_t i = 0; i < steps.size(); ++i) {
        const CacheView* own = std::get_if<CacheView>(&caches[i]);
        if (!own) continue;  // mixers with states check their own
        const CacheView* last = i > 0 && steps[i] == steps[i - 1] ? std::get_if<CacheView>(&caches[i - 1]) : nullptr;
        const bool is_checked = last && last->blocks == own->blocks && last->block_size == own->block_size;
        if (!is_checked) steps[i]->check(*own);
    }
}

void check_positions(const Step& step, int64_t max_len) {
    for (int64_t t = 0; t < step.tokens; ++t) {
        if (step.positions[t] < 0 || step.positions[t] >= max_len) {
            throw std::invalid_argument("a position lies outside of the rotary table");
        }
    }
}

namespace {

// Memory for results between two kernels; one per thread that computes steps.
struct Workspace {
    QuantizedRows rows;
    Buffer<float> qkv, gates, attended, gate_up, mixed, partials, gated, sum, last_hidden;
    std::vector<AttentionTask> tasks;
    std::vector<int64_t> last_tokens, last_positions;
};

Workspace& workspace() {
    static thread_local Workspace own;
    return own;
}

// A task for each tile of tokens and each key-value head, with all the keys they see.
void list_tasks(const Step& step, const CacheView& cache, const AttentionTask& like, std::vector<AttentionTask>& tasks) {
    tasks.clear();
    int64_t token = 0;
    for (int64_t n = 0; n < step.requests; ++n) {
        const int64_t new_tokens = step.query_lens[n], cached = step.context_lens[n] - new_tokens;
        for (int64_t first = 0; first < new_tokens; first += kTileTokens) {
            AttentionTask task = like;
            task.tokens = int(std::min<int64_t>(kTileTokens, new_tokens - first));
            task.position = cached + first;
            task.end_key = task.position + task.tokens;
            task.blocks = step.block_tables + n * step.max_blocks;
            for (task.kv_head = 0; task.kv_head < cache.kv_heads; ++task.kv_head) {
                const int64_t head = int64_t(task.kv_head) * like.heads * cache.head_dim;
                task.query = like.query + (token + first) * like.query_stride + head;
                task.sinks = like.sinks ? like.sinks + task.kv_head * like.heads : nullptr;
                task.out = like.out + (token + first) * like.out_stride + head;
                tasks.push_back(task);
            }
        }
        token += new_tokens;
    }
}

// Split tasks at multiples of kSplit keys. The parts of a task are adjacent, and get memory for partial results.
void split_tasks(int64_t partial_row, std::vector<AttentionTask>& tasks, Buffer<float>& memory) {
    std::vector<AttentionTask> parts;
    std::vector<int64_t> places;  // first row of a part's partial results; -1: the task is not split
    int64_t rows = 0;
    for (const AttentionTask& task : tasks) {
        const int64_t seen_from = task.window ? std::max<int64_t>(0, task.position - task.window + 1) : 0;
        const int64_t first = seen_from / kSplit, end = (task.end_key + kSplit - 1) / kSplit;
        for (int64_t split = first; split < end; ++split) {
            const bool is_whole = end - first == 1;
            parts.push_back(task);
            parts.back().first_key = split * kSplit;
            parts.back().end_key = std::min(task.end_key, (split + 1) * kSplit);
            places.push_back(is_whole ? -1 : rows);
            if (!is_whole) rows += int64_t(task.tokens) * task.heads;
        }
    }
    float* partials = memory.reserve(rows * partial_row);
    for (size_t i = 0; i < parts.size(); ++i) parts[i].partial = places[i] < 0 ? nullptr : partials + places[i] * partial_row;
    tasks.swap(parts);
}

// For each tile of tokens and each of its splits: the index of the first head's part, and the distance to the next
// head's.
std::vector<std::pair<size_t, int64_t>> group_splits(const std::vector<AttentionTask>& tasks, int heads) {
    std::vector<std::pair<size_t, int64_t>> groups;
    for (size_t first = 0; first < tasks.size();) {
        size_t end = first + 1;
        while (end < tasks.size() && tasks[end].out == tasks[first].out) ++end;
        for (size_t part = first; part < end; ++part) groups.emplace_back(part, int64_t(end - first));
        first += (end - first) * heads;
    }
    return groups;
}

}  // namespace

void attend(const Step& step, const CacheView& cache, const float* query, int64_t query_stride, int num_heads,
            const Scoring& scoring, float* out, int64_t out_stride) {
    const Kernels& k = kernels();
    Workspace& space = workspace();
    std::vector<AttentionTask>& tasks = space.tasks;
    const int heads = num_heads / cache.kv_heads;
    const int64_t partial_row = k.partial_size(cache.head_dim);
    AttentionTask like{};
    like.query = query, like.query_stride = query_stride;
    like.out = out, like.out_stride = out_stride;
    like.heads = heads, like.scale = scoring.scale, like.window = scoring.window;
    like.cap = scoring.cap, like.sinks = scoring.sinks;
    list_tasks(step, cache, like, tasks);
    // If there are too few tasks to keep the threads busy, the keys are divided, too.
    if (int64_t(tasks.size()) < 8 * num_threads()) split_tasks(partial_row, tasks, space.partials);
    // Heads are adjacent in the cache, so one thread processes a split for all heads, if that leaves no thread idle.
    const std::vector<std::pair<size_t, int64_t>> groups = group_splits(tasks, cache.kv_heads);
    if (int64_t(groups.size()) < num_threads()) {
        parallel_for(int64_t(tasks.size()), 1, [&](int64_t i) { k.attend(tasks[i], cache); });
    } else {
        parallel_for(int64_t(groups.size()), 1, [&](int64_t i) {
            for (int head = 0; head < cache.kv_heads; ++head) k.attend(tasks[groups[i].first + head * groups[i].second], cache);
        });
    }
    for (size_t first = 0, end; first < tasks.size(); first = end) {
        const AttentionTask& task = tasks[first];
        for (end = first + 1; task.partial && end < tasks.size() && tasks[end].out == task.out;) ++end;
        const int64_t rows = task.partial ? int64_t(task.tokens) * heads : 0;
        for (int64_t r = 0; r < rows; ++r) {
            const float* sink = task.sinks ? task.sinks + r % heads : nullptr;
            k.merge(task.partial + r * partial_row, rows * partial_row, int(end - first), cache.head_dim, sink,
                    task.out + r / heads * out_stride + r % heads * cache.head_dim);
        }
    }
}

static constexpr int64_t kRowsPerTask = 4;

const Activations& round_rows(const float* rows, int64_t stride, int64_t tokens, const Linear& linear, const float* norm,
                              float eps) {
    const Activations& rounded = workspace().rows.reserve(tokens, linear.in_features(), linear.activation_bits());
    parallel_for(tokens, kRowsPerTask, [&](int64_t t) { kernels().quantize(rows, stride, norm, eps, int(t), rounded); });
    return rounded;
}

const Activations& round_input(const Surroundings& around, const float* hidden, int64_t tokens, const Linear& linear) {
    return round_rows(hidden, linear.in_features(), tokens, linear, around.norm_before, around.eps);
}

void add_output(const Linear& linear, const Activations& x, const Surroundings& around, int64_t tokens, float* hidden) {
    if (around.add_directly()) return linear.multiply(x, tokens, hidden, true);
    const int size = linear.out_features();
    float* mixed = workspace().mixed.reserve(tokens * size);
    linear.multiply(x, tokens, mixed, false);
    parallel_for(tokens, kRowsPerTask, [&](int64_t t) {
        kernels().add_normed(mixed + t * size, around.norm_after, around.eps, around.scale, size, hidden + t * size);
    });
}

void Attention::check(const LayerCache& cache, const Step& step) const {
    const CacheView* own = std::get_if<CacheView>(&cache);
    if (!own || own->is_latent || own->kv_heads != kv_heads || own->head_dim != head_dim) {
        throw std::invalid_argument("a cache does not fit its layer");
    }
    check_positions(step, max_len);
}

// Move the gates out of a token's row [q and gate of each head, k, v], which becomes [q, k, v].
static void split_gates(float* row, int heads, int dim, int64_t rest, float* gates) {
    for (int h = 0; h < heads; ++h) {
        const float* pair = row + 2 * h * dim;
        std::copy(pair + dim, pair + 2 * dim, gates + h * dim);
        std::copy(pair, pair + dim, row + h * dim);
    }
    std::copy(row + 2 * heads * dim, row + 2 * heads * dim + rest, row + heads * dim);
}

namespace {

enum class Heads { kAll, kQueries, kKeysAndValues };

// Compute the heads [tokens, q, k and v] of a step's tokens, or some of the heads: norm and rotate them, and store keys
// and values. Gates are moved to `gates` unless it is null.
float* make_heads(const Attention& own, const Surroundings& around, const Step& step, const CacheView& cache, Heads which,
                  const float* hidden, float* gates = nullptr) {
    const int size = own.qkv->out_features(), query_size = own.rope.num_heads * own.head_dim;
    const Activations& normed = round_input(around, hidden, step.tokens, *own.qkv);
    float* heads = workspace().qkv.reserve(step.tokens * size);
    RopeStore rope = own.rope;
    if (which == Heads::kQueries) rope.has_keys = false;
    if (which == Heads::kKeysAndValues) rope.num_heads = 0;
    const int first = which == Heads::kKeysAndValues ? query_size : 0;
    own.qkv->multiply_columns(normed, step.tokens, first, which == Heads::kQueries ? query_size : size, heads);
    parallel_for(step.tokens, kRowsPerTask, [&](int64_t t) {
        float* row = heads + t * size + first;
        if (gates) split_gates(row, rope.num_heads, own.head_dim, 2 * own.kv_heads * own.head_dim, gates + t * query_size);
        kernels().rope_store(row, step.positions[t], which == Heads::kQueries ? -1 : step.slots[t], rope, cache);
    });
    return heads;
}

void run_attention(const Attention& own, const Surroundings& around, const Step& step, const CacheView& cache, Heads which,
                   float* hidden) {
    Workspace& space = workspace();
    const int64_t tokens = step.tokens, qkv_size = own.qkv->out_features(), attended_size = own.out->in_features();
    float* gates = own.has_gates ? space.gates.reserve(tokens * attended_size) : nullptr;
    const float* heads = make_heads(own, around, step, cache, which, hidden, gates);
    float* attended = space.attended.reserve(tokens * attended_size);
    attend(step, cache, heads, qkv_size, own.rope.num_heads, own.scoring, attended, attended_size);
    if (gates) {
        parallel_for(tokens, kRowsPerTask, [&](int64_t t) {
            const int64_t place = t * attended_size;
            kernels().gate_heads(attended + place, gates + place, nullptr, 0.0f, 1, int(attended_size));
        });
    }
    add_output(*own.out, round_rows(attended, attended_size, tokens, *own.out), around, tokens, hidden);
}

// A layer whose results only the last tokens of each request need. Their hidden states are gathered and put back.
void run_last_layer(const Layer& layer, const Attention& attention, const Step& step, const CacheView& cache,
                    float* hidden) {
    Workspace& space = workspace();
    make_heads(attention, layer.around_tokens, step, cache, Heads::kKeysAndValues, hidden);
    std::vector<int64_t>&tokens = space.last_tokens, &positions = space.last_positions;
    tokens.clear(), positions.clear();
    for (int64_t n = 0, end = 0; n < step.requests; ++n) {
        end += step.query_lens[n];
        for (int64_t t = end - step.last_lens[n]; t < end; ++t) tokens.push_back(t), positions.push_back(step.positions[t]);
    }
    const int64_t count = int64_t(tokens.size()), size = attention.qkv->in_features();
    if (count == 0) return;
    float* last_hidden = space.last_hidden.reserve(count * size);
    for (int64_t i = 0; i < count; ++i) std::copy_n(hidden + tokens[i] * size, size, last_hidden + i * size);
    const Step last{count, step.requests, step.max_blocks, positions.data(), nullptr, step.block_tables, step.last_lens,
                    step.context_lens};
    run_attention(attention, layer.around_tokens, last, cache, Heads::kQueries, last_hidden);
    layer.channels->run(layer.around_channels, last_hidden, count, last_hidden);
    for (int64_t i = 0; i < count; ++i) std::copy_n(last_hidden + i * size, size, hidden + tokens[i] * size);
}

}  // namespace

void Attention::run(const Surroundings& around, const Step& step, const LayerCache& cache, float* hidden) const {
    run_attention(*this, around, step, std::get<CacheView>(cache), Heads::kAll, hidden);
}

void MLP::run(const Surroundings& around, const float* x, int64_t tokens, float* out) const {
    // A long prompt is computed in pieces, as many tokens as the threads multiply at once: intermediate results are
    // large.
    const int64_t most = int64_t(kMaxTaskRows) * num_threads();
    for (int64_t first = 0; first < tokens; first += most) {
        const int64_t count = std::min(most, tokens - first);
        run_some(around, x + first * hidden(), count, out + first * hidden());
    }
}

void MLP::run_some(const Surroundings& around, const float* x, int64_t tokens, float* out) const {
    Workspace& space = workspace();
    const int64_t inner_size = gate_up_->out_features();
    const Activations& normed = round_input(around, x, tokens, *gate_up_);
    float* gate_up = space.gate_up.reserve(tokens * inner_size);
    gate_up_->multiply(normed, tokens, gate_up, false);
    const Activations& inner = space.rows.reserve(tokens, int(inner_size / 2), down_->activation_bits());
    parallel_for(tokens, kRowsPerTask, [&](int64_t t) {
        kernels().gate_quantize(gate_up, inner_size, gating_, int(t), inner);
    });
    add_output(*down_, inner, around, tokens, out);
}

void MixerSum::run(const Surroundings& around, const float* x, int64_t tokens, float* out) const {
    const int size = hidden();
    float* sum = workspace().sum.reserve(tokens * size);
    std::fill(sum, sum + tokens * size, 0.0f);
    for (const Part& part : parts_) part.mixer->run(part.around, x, tokens, sum);
    parallel_for(tokens, kRowsPerTask, [&](int64_t t) {
        kernels().add_normed(sum + t * size, around.norm_after, around.eps, around.scale, size, out + t * size);
    });
}

namespace {

void add_own_input(const OwnInput& own, const float* input, int64_t stride, int64_t tokens, float* hidden) {
    Workspace& space = workspace();
    const int width = own.gate->out_features();
    const Activations& rounded = round_input(own.around, hidden, tokens, *own.gate);
    float* gates = space.gate_up.reserve(tokens * width);
    own.gate->multiply(rounded, tokens, gates, false);
    float* gated = space.gated.reserve(tokens * 2 * width);
    const Activations& inner = space.rows.reserve(tokens, width, own.projection->activation_bits());
    parallel_for(tokens, kRowsPerTask, [&](int64_t t) {
        float* row = gated + t * 2 * width;
        std::copy(gates + t * width, gates + (t + 1) * width, row);
        std::copy(input + t * stride, input + t * stride + width, row + width);
        kernels().gate_quantize(gated, 2 * width, own.gating, int(t), inner);
    });
    add_output(*own.projection, inner, own.around, tokens, hidden);
}

}  // namespace

void run_layer(const Layer& layer, const Step& step, const LayerCache& cache, const float* input, int64_t stride,
               float* hidden) {
    const auto* attention = dynamic_cast<const Attention*>(layer.tokens.get());
    if (step.last_lens && attention && !attention->has_gates && !layer.own_input && layer.scale == 1.0f) {
        return run_last_layer(layer, *attention, step, std::get<CacheView>(cache), hidden);
    }
    layer.tokens->run(layer.around_tokens, step, cache, hidden);
    layer.channels->run(layer.around_channels, hidden, step.tokens, hidden);
    if (layer.own_input) add_own_input(*layer.own_input, input, stride, step.tokens, hidden);
    if (layer.scale == 1.0f) return;
    const int64_t count = step.tokens * layer.channels->hidden();
    for (int64_t i = 0; i < count; ++i) hidden[i] *= layer.scale;
}

void Decoder::run(const std::vector<LayerCache>& caches, const std::vector<const Step*>& steps, int64_t tokens,
                  const float* inputs, int64_t width, float* hidden) const {
    for (size_t i = 0; i < layers.size(); ++i) {
        const float* own = inputs ? inputs + i * width : nullptr;
        run_layer(layers[i], *steps[i], caches[i], own, int64_t(layers.size()) * width, hidden);
    }
    if (norm == nullptr) return;
    const int columns = layers.front().tokens->hidden();
    parallel_for(tokens, 16, [&](int64_t t) {
        float* row = hidden + t * columns;
        kernels().rms_norm(row, norm, eps, columns, row);
    });
}

}  // namespace infinilm
