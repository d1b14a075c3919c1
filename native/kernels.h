// The table of kernels, compiled once per instruction set, and the structs they work on. Kernels start no threads and
// allocate no memory.
#pragma once

#include <cstdint>

#include "format.h"

namespace infinilm {

// Rows of floats, rounded to 16 or 8 bits; with 32 bits they stay as they are. `coarse` and `fine` are -127 to 127.
//
// 16 bits, one scale per block of 256 columns: x = scale * whole, with whole = 255 * coarse + fine.
// 8 bits, one scale per group of 32 columns: x = scale * (coarse + fine / 254). Only groups with outliers have fine
// numbers.
//
// A block is kBlockGroups groups of columns; the last block may have fewer. The same block of all rows is contiguous,
// so the distance from one row to the next is the same for all matrices.
struct Activations {
    int64_t rows;
    int columns;
    int bits;
    int8_t* coarse;   // [blocks, rows, kBlockGroups, 32], like fine and whole; null: 16 bits, all products of many rows
    int8_t* fine;
    int16_t* whole;   // null if all products are of few rows, or bits are 8
    float* scales;    // [blocks, rows]; for 8 bits [blocks, rows, kBlockGroups]
    float* sums;      // [blocks, rows, kBlockGroups], sums of whole; for 8 bits of the rounded x
    int32_t* halves;  // [blocks, rows, kBlockGroups, 2], sums over half groups, of whole; for 8 bits of coarse
    int32_t* fine_halves;  // the same of fine; only for 8 bits, like fine_groups
    uint8_t* fine_groups;  // [blocks, rows], a bit for each group that has fine numbers
    float* plain;     // [rows, columns], not rounded, if bits are 32; then the other pointers are null

    // The index of a row's first group in a block.
    int64_t place(int64_t row, int block) const { return (block * rows + row) * kBlockGroups; }
};

constexpr int kPlainBits = 32;
constexpr int kLeastColumns = 16;  // columns of plain rows are a multiple of this: the lanes of the widest vector

// Products of fewer than kAlwaysFew rows multiply bytes. Products of at least kAlwaysMany rows multiply whole numbers.
// In between it depends on the format and the instruction set.
constexpr int kAlwaysFew = 16;
constexpr int kAlwaysMany = 48;

constexpr int kCoarseStep = 255;
constexpr int kLargest = 127 * kCoarseStep + 127;  // the whole number of a block's largest magnitude

constexpr int kLargestByte = 127;
constexpr int kFineSteps = 2 * kLargestByte;  // steps of fine in one step of coarse
// A group has fine numbers if the square of its largest number exceeds this share of its block's sum of squares,
// because that number leaves few bits to the group's others. 2 % of SmolLM2's groups have them, which halves the KL
// divergence.
constexpr float kOutlierShare = 0.4f;

enum class FloatType { kFloat32, kFloat16, kBFloat16, kFloat8 };

// One layer's KV cache: [blocks, block_size, 2, kv_heads, head_dim]. With 8-bit floats (e4m3) each key and each value
// of a head has a scale, a power of 2: bfloat16 [blocks, kv_heads, block_size, 2], the key's scale first.
struct CacheView {
    void* data;
    FloatType type;
    int64_t blocks;
    int64_t block_size;
    int kv_heads;
    int head_dim;
    uint16_t* scales;  // null unless the type is 8-bit floats
    bool is_latent = false;  // [blocks, block_size, 1, 1, head_dim]: a token's one vector is both key and value

    uint16_t* scales_of(int64_t slot, int head) const {
        return scales + ((slot / block_size * kv_heads + head) * block_size + slot % block_size) * 2;
    }
};

// How the queries and keys of one token are normed and rotated (RoPE), and its keys and values stored.
struct RopeStore {
    int num_heads;
    bool has_keys;        // false: there are only queries, and nothing is stored
    const float* q_norm;  // [head_dim], or [heads, head_dim] if all heads are normed as one; null: no norm
    const float* k_norm;
    const float* v_norm;  // [head_dim], or null
    bool norms_all_heads;
    float eps;
    const float* rotary;  // [max_len, rotary_dim], cosines and then sines; null: heads are neither normed nor rotated
    int rotary_dim;       // how many of a head's numbers are rotated
    bool is_interleaved;  // pairs are the numbers 2i and 2i + 1 instead of i and i + rotary_dim / 2
    const float* query_scale;  // [max_len], factors of the finished queries; null: none
};

// How gate and up are combined: activation(gate) * up. kClamped: (up + 1) * gate * sigmoid(alpha * gate), with gates
// clamped to at most `limit` and ups to -limit ... limit.
enum class Activation { kSilu, kGeluTanh, kClamped };

struct Gating {
    Activation activation = Activation::kSilu;
    float alpha = 0.0f, limit = 0.0f;
};

// Attention of some of a request's new tokens, for the query heads of one key-value head, to a range of keys.
struct AttentionTask {
    const float* query;  // the first token's first head
    int64_t query_stride;  // from token to token
    float* out;            // like query
    int64_t out_stride;
    int tokens;
    int heads;           // query heads that share the key-value head
    int kv_head;
    int64_t position;    // of the first token in its request
    const int64_t* blocks;  // the request's block table
    int64_t first_key, end_key;  // first_key is a multiple of kSplit
    float scale;
    int64_t window;      // 0: none
    float cap;           // scores become cap * tanh(score / cap); 0: no cap
    const float* sinks;  // [heads], scores of a virtual key without a value; null: none
    float* partial;  // results before normalisation, [tokens * heads, partial_size]; null: normalise and write to out
};

constexpr int kTileTokens = 16;  // the most tokens of an AttentionTask
constexpr int kSplit = 256;      // keys per split; splits are summed apart and then merged, so threads can share a row

// A causal convolution followed by silu, in place, for some channels of some of a request's tokens.
struct ConvTask {
    float* channels;       // the first token's
    int64_t stride;        // from token to token
    int64_t tokens;
    int count, width;      // number of channels; width of the convolution, at most kMaxConvWidth
    const float* weight;   // [width, weight_stride], oldest token first
    int64_t weight_stride;
    const float* source;   // [count, width - 1], the inputs before the first token; null: zeros
    float* target;         // likewise, receives the last inputs; null: they are not kept
};

// The gated delta rule of one head for some tokens of a request; infinilm/kernels/delta_rule.py defines it.
struct DeltaTask {
    const float *query, *key;    // the first token's
    float* value;                // likewise; overwritten by the result
    const float *decay, *rate;   // likewise, one number each; the state is multiplied by the decay
    int64_t stride;              // from token to token, for all of the above
    int64_t tokens;
    int key_dim, value_dim;      // key_dim at most kMaxKeyDim
    const float* source;         // [key_dim, value_dim], the state before the first token; null: zeros
    float* target;               // likewise, receives the state after the last token; null: it is not kept
};

// Latent attention of some heads of some of a request's new tokens. A token sees all tokens up to itself.
struct LatentTask {
    const float* query;      // the first of these heads of the first token; [tokens, all_heads, head_dim of the cache]
    float* out;              // likewise [tokens, all_heads, rank]
    int tokens, heads;       // tokens * heads is at most kMaxLatentRows
    int all_heads, rank;
    int64_t position;        // of the first token
    const int64_t* blocks;   // the request's block table
    float scale;
};

// A matrix of floats of any type.
struct FloatMatrix {
    const void* numbers;  // [inputs, outputs]; [outputs, inputs] in a table
    FloatType type;
    int inputs, outputs;
    int64_t stride;       // from input to input; from output to output in a table
    bool is_table = false;
    const float* scales = nullptr;  // [groups of inputs, outputs], factors; null: none. Tables have no scales
    int64_t scale_stride = 0;
    int group = 0;        // inputs in a group: all, or a multiple of kFloatRun
};

// The product of float32 rows and a FloatMatrix.
struct FloatProduct {
    FloatMatrix matrix;
    const float* x;       // [rows, inputs]
    int64_t rows;
    float* out;           // [rows, outputs]
    int64_t out_stride;
};

constexpr int kFloatRun = 32;  // inputs that are summed before their scale is applied

// Up to this many rows a product is limited by reading memory.
constexpr int kFewFloatRows = 24;

// The parameters of a draw. A token's score comes from its logit and a hash of the token and the draw's key.
struct Contest {
    bool is_greedy;
    uint32_t upper, lower;  // halves of the key
    float rate;             // converts logits to bits: log2(e) / temperature
    float cutoff;           // tokens with a smaller logit can't be drawn
};

constexpr float kUlp = 0x1p-23f;
constexpr float kWeightUnits = 0x1p40f;  // the integer that stands for a row's greatest probability

struct Kernels {
    const char* name;

    // Round a row of x, after the norm if there is a weight.
    void (*quantize)(const float* x, int64_t stride, const float* norm, float eps, int row, const Activations& out);
    // Combine a row [gate, up], see Activation, and round the result.
    void (*gate_quantize)(const float* gate_up, int64_t stride, const Gating& gating, int row, const Activations& out);
    // hidden += scale * x; x is normed first if there is a norm.
    void (*add_normed)(const float* x, const float* norm, float eps, float scale, int columns, float* hidden);
    // out[i] = the sum over columns of x[column] * weight[column, i], in their order.
    void (*score)(const float* x, const float* weight, int columns, int count, float* out);
    // out[i] = activation(x[i]); not for kClamped.
    void (*activate_all)(const float* x, int count, Activation activation, float* out);
    void (*rms_norm)(const float* x, const float* weight, float eps, int columns, float* out);
    // out[row, 16 panel ...] = or += x[row] W^T (+ bias) for some panels and some rows, at most kMaxTaskRows.
    void (*multiply)(const PackedMatrix& w, const Activations& x, int first_row, int end_row, int first_panel,
                     int end_panel, const float* bias, float* out, int64_t out_stride, bool accumulate);
    // qkv: one token's heads [heads of q, k and v, head_dim]. Keys and values are stored in `slot` unless it is
    // negative.
    void (*rope_store)(float* qkv, int64_t position, int64_t slot, const RopeStore& how, const CacheView& cache);
    void (*attend)(const AttentionTask& task, const CacheView& cache);
    // Merge the partial results of a row's splits: [splits, stride] floats to out [head_dim]. The sink may be null.
    void (*merge)(const float* partials, int64_t stride, int splits, int head_dim, const float* sink, float* out);
    int (*partial_size)(int head_dim);  // floats per row of AttentionTask::partial
    void (*convolve)(const ConvTask& task);
    // Scale each of the heads [heads, dim] to that length.
    void (*normalize_heads)(float* x, int heads, int dim, float length);
    void (*delta_rule)(const DeltaTask& task);
    // x [heads, dim] *= sigmoid(gate); with a norm [dim]: x = norm(x) * silu(gate), each head normed by itself.
    void (*gate_heads)(float* x, const float* gate, const float* norm, float eps, int heads, int dim);
    void (*turn_head)(float* head, const float* angles, const RopeStore& how);
    // Norm the first `rank` numbers of a latent vector by k_norm, rotate the others, and store it unless `slot` is
    // negative.
    void (*store_latent)(float* latent, int rank, int64_t position, int64_t slot, const RopeStore& how,
                         const CacheView& cache);
    void (*attend_latents)(const LatentTask& task, const CacheView& cache);
    // out[i] = the sum over columns of x[column] * weight[i, column].
    void (*dots)(const float* x, const float* weight, int columns, int count, float* out);
    // A block's greatest logit, or +infinity if one is NaN, and an upper bound of its tokens' scores.
    void (*scan)(const float* logits, int count, uint32_t first_token, const Contest& contest, float* maximum,
                 float* bound);
    // Compute some rows and outputs of a product. The caller sets `out` to 0 before. The second one is for tables.
    void (*multiply_floats)(const FloatProduct& product, int64_t row, int64_t end_row, int output, int end_output);
    void (*multiply_float_table)(const FloatProduct& product, int64_t row, int64_t end_row, int output, int end_output);
    // Probabilities as integers, in units of 1 / kWeightUnits of the greatest.
    void (*weigh)(const float* logits, int count, float row_max, float temperature, int64_t* weights);
};

constexpr int kTaskUnit = 12;       // rows: a multiple of the rows that are multiplied at a time
constexpr int kMaxTaskRows = 264;   // a multiple of kTaskUnit
constexpr int kMaxHeadDim = 512;
constexpr int kMaxKeyDim = 256;  // delta nets
constexpr int kMaxConvWidth = 8;
constexpr int kMaxLatentDim = 1024;
constexpr int kMaxLatentRows = 16;
constexpr int kMaxGroupHeads = 64;  // query heads of one key-value head

}  // namespace infinilm
