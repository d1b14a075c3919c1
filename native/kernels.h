// What is compiled for several instruction sets, and the data it works on. No threads here, no memory taken.
#pragma once

#include <cstdint>

#include "format.h"

namespace infinilm {

// Rows of floats, rounded to 16 bits or to 8, unless bits are 32, with coarse and fine from -127 to 127.
//
// 16 bits by blocks of 256 columns: x = scale * whole, with whole = 255 * coarse + fine.
// 8 bits by groups of 32 columns: x = scale * (coarse + fine / 254), with fine numbers in groups with outliers only.
//
// A block is kBlockGroups groups of columns; the last may have fewer. A block of all rows lies together, so that from a
// row to the next it is a fixed distance, whatever the matrix.
struct Activations {
    int64_t rows;
    int columns;
    int bits;
    int8_t* coarse;   // [blocks, rows, kBlockGroups, 32], like fine and whole; null where 16 bits are for many rows only
    int8_t* fine;
    int16_t* whole;   // null where all products are of few rows, or bits are 8
    float* scales;    // [blocks, rows], or of 8 bits [blocks, rows, kBlockGroups]
    float* sums;      // [blocks, rows, kBlockGroups], sums of whole, or of 8 bits of x as it is rounded
    int32_t* halves;  // [blocks, rows, kBlockGroups, 2], sums of halves of groups: of whole, or of 8 bits of coarse
    int32_t* fine_halves;  // likewise of fine, for 8 bits, like the rest
    uint8_t* fine_groups;  // [blocks, rows], a bit for each group that has fine numbers
    float* plain;     // [rows, columns], if bits are 32: nothing is rounded, and there is nothing else

    // The first group of a row in a block.
    int64_t place(int64_t row, int block) const { return (block * rows + row) * kBlockGroups; }
};

constexpr int kPlainBits = 32;
constexpr int kLeastColumns = 16;  // of plain rows, a multiple: the widest vector's

// Products of fewer rows than the first multiply bytes, those of at least the second multiply whole numbers. In between it
// depends on the format and the instruction set.
constexpr int kAlwaysFew = 16;
constexpr int kAlwaysMany = 48;

constexpr int kCoarseStep = 255;
constexpr int kLargest = 127 * kCoarseStep + 127;  // what a block's largest number becomes

constexpr int kLargestByte = 127;
constexpr int kFineSteps = 2 * kLargestByte;  // of fine in one of coarse
// A group has fine numbers if its largest number has more than this share of its block's sum of squares: that number would
// leave few bits to the others. Of SmolLM2's groups 2 % do, and the KL divergence is half of what it were without.
constexpr float kOutlierShare = 0.4f;

enum class FloatType { kFloat32, kFloat16, kBFloat16, kFloat8 };

// One layer's KV cache: [blocks, block_size, 2, kv_heads, head_dim]. 8-bit floats (e4m3) have a scale for each head of
// each token, a power of 2: bfloat16 [blocks, kv_heads, block_size, 2], a key's followed by its value's.
struct CacheView {
    void* data;
    FloatType type;
    int64_t blocks;
    int64_t block_size;
    int kv_heads;
    int head_dim;
    uint16_t* scales;  // null, unless numbers are 8-bit floats
    bool is_latent = false;  // [blocks, block_size, 1, 1, head_dim]: a token has one vector, key and value at once

    uint16_t* scales_of(int64_t slot, int head) const {
        return scales + ((slot / block_size * kv_heads + head) * block_size + slot % block_size) * 2;
    }
};

// Norming and turning queries and keys of one token, and storing key and value.
struct RopeStore {
    int num_heads;
    bool has_keys;        // otherwise there are only queries, and nothing is stored
    const float* q_norm;  // [head_dim], or [heads, head_dim] if heads are normed as one; null: they are not normed
    const float* k_norm;
    const float* v_norm;  // [head_dim], or null
    bool norms_all_heads;
    float eps;
    const float* rotary;  // [max_len, rotary_dim], cosines and then sines; null: heads are neither normed nor turned
    int rotary_dim;       // how many of a head's numbers are turned
    bool is_interleaved;  // pairs are neighbours: numbers 2i and 2i + 1 instead of i and i + rotary_dim / 2
    const float* query_scale;  // [max_len], what queries are multiplied by in the end; null: nothing
};

// What becomes of a gate and what it is for: activation(gate) * up; or, clamped, (up + 1) * gate * sigmoid(alpha * gate),
// with gates of at most `limit`, and ups from -limit to limit.
enum class Activation { kSilu, kGeluTanh, kClamped };

struct Gating {
    Activation activation = Activation::kSilu;
    float alpha = 0.0f, limit = 0.0f;
};

// Some of a request's new tokens, the query heads of one key-value head, and the keys they are attended to.
struct AttentionTask {
    const float* query;  // the first token's first head
    int64_t query_stride;  // from token to token
    float* out;            // like query
    int64_t out_stride;
    int tokens;
    int heads;           // that share the key-value head
    int kv_head;
    int64_t position;    // of the first token in its request
    const int64_t* blocks;  // the request's
    int64_t first_key, end_key;  // a multiple of kSplit; any
    float scale;
    int64_t window;      // 0: none
    float cap;           // scores are cap * tanh(score / cap); 0: they are not bounded
    const float* sinks;  // [heads], scores of a key without a value; null: none
    float* partial;  // null: normalise, and write to out; else [tokens * heads, partial_size]
};

constexpr int kTileTokens = 16;  // of an AttentionTask, at most
constexpr int kSplit = 256;      // keys after which a row's sums are put aside and merged, so that others can help

// A causal convolution with silu, in place, of some channels of some tokens of a request.
struct ConvTask {
    float* channels;       // the first token's
    int64_t stride;        // from token to token
    int64_t tokens;
    int count, width;      // of channels; of the convolution, at most kMaxConvWidth
    const float* weight;   // [width, weight_stride], the oldest token's first
    int64_t weight_stride;
    const float* source;   // [count, width - 1], the inputs before; null: zeros
    float* target;         // where those at the end go; null: nowhere
};

// The gated delta rule of one head for some tokens of a request; infinilm/kernels/delta_rule.py says what it is.
struct DeltaTask {
    const float *query, *key;    // the first token's
    float* value;                // likewise; the result takes its place
    const float *decay, *rate;   // likewise, one each; the decay is what the state is multiplied by
    int64_t stride;              // of all of them, from token to token
    int64_t tokens;
    int key_dim, value_dim;      // key_dim at most kMaxKeyDim
    const float* source;         // [key_dim, value_dim], the state before; null: zeros
    float* target;               // where that at the end goes; null: nowhere
};

// Some heads of some of a request's new tokens, which see all tokens up to their own.
struct LatentTask {
    const float* query;      // the first token's first of these heads; [tokens, all_heads, head_dim of the cache]
    float* out;              // likewise [tokens, all_heads, rank]
    int tokens, heads;       // tokens * heads is at most kMaxLatentRows
    int all_heads, rank;
    int64_t position;        // of the first token
    const int64_t* blocks;   // the request's
    float scale;
};

// A matrix of floats of any type.
struct FloatMatrix {
    const void* numbers;  // [inputs, outputs]; a table's [outputs, inputs]
    FloatType type;
    int inputs, outputs;
    int64_t stride;       // from input to input; a table's from output to output
    bool is_table = false;
    const float* scales = nullptr;  // [groups of inputs, outputs], what a number is multiplied by; null: nothing. Not of tables
    int64_t scale_stride = 0;
    int group = 0;        // inputs of a group: all, or a multiple of kFloatRun
};

// Its product with float32 rows.
struct FloatProduct {
    FloatMatrix matrix;
    const float* x;       // [rows, inputs]
    int64_t rows;
    float* out;           // [rows, outputs]
    int64_t out_stride;
};

constexpr int kFloatRun = 32;  // inputs that are summed before their scale is applied

// Up to so many rows memory is what a product waits for.
constexpr int kFewFloatRows = 24;

// What decides a draw: a hash of the token and the key's halves, and its logit, times the rate to have bits.
struct Contest {
    bool is_greedy;
    uint32_t upper, lower;
    float rate;
    float cutoff;  // tokens with a smaller logit are out
};

constexpr float kUlp = 0x1p-23f;
constexpr float kWeightUnits = 0x1p40f;  // of a row's greatest probability

struct Kernels {
    const char* name;

    // Round a row of x, after the norm if there is a weight.
    void (*quantize)(const float* x, int64_t stride, const float* norm, float eps, int row, const Activations& out);
    // Round what becomes of a row [gate, up].
    void (*gate_quantize)(const float* gate_up, int64_t stride, const Gating& gating, int row, const Activations& out);
    // hidden += scale * x, with x after the norm if there is a weight.
    void (*add_normed)(const float* x, const float* norm, float eps, float scale, int columns, float* hidden);
    // out[i] = the sum over columns of x[column] * weight[column, i], in their order.
    void (*score)(const float* x, const float* weight, int columns, int count, float* out);
    // out[i] = activation(x[i]), which is not clamped.
    void (*activate_all)(const float* x, int count, Activation activation, float* out);
    void (*rms_norm)(const float* x, const float* weight, float eps, int columns, float* out);
    // out[row, 16 panel ...] = or += x[row] W^T (+ bias) for some rows, at most kMaxTaskRows, and panels.
    void (*multiply)(const PackedMatrix& w, const Activations& x, int first_row, int end_row, int first_panel,
                     int end_panel, const float* bias, float* out, int64_t out_stride, bool accumulate);
    // qkv: one token's heads [heads of q, k and v, head_dim]; keys and values go to slot, unless it is negative.
    void (*rope_store)(float* qkv, int64_t position, int64_t slot, const RopeStore& how, const CacheView& cache);
    void (*attend)(const AttentionTask& task, const CacheView& cache);
    // Put the partial results of a row's splits together: [splits, stride] floats to out [head_dim]. A sink may be null.
    void (*merge)(const float* partials, int64_t stride, int splits, int head_dim, const float* sink, float* out);
    int (*partial_size)(int head_dim);  // floats that a row takes in AttentionTask::partial
    void (*convolve)(const ConvTask& task);
    // Make heads [heads, dim] vectors of that length.
    void (*normalize_heads)(float* x, int heads, int dim, float length);
    void (*delta_rule)(const DeltaTask& task);
    // x [heads, dim] *= sigmoid(gate); or x = norm(x) * silu(gate), each head normed, if there is a weight [dim].
    void (*gate_heads)(float* x, const float* gate, const float* norm, float eps, int heads, int dim);
    void (*turn_head)(float* head, const float* angles, const RopeStore& how);
    // Norm the first `rank` numbers of a latent vector by k_norm, turn the others, and store it, unless slot is negative.
    void (*store_latent)(float* latent, int rank, int64_t position, int64_t slot, const RopeStore& how,
                         const CacheView& cache);
    void (*attend_latents)(const LatentTask& task, const CacheView& cache);
    // out[i] = the sum over columns of x[column] * weight[i, column].
    void (*dots)(const float* x, const float* weight, int columns, int count, float* out);
    // A block's greatest logit, +infinity if one is NaN, and what the scores of its tokens can't exceed.
    void (*scan)(const float* logits, int count, uint32_t first_token, const Contest& contest, float* maximum,
                 float* bound);
    // Add some rows and outputs of a product to `out`, which is 0; of a table's.
    void (*multiply_floats)(const FloatProduct& product, int64_t row, int64_t end_row, int output, int end_output);
    void (*multiply_float_table)(const FloatProduct& product, int64_t row, int64_t end_row, int output, int end_output);
    // Probabilities, as integers.
    void (*weigh)(const float* logits, int count, float row_max, float temperature, int64_t* weights);
};

constexpr int kTaskUnit = 12;       // rows: a multiple of those that are multiplied at a time
constexpr int kMaxTaskRows = 264;   // a multiple of kTaskUnit
constexpr int kMaxHeadDim = 512;
constexpr int kMaxKeyDim = 256;  // of a delta net
constexpr int kMaxConvWidth = 8;
constexpr int kMaxLatentDim = 1024;
constexpr int kMaxLatentRows = 16;
constexpr int kMaxGroupHeads = 64;  // query heads of one key-value head

}  // namespace infinilm
