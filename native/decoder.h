// A decoder's layers: which kernels run in which order, divided among the threads.
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

// A weight. A packed matrix owns its memory; a matrix of floats does not.
class Matrix {
public:
    // A packed matrix of zeros. Rows that are multiplied with it are rounded to `activation_bits`, 8 or 16.
    Matrix(const std::string& format, int rows, int columns, int activation_bits = 16);
    // Floats in the caller's memory. Rows that are multiplied with it are not rounded, and have a multiple of 16
    // columns.
    explicit Matrix(const FloatMatrix& floats);

    // For floats only the numbers of rows and columns are set.
    const PackedMatrix& view() const { return view_; }
    // Null if the matrix is packed.
    const FloatMatrix* floats() const { return floats_ ? &*floats_ : nullptr; }
    // The memory that the matrix owns.
    size_t num_bytes() const;
    // Only for packed matrices.
    void load(const uint8_t* blocks, const int64_t* rows, int64_t count);
    void dequantize(const int64_t* rows, int64_t count, float* out) const;

private:
    PackedMatrix view_;
    std::optional<FloatMatrix> floats_;
    std::shared_ptr<uint8_t> memory_;
};

// Rounded rows and their memory.
class QuantizedRows {
public:
    const Activations& reserve(int64_t rows, int columns, int bits) { return reserve(rows, columns, bits, rows); }
    // The same for products that take only some of the rows, at least `fewest`.
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
    const FloatMatrix* floats;  // the matrix if it is of floats, else null
    int64_t first_row, end_row;
    const float* bias;  // or null
    float* out;         // row 0, the matrix's first output
    int64_t stride;     // from row to row of out
    bool accumulate;
};

// Compute all products; their tasks are divided among the threads together.
void multiply_all(const std::vector<Product>& products, const Activations& x);

class Linear {
public:
    Linear(std::vector<std::shared_ptr<const Matrix>> matrices, const float* bias);

    int in_features() const { return columns_; }
    int out_features() const { return rows_; }
    int activation_bits() const { return matrices_.front()->view().activation_bits; }
    // out [rows, out] = or += x W^T + b.
    void multiply(const Activations& x, int64_t rows, float* out, bool accumulate) const;
    // The same; rounds the rows first.
    void multiply(const float* x, int64_t rows, float* out, bool accumulate) const;
    // out [rows, out] = x W^T + b, only for those matrices that have outputs among the given columns of `out`.
    void multiply_columns(const Activations& x, int64_t rows, int first_column, int end_column, float* out) const;
    // Append the products for some rows; `out` is that of row 0.
    void list_products(int64_t first_row, int64_t end_row, float* out, bool accumulate, std::vector<Product>& products) const;

private:
    std::vector<std::shared_ptr<const Matrix>> matrices_;
    const float* bias_;
    int rows_ = 0, columns_ = 0;
};

// The states of a recurrent layer, one per block: the state after the last computed token of the block.
struct StateView {
    float* memory;   // [blocks, heads, key_dim, value_dim]
    float* inputs;   // [blocks, channels, kept], the last inputs of a convolution, oldest first
    int64_t* ends;   // [blocks], how many tokens of its text a state has seen
    int64_t blocks;  // number of blocks that keep states
    int64_t block_size;
    int heads, key_dim, value_dim, channels, kept;
};

// The cache of a layer.
using LayerCache = std::variant<CacheView, StateView>;

// The batch of a step: T new tokens of N requests. Arrays belong to the caller.
struct Step {
    int64_t tokens, requests, max_blocks;
    const int64_t* positions;     // [T]
    const int64_t* slots;         // [T]
    const int64_t* block_tables;  // [N, max_blocks]
    const int64_t* query_lens;    // [N]
    const int64_t* context_lens;  // [N]
    // [N], how many of a request's last new tokens need the layer's results. The other tokens only store their keys and
    // values; their hidden states are invalid afterwards. Null: all tokens need results.
    const int64_t* last_lens = nullptr;

    // Throws std::invalid_argument if a block table or a slot points outside of the cache.
    void check(const CacheView& cache) const;
};

// Check the step of each layer. A step that several layers share is checked once.
void check_steps(const std::vector<const Step*>& steps, const std::vector<LayerCache>& caches);

// Throws std::invalid_argument if a position lies outside of a rotary table of length max_len.
void check_positions(const Step& step, int64_t max_len);

// How attention scores become weights; see AttentionTask.
struct Scoring {
    float scale;
    int64_t window;
    float cap = 0.0f;
    const float* sinks = nullptr;  // [num_heads]
};

// Attention of every token of the step to its request's keys. Strides are from token to token.
void attend(const Step& step, const CacheView& cache, const float* query, int64_t query_stride, int num_heads,
            const Scoring& scoring, float* out, int64_t out_stride);

// The norms around a mixer and the scale of its result. A null norm is skipped.
struct Surroundings {
    const float* norm_before;
    const float* norm_after;
    float eps;
    float scale;  // factor of the result before it is added to the input

    bool add_directly() const { return norm_after == nullptr && scale == 1.0f; }
};

class TokenMixer {
public:
    virtual ~TokenMixer() = default;
    virtual int hidden() const = 0;
    // Throws std::invalid_argument if the layer's cache, or a step on it, does not fit.
    virtual void check(const LayerCache& cache, const Step& step) const = 0;
    // hidden [tokens, hidden] += the mixer's result for it.
    virtual void run(const Surroundings& around, const Step& step, const LayerCache& cache, float* hidden) const = 0;
};

// Attention of the heads [q, k, v] that `qkv` computes. If `qkv` computes only [q], another layer stores the keys and
// values. With gates, each head of q is followed by its gate.
struct Attention : TokenMixer {
    std::shared_ptr<const Linear> qkv, out;
    RopeStore rope;
    Scoring scoring;
    int kv_heads, head_dim;
    bool has_gates;
    int64_t max_len;  // length of the rotary table

    int hidden() const override { return qkv->in_features(); }
    void check(const LayerCache& cache, const Step& step) const override;
    void run(const Surroundings& around, const Step& step, const LayerCache& cache, float* hidden) const override;
};

// Apply the norm before a mixer to a step's hidden states and round them for `linear`. Valid until the next rounding.
const Activations& round_input(const Surroundings& around, const float* hidden, int64_t tokens, const Linear& linear);
// The same for any rows, `stride` apart; normed first if there is a norm.
const Activations& round_rows(const float* rows, int64_t stride, int64_t tokens, const Linear& linear,
                              const float* norm = nullptr, float eps = 0.0f);
// A mixer's last product: hidden += x W^T, normed and scaled as `around` says.
void add_output(const Linear& linear, const Activations& x, const Surroundings& around, int64_t tokens, float* hidden);

class ChannelMixer {
public:
    virtual ~ChannelMixer() = default;
    virtual int hidden() const = 0;
    // out [tokens, hidden] += the mixer's result for x [tokens, hidden]. x may be out.
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

// The sum of several mixers of the same input, each with its own norms.
class MixerSum : public ChannelMixer {
public:
    struct Part {
        std::shared_ptr<const ChannelMixer> mixer;
        Surroundings around;
    };
    explicit MixerSum(std::vector<Part> parts) : parts_(std::move(parts)) {}

    int hidden() const override { return parts_.front().mixer->hidden(); }
    // Ignores around.norm_before: each part has its own.
    void run(const Surroundings& around, const float* x, int64_t tokens, float* out) const override;

private:
    std::vector<Part> parts_;
};

// How a layer adds its per-layer input: hidden += norm(projection(activation(gate(hidden)) * input)).
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
    float scale;  // factor of the layer's output
};

// Run a layer on hidden [tokens, hidden], in place. Rows of the layer's own input are `stride` apart; null: it has
// none.
void run_layer(const Layer& layer, const Step& step, const LayerCache& cache, const float* input, int64_t stride,
               float* hidden);

struct Decoder {
    std::vector<Layer> layers;
    const float* norm;  // after the last layer, or null
    float eps;

    // Run all layers and the norm on hidden [tokens, hidden], in place. Each layer has a cache and a step. `inputs`
    // [tokens, layers, width] has the layers' own inputs; null: they have none.
    void run(const std::vector<LayerCache>& caches, const std::vector<const Step*>& steps, int64_t tokens, const float* inputs,
             int64_t width, float* hidden) const;
};

}  // namespace infinilm
