// A decoder's layers on packed weights: which kernels run in which order, shared out over the threads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pack.h"

namespace infinilm {

// A weight. If it is packed it owns its memory.
class Matrix {
public:
    // All zero. Rows that are multiplied with it are rounded to so many bits, 8 or 16.
    Matrix(const std::string& format, int rows, int columns, int activation_bits = 16);
    // Floats in somebody else's memory. Rows that are multiplied with it are not rounded, and have a multiple of 16 columns.
    explicit Matrix(const FloatMatrix& floats);

    // Of floats the numbers of rows and columns alone.
    const PackedMatrix& view() const { return view_; }
    // Null if it is packed.
    const FloatMatrix* floats() const { return floats_ ? &*floats_ : nullptr; }
    // What it owns.
    size_t num_bytes() const;
    // Of packed matrices alone.
    void load(const uint8_t* blocks, const int64_t* rows, int64_t count);
    void dequantize(const int64_t* rows, int64_t count, float* out) const;

private:
    PackedMatrix view_;
    std::optional<FloatMatrix> floats_;
    std::shared_ptr<uint8_t> memory_;
};

// Rounded rows, with the memory they are in.
class QuantizedRows {
public:
    const Activations& reserve(int64_t rows, int columns, int bits) { return reserve(rows, columns, bits, rows); }
    // The same for products of some of the rows, at least `fewest`.
    const Activations& reserve(int64_t rows, int columns, int bits, int64_t fewest);
    const Activations& view() const { return view_; }

private:
    Buffer<int8_t> coarse_, fine_;
    Buffer<int16_t> whole_;
    Buffer<float> scales_, sums_;
    Buffer<int32_t> halves_, fine_halves_;
    Buffer<uint8_t> fine_groups_;
    Buffer<float> plain_;
    Activations view_{};
};

// Some rows of x times a matrix.
struct Product {
    const PackedMatrix* matrix;
    const FloatMatrix* floats;  // instead, or null
    int64_t first_row, end_row;
    const float* bias;  // or null
    float* out;         // of row 0, the matrix's first column
    int64_t stride;     // of out
    bool accumulate;
};

// All of them, shared out over the threads together.
void multiply_all(const std::vector<Product>& products, const Activations& x);

class Linear {
public:
    Linear(std::vector<std::shared_ptr<const Matrix>> matrices, const float* bias);

    int in_features() const { return columns_; }
    int out_features() const { return rows_; }
    int activation_bits() const { return matrices_.front()->view().activation_bits; }
    // out [rows, out] = or += x W^T + b.
    void multiply(const Activations& x, int64_t rows, float* out, bool accumulate) const;
    // The same for rows that are not rounded yet.
    void multiply(const float* x, int64_t rows, float* out, bool accumulate) const;
    // out [rows, out] = x W^T + b for those of the matrices that some columns of out are in.
    void multiply_columns(const Activations& x, int64_t rows, int first_column, int end_column, float* out) const;
    // The products that multiply some rows; `out` is that of row 0.
    void list_products(int64_t first_row, int64_t end_row, float* out, bool accumulate, std::vector<Product>& products) const;

private:
    std::vector<std::shared_ptr<const Matrix>> matrices_;
    const float* bias_;
    int rows_ = 0, columns_ = 0;
};

// The states of a recurrent layer, by block: that after the last of the block's tokens that is computed.
struct StateView {
    float* memory;   // [blocks, heads, key_dim, value_dim]
    float* inputs;   // [blocks, channels, kept], the last inputs of a convolution, the oldest first
    int64_t* ends;   // [blocks], how many tokens of its text a state has seen
    int64_t blocks;  // that states are kept in
    int64_t block_size;
    int heads, key_dim, value_dim, channels, kept;
};

// What a layer keeps.
using LayerCache = std::variant<CacheView, StateView>;

// The batch of a step: T new tokens of N requests. Arrays belong to the caller.
struct Step {
    int64_t tokens, requests, max_blocks;
    const int64_t* positions;     // [T]
    const int64_t* slots;         // [T]
    const int64_t* block_tables;  // [N, max_blocks]
    const int64_t* query_lens;    // [N]
    const int64_t* context_lens;  // [N]
    // [N], how many of a request's new tokens, the last, have a use for a layer's results. The others only leave their keys
    // and values; their hidden states are of no use afterwards. Null: all have.
    const int64_t* last_lens = nullptr;

    // Throws std::invalid_argument if a table or a slot would lead outside of the cache.
    void check(const CacheView& cache) const;
};

// Check the step of each layer. One that several layers have is checked once.
void check_steps(const std::vector<const Step*>& steps, const std::vector<LayerCache>& caches);

// Throws std::invalid_argument if a position lies outside of a rotary table of that length.
void check_positions(const Step& step, int64_t max_len);

// How scores become weights; see AttentionTask.
struct Scoring {
    float scale;
    int64_t window;
    float cap = 0.0f;
    const float* sinks = nullptr;  // [num_heads]
};

// Attend every token of the step to its request's keys. Strides are from token to token.
void attend(const Step& step, const CacheView& cache, const float* query, int64_t query_stride, int num_heads,
            const Scoring& scoring, float* out, int64_t out_stride);

// What a mixer is between. A norm that is null is left out.
struct Surroundings {
    const float* norm_before;
    const float* norm_after;
    float eps;
    float scale;  // what the result is multiplied by before it is added to the input

    bool add_directly() const { return norm_after == nullptr && scale == 1.0f; }
};

class TokenMixer {
public:
    virtual ~TokenMixer() = default;
    virtual int hidden() const = 0;
    // Throws std::invalid_argument if the layer's cache, or a step on it, does not fit.
    virtual void check(const LayerCache& cache, const Step& step) const = 0;
    // hidden [tokens, hidden] += what becomes of it.
    virtual void run(const Surroundings& around, const Step& step, const LayerCache& cache, float* hidden) const = 0;
};

// Attention of the heads [q, k, v] that `qkv` gives; or only [q], to keys and values that another layer stores. With gates
// each head of q is followed by its gate.
struct Attention : TokenMixer {
    std::shared_ptr<const Linear> qkv, out;
    RopeStore rope;
    Scoring scoring;
    int kv_heads, head_dim;
    bool has_gates;
    int64_t max_len;  // of the rotary table

    int hidden() const override { return qkv->in_features(); }
    void check(const LayerCache& cache, const Step& step) const override;
    void run(const Surroundings& around, const Step& step, const LayerCache& cache, float* hidden) const override;
};

// Round the hidden states of a step for a layer, after the norm before a mixer; valid until the next rounding.
const Activations& round_input(const Surroundings& around, const float* hidden, int64_t tokens, const Linear& linear);
// The same for what a mixer has in rows `stride` apart, after a norm if there is a weight.
const Activations& round_rows(const float* rows, int64_t stride, int64_t tokens, const Linear& linear,
                              const float* norm = nullptr, float eps = 0.0f);
// hidden += what becomes of x W^T, a mixer's last product.
void add_output(const Linear& linear, const Activations& x, const Surroundings& around, int64_t tokens, float* hidden);

class ChannelMixer {
public:
    virtual ~ChannelMixer() = default;
    virtual int hidden() const = 0;
    // out [tokens, hidden] += what becomes of x [tokens, hidden], which may be out.
    virtual void run(const Surroundings& around, const float* x, int64_t tokens, float* out) const = 0;
};

// down(activation(gate) * up).
class MLP : public ChannelMixer {
public:
    MLP(std::shared_ptr<const Linear> gate_up, std::shared_ptr<const Linear> down, const Gating& gating)
        : gate_up_(std::move(gate_up)), down_(std::move(down)), gating_(gating) {}

    int hidden() const override { return down_->out_features(); }
    void run(const Surroundings& around, const float* x, int64_t tokens, float* out) const override;

private:
    void run_some(const Surroundings& around, const float* x, int64_t tokens, float* out) const;

    std::shared_ptr<const Linear> gate_up_, down_;
    Gating gating_;
};

// The sum of several mixers of the same input, each between norms of its own.
class MixerSum : public ChannelMixer {
public:
    struct Part {
        std::shared_ptr<const ChannelMixer> mixer;
        Surroundings around;
    };
    explicit MixerSum(std::vector<Part> parts) : parts_(std::move(parts)) {}

    int hidden() const override { return parts_.front().mixer->hidden(); }
    // There is no norm before all of them.
    void run(const Surroundings& around, const float* x, int64_t tokens, float* out) const override;

private:
    std::vector<Part> parts_;
};

// What a layer makes of the input that it has for itself: hidden += norm(projection(activation(gate(hidden)) * input)).
struct OwnInput {
    std::shared_ptr<const Linear> gate, projection;
    Surroundings around;
    Gating gating;
};

struct Layer {
    std::shared_ptr<const TokenMixer> tokens;
    Surroundings around_tokens;
    std::shared_ptr<const ChannelMixer> channels;
    Surroundings around_channels;
    std::shared_ptr<const OwnInput> own_input;  // or null
    float scale;  // of its output
};

// Put hidden [tokens, hidden] through a layer. Rows of its own input are `stride` apart; it is null where a layer has none.
void run_layer(const Layer& layer, const Step& step, const LayerCache& cache, const float* input, int64_t stride,
               float* hidden);

struct Decoder {
    std::vector<Layer> layers;
    const float* norm;  // after the last layer, or null
    float eps;

    // Put hidden [tokens, hidden] through all layers, each of which has a cache and a step, and the norm. Layers with inputs of
    // their own have them in inputs [tokens, layers, width], which else is null.
    void run(const std::vector<LayerCache>& caches, const std::vector<const Step*>& steps, int64_t tokens, const float* inputs,
             int64_t width, float* hidden) const;
};

}  // namespace infinilm
