// The Python module infinilm._native. It checks arguments and releases the GIL while the kernels run.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>

#include "bpe_module.h"
#include "decoder.h"
#include "delta_net.h"
#include "dense.h"
#include "dispatch.h"
#include "experts.h"
#include "latent.h"
#include "logprobs.h"
#include "run.h"
#include "sampling.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace infinilm {
namespace {

template <typename T, size_t kDims>
using Array = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
using Floats1 = Array<const float, 1>;
using Ints1 = Array<const int64_t, 1>;
// Rows may have any stride; the contents of a row are contiguous.
using Rows2 = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Rows3 = nb::ndarray<float, nb::ndim<3>, nb::device::cpu>;
using Rows4 = nb::ndarray<float, nb::ndim<4>, nb::device::cpu>;
using AnyArray = nb::ndarray<nb::device::cpu>;

void require(bool is_true, const std::string& message) {
    if (!is_true) throw std::invalid_argument(message);
}

// An optional array's data, or null. Checks its length.
const float* vector_or_null(const std::optional<Floats1>& array, size_t length, const char* name) {
    if (!array) return nullptr;
    require(array->size() == length, std::string(name) + " must have " + std::to_string(length) + " numbers");
    return array->data();
}

void check_rows(const Matrix& matrix, const Ints1& rows) {
    for (size_t i = 0; i < rows.size(); ++i) {
        require(rows.data()[i] >= 0 && rows.data()[i] < matrix.view().rows, "a row lies outside of the matrix");
    }
}

FloatType float_type(const AnyArray& array) {
    if (array.dtype() == nb::dtype<float>()) return FloatType::kFloat32;
    if (array.dtype().bits == 16 && array.dtype().code == uint8_t(nb::dlpack::dtype_code::Float)) return FloatType::kFloat16;
    const bool is_bfloat = array.dtype().bits == 16 && array.dtype().code == uint8_t(nb::dlpack::dtype_code::Bfloat);
    if (is_bfloat || array.dtype() == nb::dtype<uint16_t>()) return FloatType::kBFloat16;  // NumPy: only its bits
    if (array.dtype() == nb::dtype<uint8_t>()) return FloatType::kFloat8;
    throw std::invalid_argument("floats must be float32, float16, bfloat16, or uint8 with the codes of 8-bit floats");
}

void require_contiguous(const AnyArray& array) {
    int64_t expected = 1;
    for (size_t d = array.ndim(); d-- > 0; expected *= array.shape(d)) {
        require(array.stride(d) == expected || array.shape(d) == 1, "a cache or a matrix must be contiguous");
    }
}

// One layer's cache [blocks, block_size, 2, kv_heads, head_dim], with the scales of 8-bit floats.
CacheView view_cache(const AnyArray& cache, const std::optional<AnyArray>& scales) {
    require(cache.ndim() == 5 && cache.shape(2) == 2, "a cache has the shape [blocks, block_size, 2, kv_heads, head_dim]");
    require_contiguous(cache);
    require(cache.shape(4) <= kMaxHeadDim, "head_dim must not exceed " + std::to_string(kMaxHeadDim));
    const FloatType type = float_type(cache);
    require(scales.has_value() == (type == FloatType::kFloat8), "8-bit floats, and no other types, have scales");
    if (scales) {
        require(scales->ndim() == 4 && scales->shape(0) == cache.shape(0) && scales->shape(1) == cache.shape(3) &&
                    scales->shape(2) == cache.shape(1) && scales->shape(3) == 2 &&
                    float_type(*scales) == FloatType::kBFloat16,
                "scales must be bfloat16 [blocks, kv_heads, block_size, 2]");
        require_contiguous(*scales);
    }
    return {cache.data(),
            type,
            int64_t(cache.shape(0)),
            int64_t(cache.shape(1)),
            int(cache.shape(3)),
            int(cache.shape(4)),
            scales ? static_cast<uint16_t*>(scales->data()) : nullptr};
}

// A layer's latent vectors [blocks, block_size, 1, 1, dim].
CacheView view_latents(const AnyArray& cache) {
    require_contiguous(cache);
    require(cache.shape(3) == 1 && cache.shape(4) <= kMaxLatentDim,
            "latent vectors are [blocks, block_size, 1, 1, up to " + std::to_string(kMaxLatentDim) + "]");
    const FloatType type = float_type(cache);
    require(type != FloatType::kFloat8, "latent vectors can't be 8-bit floats");
    return {cache.data(), type, int64_t(cache.shape(0)), int64_t(cache.shape(1)), 1, int(cache.shape(4)), nullptr, true};
}

// A recurrent layer's states; see StateView. An extra last block is scratch for states that are not kept; it has no
// entry in `ends`.
StateView view_states(const std::vector<AnyArray>& arrays, int64_t block_size) {
    require(arrays.size() == 3, "states are three arrays: memory, inputs and ends");
    const AnyArray &memory = arrays[0], &inputs = arrays[1], &ends = arrays[2];
    for (const AnyArray& each : arrays) require_contiguous(each);
    require(memory.ndim() == 4 && inputs.ndim() == 3 && ends.ndim() == 1 && memory.dtype() == nb::dtype<float>() &&
                inputs.dtype() == nb::dtype<float>() && ends.dtype() == nb::dtype<int64_t>() &&
                memory.shape(0) == inputs.shape(0) && memory.shape(0) >= ends.shape(0),
            "states are float32 [blocks, heads, key_dim, value_dim] and [blocks, channels, width], and int64 [blocks]");
    require(block_size > 0, "a cache with states needs a block_size");
    return {static_cast<float*>(memory.data()),
            static_cast<float*>(inputs.data()),
            static_cast<int64_t*>(ends.data()),
            int64_t(ends.shape(0)),
            block_size,
            int(memory.shape(1)),
            int(memory.shape(2)),
            int(memory.shape(3)),
            int(inputs.shape(1)),
            int(inputs.shape(2))};
}

// The caches of a decoder's layers. Keeps their arrays alive.
struct PyCache {
    using Arrays = std::variant<AnyArray, std::vector<AnyArray>>;
    std::vector<Arrays> arrays;
    std::vector<AnyArray> scales;
    std::vector<LayerCache> layers;

    PyCache(std::vector<Arrays> arrays_, std::vector<AnyArray> scales_, int64_t block_size)
        : arrays(std::move(arrays_)), scales(std::move(scales_)) {
        size_t attending = 0;
        for (const Arrays& each : arrays) {
            if (const auto* states = std::get_if<std::vector<AnyArray>>(&each)) {
                layers.emplace_back(view_states(*states, block_size));
            } else if (const AnyArray& own = std::get<AnyArray>(each); own.ndim() == 5 && own.shape(2) == 1) {
                layers.emplace_back(view_latents(own));
            } else {
                require(scales.empty() || attending < scales.size(), "all layers must have scales, or none");
                layers.emplace_back(view_cache(own, scales.empty() ? std::nullopt : std::optional(scales[attending])));
                ++attending;
            }
        }
        require(scales.empty() || attending == scales.size(), "all layers must have scales, or none");
    }
};

// A step that keeps its arrays alive.
struct PyStep {
    Ints1 positions, slots;
    Array<const int64_t, 2> block_tables;
    Ints1 query_lens, context_lens;
    std::optional<Ints1> last_lens;
    Step step;

    PyStep(Ints1 positions_, Ints1 slots_, Array<const int64_t, 2> tables, Ints1 query_lens_, Ints1 context_lens_)
        : positions(positions_), slots(slots_), block_tables(tables), query_lens(query_lens_), context_lens(context_lens_) {
        require(slots.size() == positions.size(), "positions and slots must be as many");
        require(block_tables.shape(0) == query_lens.size() && context_lens.size() == query_lens.size(),
                "block_tables, query_lens and context_lens must have a row for each request");
        step = {int64_t(positions.size()), int64_t(query_lens.size()), int64_t(block_tables.shape(1)),
                positions.data(),          slots.data(),               block_tables.data(),
                query_lens.data(),         context_lens.data()};
    }

    PyStep only_last(Ints1 lens) const {
        require(lens.size() == query_lens.size(), "last_lens must have a number for each request");
        for (size_t n = 0; n < lens.size(); ++n) {
            require(lens.data()[n] >= 0 && lens.data()[n] <= query_lens.data()[n],
                    "last_lens must be 0 to the request's new tokens");
        }
        PyStep other = *this;
        other.last_lens = lens;
        other.step.last_lens = lens.data();
        return other;
    }
};

struct PyLinear {
    std::optional<Floats1> bias;
    std::shared_ptr<const Linear> linear;

    PyLinear(std::vector<std::shared_ptr<const Matrix>> matrices, std::optional<Floats1> bias_) : bias(bias_) {
        size_t rows = 0;
        for (const auto& matrix : matrices) rows += matrix->view().rows;
        const float* numbers = vector_or_null(bias, rows, "bias");
        linear = std::make_shared<Linear>(std::move(matrices), numbers);
    }

    void multiply(Array<const float, 2> x, Array<float, 2> out, bool accumulate) const {
        require(int(x.shape(1)) == linear->in_features() && int(out.shape(1)) == linear->out_features() &&
                    x.shape(0) == out.shape(0),
                "x must be [T, " + std::to_string(linear->in_features()) + "] and out [T, " +
                    std::to_string(linear->out_features()) + "]");
        nb::gil_scoped_release release;
        linear->multiply(x.data(), int64_t(x.shape(0)), out.data(), accumulate);
    }
};

Gating find_gating(const std::string& activation, float alpha = 0.0f, float limit = 0.0f) {
    if (activation == "silu") return {Activation::kSilu};
    if (activation == "gelu_pytorch_tanh") return {Activation::kGeluTanh};
    require(activation == "clamped" && limit > 0.0f,
            "activation='" + activation + "' must be silu or gelu_pytorch_tanh, or of experts clamped with a positive limit");
    return {Activation::kClamped, alpha, limit};
}

struct PyExperts {
    std::vector<PyLinear> linears;  // keep their biases alive
    std::shared_ptr<const Experts> experts;

    PyExperts(const std::vector<PyLinear>& gate_up, const std::vector<PyLinear>& down, const std::string& activation,
              float alpha, float limit)
        : linears(gate_up) {
        linears.insert(linears.end(), down.begin(), down.end());
        std::vector<std::shared_ptr<const Linear>> first, second;
        for (const PyLinear& each : gate_up) first.push_back(each.linear);
        for (const PyLinear& each : down) second.push_back(each.linear);
        experts = std::make_shared<Experts>(std::move(first), std::move(second), find_gating(activation, alpha, limit));
    }

    void mix(Array<const float, 2> x, Array<const int32_t, 2> ids, Array<const float, 2> weights, Array<float, 2> out,
             bool accumulate) const {
        const size_t rows = x.shape(0), size = size_t(experts->hidden());
        require(x.shape(1) == size && out.shape(1) == size && out.shape(0) == rows,
                "x and out must be [T, " + std::to_string(size) + "]");
        require(ids.shape(0) == rows && weights.shape(0) == rows && ids.shape(1) == weights.shape(1),
                "ids and weights must be [T, k]");
        for (size_t i = 0; i < ids.size(); ++i) {
            require(ids.data()[i] >= 0 && ids.data()[i] < experts->count(), "there is no such expert");
        }
        nb::gil_scoped_release release;
        experts->mix(x.data(), int64_t(rows), ids.data(), weights.data(), int(ids.shape(1)), out.data(), accumulate);
    }
};

void score_py(Array<const float, 2> x, Array<const float, 2> weight, Array<float, 2> out) {
    require(x.shape(1) == weight.shape(0) && out.shape(0) == x.shape(0) && out.shape(1) == weight.shape(1),
            "x must be [T, in], weight [in, out] and out [T, out]");
    nb::gil_scoped_release release;
    const int columns = int(weight.shape(0)), count = int(weight.shape(1));
    parallel_for(int64_t(x.shape(0)), 1, [&](int64_t t) {
        kernels().score(x.data() + t * columns, weight.data(), columns, count, out.data() + t * count);
    });
}

void activate_py(Rows2 x, Array<float, 2> out, const std::string& activation) {
    const Gating gating = find_gating(activation);
    const int64_t rows = int64_t(x.shape(0)), columns = int64_t(x.shape(1));
    require(int64_t(out.shape(0)) == rows && int64_t(out.shape(1)) == columns && (rows == 0 || x.stride(1) == 1 || columns == 1),
            "x and out must be [T, n], contiguous but for T");
    nb::gil_scoped_release release;
    parallel_for(rows, 4, [&](int64_t t) {
        kernels().activate_all(x.data() + t * x.stride(0), int(columns), gating.activation, out.data() + t * columns);
    });
}

void rms_norm_py(Rows2 x, Floats1 weight, Array<float, 2> out, float eps) {
    const int64_t rows = int64_t(x.shape(0));
    const int columns = int(x.shape(1));
    require(int64_t(out.shape(0)) == rows && int(out.shape(1)) == columns && int(weight.size()) == columns &&
                (rows == 0 || x.stride(1) == 1 || columns == 1),
            "x and out must be [T, n], contiguous but for T, and weight [n]");
    nb::gil_scoped_release release;
    parallel_for(rows, 4, [&](int64_t t) {
        kernels().rms_norm(x.data() + t * x.stride(0), weight.data(), eps, columns, out.data() + t * columns);
    });
}

// A matrix [in, out]. Lines may have any stride.
FloatMatrix view_floats(const AnyArray& weight, const std::optional<AnyArray>& scales) {
    require(weight.ndim() == 2 && (weight.stride(1) == 1 || weight.shape(1) == 1), "weight must be [in, out], of numbers in a row");
    FloatMatrix matrix{weight.data(), float_type(weight), int(weight.shape(0)), int(weight.shape(1)), weight.stride(0)};
    require(scales.has_value() == (matrix.type == FloatType::kFloat8), "8-bit floats, and no other types, have scales");
    if (scales) {
        require(scales->ndim() == 2 && scales->dtype() == nb::dtype<float>() && scales->shape(0) > 0 &&
                    int(scales->shape(1)) == matrix.outputs && (scales->stride(1) == 1 || scales->shape(1) == 1),
                "scales must be float32 [groups, out]");
        const int groups = int(scales->shape(0));
        require(matrix.inputs % groups == 0 && (groups == 1 || matrix.inputs / groups % kFloatRun == 0),
                "a group of scales must be a multiple of 32 inputs or all");
        matrix.scales = static_cast<const float*>(scales->data());
        matrix.scale_stride = scales->stride(0);
        matrix.group = matrix.inputs / groups;
    }
    return matrix;
}

// A matrix of floats that keeps its arrays alive.
std::shared_ptr<Matrix> keep_floats(const AnyArray& weight, const std::optional<AnyArray>& scales) {
    auto arrays = std::make_pair(weight, scales);
    return std::shared_ptr<Matrix>(new Matrix(view_floats(weight, scales)), [arrays](Matrix* matrix) { delete matrix; });
}

void multiply_dense_py(Array<const float, 2> x, const AnyArray& weight, Array<float, 2> out, bool is_table,
                       const std::optional<AnyArray>& scales) {
    FloatMatrix matrix = view_floats(weight, scales);
    if (is_table) {
        require(!scales, "a table has no scales");
        matrix.is_table = true;
        std::swap(matrix.inputs, matrix.outputs);
    }
    const int64_t rows = int64_t(x.shape(0));
    require(int(x.shape(1)) == matrix.inputs && int64_t(out.shape(0)) == rows && int(out.shape(1)) == matrix.outputs,
            "x must be [T, in], weight [in, out], or of a table [out, in], and out [T, out]");
    nb::gil_scoped_release release;
    multiply_dense({{{matrix, x.data(), rows, out.data(), matrix.outputs}}});
}

// A token mixer, and the objects that it keeps alive.
struct PyTokenMixer {
    std::vector<PyLinear> linears;
    std::vector<std::optional<Floats1>> vectors;
    std::vector<Array<const float, 2>> tables;
    std::shared_ptr<const TokenMixer> mixer;
};

struct PyAttention : PyTokenMixer {
    PyAttention(const PyLinear& qkv, const PyLinear& out, int num_heads, int num_kv_heads, int head_dim,
                Array<const float, 2> rotary, bool is_interleaved, std::optional<Floats1> query_scale,
                std::optional<Floats1> q_norm, std::optional<Floats1> k_norm, float eps, float scale,
                std::optional<int64_t> window, std::optional<float> cap, std::optional<Floats1> sinks,
                std::optional<Floats1> v_norm, bool has_gates) {
        linears = {qkv, out}, vectors = {query_scale, q_norm, k_norm, v_norm, sinks}, tables = {rotary};
        require(num_kv_heads > 0 && num_heads % num_kv_heads == 0 && num_heads / num_kv_heads <= kMaxGroupHeads,
                "num_heads must be a multiple of num_kv_heads, at most " + std::to_string(kMaxGroupHeads) + " times");
        require(head_dim <= kMaxHeadDim, "head_dim must be at most " + std::to_string(kMaxHeadDim));
        const int rotary_dim = int(rotary.shape(1));
        require(rotary_dim % 2 == 0 && rotary_dim <= head_dim, "rotary must be [max_len, an even number up to head_dim]");
        const bool has_keys = qkv.linear->out_features() != num_heads * head_dim;
        const int heads = (has_gates ? 2 : 1) * num_heads + 2 * num_kv_heads;
        require((has_keys || !has_gates) && (!has_keys || qkv.linear->out_features() == heads * head_dim) &&
                    out.linear->in_features() == num_heads * head_dim &&
                    out.linear->out_features() == qkv.linear->in_features(),
                "the weights of qkv and out do not fit the heads or each other");
        require(!window || *window > 0, "window must be positive");
        require(!cap || *cap > 0.0f, "cap must be positive");
        // Norm weights have the size of one head, or of all heads, which are then normed as one.
        const bool norms_all_heads = q_norm && int(q_norm->size()) != head_dim;
        const auto norm = [&](const std::optional<Floats1>& weight, int heads, const char* name) {
            return vector_or_null(weight, size_t(head_dim) * (norms_all_heads ? heads : 1), name);
        };
        const RopeStore rope{num_heads,
                             has_keys,
                             norm(q_norm, num_heads, "q_norm"),
                             norm(k_norm, num_kv_heads, "k_norm"),
                             vector_or_null(v_norm, size_t(head_dim), "v_norm"),
                             norms_all_heads,
                             eps,
                             rotary.data(),
                             rotary_dim,
                             is_interleaved,
                             vector_or_null(query_scale, rotary.shape(0), "query_scale")};
        const Scoring scoring{scale, window.value_or(0), cap.value_or(0.0f), vector_or_null(sinks, num_heads, "sinks")};
        auto made = std::make_shared<Attention>();
        made->qkv = qkv.linear, made->out = out.linear, made->rope = rope, made->scoring = scoring;
        made->kv_heads = num_kv_heads, made->head_dim = head_dim, made->has_gates = has_gates;
        made->max_len = int64_t(rotary.shape(0));
        mixer = made;
    }
};

// The cache of a layer, for heads that are run without their mixer.
const LayerCache& layer_of(const PyCache& cache, size_t layer, const PyStep& step, size_t rows) {
    require(layer < cache.layers.size(), "the cache has no such layer");
    require(step.step.tokens == int64_t(rows), "there must be a row for each token of the step");
    return cache.layers[layer];
}

struct PyLatentHeads {
    Floats1 norm;
    Array<const float, 2> rotary, expansion;
    LatentHeads heads;

    PyLatentHeads(int count, int rank, int plain_dim, int value_dim, Array<const float, 2> rotary_, bool is_interleaved,
                  Array<const float, 2> expansion_, Floats1 norm_, float eps, float scale)
        : norm(norm_), rotary(rotary_), expansion(expansion_) {
        const int rotary_dim = int(rotary.shape(1));
        require(count > 0 && rank > 0 && plain_dim > 0 && value_dim > 0 && rotary_dim % 2 == 0 &&
                    rank + rotary_dim <= kMaxLatentDim,
                "sizes must be positive, and latent vectors at most " + std::to_string(kMaxLatentDim));
        require(int64_t(expansion.shape(0)) == int64_t(count) * (plain_dim + value_dim) && int(expansion.shape(1)) == rank,
                "expansion must be [heads * (plain_dim + value_dim), rank]");
        RopeStore rope{};
        rope.num_heads = count, rope.eps = eps, rope.is_interleaved = is_interleaved;
        rope.k_norm = vector_or_null(norm, size_t(rank), "norm");
        rope.rotary = rotary.data(), rope.rotary_dim = rotary_dim;
        heads = {rope, rank, plain_dim, value_dim, expansion.data(), scale, int64_t(rotary.shape(0))};
    }

    void run(Array<float, 2> latents, Array<float, 2> queries, const PyCache& cache, size_t layer, const PyStep& step,
             Array<float, 2> out) const {
        const size_t rows = latents.shape(0);
        const LayerCache& kept = layer_of(cache, layer, step, rows);
        require(int(latents.shape(1)) == heads.kept_size() && queries.shape(0) == rows && out.shape(0) == rows &&
                    int(queries.shape(1)) == heads.query_size() && int(out.shape(1)) == heads.result_size(),
                "latents, queries and out do not fit the heads or each other");
        heads.check(kept, step.step);
        step.step.check(std::get<CacheView>(kept));
        nb::gil_scoped_release release;
        heads.run(latents.data(), heads.kept_size(), queries.data(), step.step, std::get<CacheView>(kept), out.data());
    }
};

struct PyLatentAttention : PyTokenMixer {
    PyLatentHeads heads;

    PyLatentAttention(const PyLinear& latents, const PyLinear& query, const PyLinear& out, const PyLatentHeads& heads_,
                      std::optional<Floats1> query_norm)
        : heads(heads_) {
        const LatentHeads& own = heads.heads;
        const int query_rank = query_norm ? int(query_norm->size()) : 0;
        require(latents.linear->out_features() == query_rank + own.kept_size() &&
                    query.linear->in_features() == (query_rank ? query_rank : latents.linear->in_features()) &&
                    query.linear->out_features() == own.query_size() && out.linear->in_features() == own.result_size() &&
                    out.linear->out_features() == latents.linear->in_features(),
                "the weights of latents, query and out do not fit the heads or each other");
        auto made = std::make_shared<LatentAttention>();
        made->latents = latents.linear, made->query = query.linear, made->out = out.linear, made->heads = own;
        made->query_norm = query_norm ? query_norm->data() : nullptr, made->query_rank = query_rank;
        linears = {latents, query, out}, vectors = {query_norm, heads.norm}, tables = {heads.rotary, heads.expansion};
        mixer = made;
    }
};

struct PyDeltaHeads {
    Array<const float, 2> conv;
    Floats1 decay, dt_bias, norm;
    DeltaHeads heads;

    PyDeltaHeads(int key_heads, int value_heads, int key_dim, int value_dim, Array<const float, 2> conv_, Floats1 decay_,
                 Floats1 dt_bias_, Floats1 norm_, float eps)
        : conv(conv_), decay(decay_), dt_bias(dt_bias_), norm(norm_) {
        require(key_heads > 0 && value_heads > 0 && value_heads % key_heads == 0,
                "value_heads must be a multiple of key_heads");
        require(key_dim > 0 && key_dim <= kMaxKeyDim && value_dim > 0,
                "key_dim must be 1 to " + std::to_string(kMaxKeyDim) + ", value_dim positive");
        heads = {key_heads,
                 value_heads,
                 key_dim,
                 value_dim,
                 int(conv.shape(0)),
                 conv.data(),
                 vector_or_null(decay, size_t(value_heads), "decay"),
                 vector_or_null(dt_bias, size_t(value_heads), "dt_bias"),
                 vector_or_null(norm, size_t(value_dim), "norm"),
                 eps};
        require(conv.shape(0) >= 2 && conv.shape(0) <= kMaxConvWidth && int(conv.shape(1)) == heads.channels(),
                "conv must be [2 to " + std::to_string(kMaxConvWidth) + ", channels of q, k and v]");
    }

    int run(Array<float, 2> rows, const PyCache& cache, size_t layer, const PyStep& step) const {
        const LayerCache& kept = layer_of(cache, layer, step, rows.shape(0));
        require(int(rows.shape(1)) == heads.row_size(), "rows must be [T, " + std::to_string(heads.row_size()) + "]");
        heads.check(kept, step.step);
        nb::gil_scoped_release release;
        return heads.run(rows.data(), step.step, std::get<StateView>(kept));
    }
};

struct PyDeltaNet : PyTokenMixer {
    PyDeltaHeads heads;

    PyDeltaNet(const PyLinear& in, const PyLinear& out, const PyDeltaHeads& heads_) : heads(heads_) {
        const DeltaHeads& own = heads.heads;
        require(in.linear->out_features() == own.row_size() && out.linear->in_features() == own.result_size() &&
                    out.linear->out_features() == in.linear->in_features(),
                "the weights of in and out do not fit the heads or each other");
        auto made = std::make_shared<DeltaNet>();
        made->in = in.linear, made->out = out.linear, made->heads = own;
        linears = {in, out}, vectors = {heads.decay, heads.dt_bias, heads.norm}, tables = {heads.conv};
        mixer = made;
    }
};

// A channel mixer, and the objects that it keeps alive.
struct PyChannelMixer {
    std::vector<PyLinear> linears;
    std::optional<Array<const float, 2>> router;
    std::vector<std::optional<Floats1>> vectors;
    std::vector<PyChannelMixer> parts;
    std::shared_ptr<const ChannelMixer> mixer;
};

struct PyMLP : PyChannelMixer {
    PyMLP(const PyLinear& gate_up, const PyLinear& down, const std::string& activation) {
        require(gate_up.linear->out_features() == 2 * down.linear->in_features() &&
                    gate_up.linear->in_features() == down.linear->out_features(),
                "the weights of gate_up and down do not fit each other");
        linears = {gate_up, down};
        mixer = std::make_shared<MLP>(gate_up.linear, down.linear, find_gating(activation));
    }
};

struct PySparseMLP : PyChannelMixer {
    PySparseMLP(const PyExperts& experts, Array<const float, 2> router_, std::optional<Floats1> bias,
                std::optional<Floats1> correction_, int top_k, bool renormalizes, bool is_sigmoid, int num_groups,
                int top_groups, int group_best, float scale, const PyMLP* shared, std::optional<Floats1> norm,
                std::optional<Floats1> factors, std::optional<Floats1> shared_gate) {
        const int count = experts.experts->count(), hidden = experts.experts->hidden();
        require(int(router_.shape(0)) == hidden && int(router_.shape(1)) == count, "router must be [hidden, experts]");
        require(num_groups >= 1 && count % num_groups == 0 && top_groups >= 1 && top_groups <= num_groups &&
                    group_best >= 1 && group_best <= std::max(1, count / num_groups),
                "the groups of experts do not fit their number");
        require(top_k >= 1 && top_k <= count / num_groups * top_groups, "top_k must be 1 to the experts that may be chosen");
        require(shared == nullptr || shared->mixer->hidden() == hidden, "shared experts must have the same hidden size");
        linears = experts.linears;
        if (shared) linears.insert(linears.end(), shared->linears.begin(), shared->linears.end());
        require(shared || !shared_gate, "shared_gate needs shared experts");
        router = router_, vectors = {bias, correction_, norm, factors, shared_gate};
        const Router how{router->data(), vector_or_null(bias, count, "router_bias"),
                         vector_or_null(correction_, count, "correction"), vector_or_null(norm, hidden, "router_norm"),
                         vector_or_null(factors, count, "factors")};
        mixer = std::make_shared<SparseMLP>(
            experts.experts, Routing{top_k, renormalizes, is_sigmoid, num_groups, top_groups, group_best, scale}, how,
            shared ? shared->mixer : nullptr, vector_or_null(shared_gate, size_t(hidden), "shared_gate"));
    }
};

struct PyMixerSum : PyChannelMixer {
    // `before` and `after` are each mixer's norms.
    PyMixerSum(const std::vector<const PyChannelMixer*>& mixers, const std::vector<std::optional<Floats1>>& before,
               const std::vector<std::optional<Floats1>>& after, float eps) {
        require(!mixers.empty() && before.size() == mixers.size() && after.size() == mixers.size(),
                "every mixer of a sum has a norm before and after it, or None");
        std::vector<MixerSum::Part> own;
        for (size_t i = 0; i < mixers.size(); ++i) {
            const int hidden = mixers[i]->mixer->hidden();
            require(hidden == mixers[0]->mixer->hidden(), "the mixers have different hidden sizes");
            parts.push_back(*mixers[i]);
            vectors.insert(vectors.end(), {before[i], after[i]});
            const float* norms[] = {vector_or_null(before[i], hidden, "a norm"), vector_or_null(after[i], hidden, "a norm")};
            own.push_back({mixers[i]->mixer, {norms[0], norms[1], eps, 1.0f}});
        }
        mixer = std::make_shared<MixerSum>(std::move(own));
    }
};

struct PyOwnInput {
    PyLinear gate, projection;
    Floats1 norm;
    std::shared_ptr<const OwnInput> input;

    PyOwnInput(const PyLinear& gate_, const PyLinear& projection_, Floats1 norm_, float eps, const std::string& activation)
        : gate(gate_), projection(projection_), norm(norm_) {
        require(gate.linear->out_features() == projection.linear->in_features() &&
                    gate.linear->in_features() == projection.linear->out_features(),
                "the weights of gate and projection do not fit each other");
        const float* weight = vector_or_null(norm, size_t(projection.linear->out_features()), "norm");
        input = std::make_shared<OwnInput>(
            OwnInput{gate.linear, projection.linear, {nullptr, weight, eps, 1.0f}, find_gating(activation)});
    }
};

struct PyLayer {
    PyTokenMixer tokens;
    PyChannelMixer channels;
    std::optional<Floats1> norms[4];  // before and after the token mixer, before and after the channel mixer
    std::optional<PyOwnInput> own_input;
    Layer layer;

    PyLayer(const PyTokenMixer& tokens_, const PyChannelMixer& channels_, std::optional<Floats1> before_tokens,
            std::optional<Floats1> after_tokens, std::optional<Floats1> before_channels,
            std::optional<Floats1> after_channels, float eps, float residual_scale, const PyOwnInput* own_input_, float scale)
        : tokens(tokens_), channels(channels_), norms{before_tokens, after_tokens, before_channels, after_channels} {
        require(channels.mixer->hidden() == hidden_size(), "the mixers have different hidden sizes");
        require(channels.parts.empty() || !before_channels, "a sum of mixers has norms before each of them, not before all");
        if (own_input_) own_input = *own_input_;
        require(!own_input || own_input->gate.linear->in_features() == hidden_size(), "own_input has another hidden size");
        const float* weights[4];
        for (int i = 0; i < 4; ++i) weights[i] = vector_or_null(norms[i], size_t(hidden_size()), "a norm");
        layer = {tokens.mixer,
                 {weights[0], weights[1], eps, residual_scale},
                 channels.mixer,
                 {weights[2], weights[3], eps, residual_scale},
                 own_input ? own_input->input : nullptr,
                 scale};
    }

    int input_width() const { return own_input ? own_input->gate.linear->out_features() : 0; }

    int hidden_size() const { return tokens.mixer->hidden(); }
};

struct PyDecoder {
    std::vector<std::shared_ptr<PyLayer>> layers;
    std::optional<Floats1> norm;
    Decoder decoder;

    PyDecoder(std::vector<std::shared_ptr<PyLayer>> layers_, std::optional<Floats1> norm_, float eps)
        : layers(std::move(layers_)), norm(norm_) {
        require(!layers.empty(), "a decoder needs a layer");
        for (auto& layer : layers) {
            require(layer->hidden_size() == layers.front()->hidden_size(), "the layers have different hidden sizes");
        }
        decoder = {{}, vector_or_null(norm, size_t(layers.front()->hidden_size()), "norm"), eps};
        for (auto& layer : layers) decoder.layers.push_back(layer->layer);
    }

    void forward(Array<float, 2> hidden, const PyCache& cache, const std::vector<const PyStep*>& steps,
                 std::optional<Array<const float, 3>> inputs) const {
        require(inputs || layers.front()->input_width() == 0, "layers with an input of their own need inputs");
        const size_t width = inputs ? inputs->shape(2) : 0;
        require(!inputs || (inputs->shape(0) == hidden.shape(0) && inputs->shape(1) == layers.size()),
                "inputs must be [T, layers, width]");
        for (auto& layer : layers) require(size_t(layer->input_width()) == width, "inputs do not fit the layers");
        require(cache.layers.size() == layers.size() && steps.size() == layers.size(),
                "there must be a cache and a step for each of the decoder's layers");
        require(int(hidden.shape(1)) == layers.front()->hidden_size(), "hidden does not fit the layers");
        std::vector<const Step*> batches;
        for (size_t i = 0; i < layers.size(); ++i) {
            batches.push_back(&steps[i]->step);
            require(batches[i]->tokens == int64_t(hidden.shape(0)), "hidden must have a row for each token of the step");
            layers[i]->layer.tokens->check(cache.layers[i], *batches[i]);
        }
        check_steps(batches, cache.layers);
        nb::gil_scoped_release release;
        decoder.run(cache.layers, batches, int64_t(hidden.shape(0)), inputs ? inputs->data() : nullptr, int64_t(width),
                    hidden.data());
    }
};

// A whole model, which can decode several steps by itself.
struct PyGenerator {
    PyDecoder decoder;  // decoder and head keep their arrays alive
    PyLinear head;
    TokenModel model;

    PyGenerator(std::shared_ptr<const Matrix> embedding, const PyDecoder& decoder_, const PyLinear& head_,
                float embedding_scale, float logit_scale, std::optional<float> logit_cap)
        : decoder(decoder_), head(head_) {
        const int size = decoder.layers.front()->hidden_size();
        require(embedding->view().columns == size && head.linear->in_features() == size &&
                    head.linear->out_features() == embedding->view().rows,
                "embedding and head must be [vocab, " + std::to_string(size) + "]");
        require(!logit_cap || *logit_cap > 0.0f, "logit_cap must be positive");
        require(decoder.layers.front()->input_width() == 0, "layers with an input of their own can't decode by themselves");
        model = {embedding, embedding_scale, &decoder.decoder, head.linear, logit_scale, logit_cap.value_or(0.0f)};
    }

    PyGenerator(const PyGenerator&) = delete;  // model has a pointer to decoder

    int64_t run(const PyCache& cache, const std::vector<size_t>& groups, const std::vector<Array<const int64_t, 2>>& tables,
                Ints1 tokens, Ints1 starts, Array<const int64_t, 2> settings, Ints1 rows, Array<const bool, 1> is_stop,
                Array<int64_t, 2> drawn, Array<bool, 1> are_finite, double seconds, nb::callable is_awaited) const {
        const size_t count = tokens.size();
        const int64_t steps = int64_t(drawn.shape(0));
        require(cache.layers.size() == decoder.layers.size() && groups.size() == decoder.layers.size(),
                "there must be a cache and a group for each of the decoder's layers");
        require(count > 0 && starts.size() == count && rows.size() == count && drawn.shape(1) == count && steps > 0 &&
                    are_finite.size() == count,
                "tokens, starts, rows and are_finite must be [n], drawn [steps, n]");
        require(settings.shape(1) == 5, "settings must be [rows, 5]");
        check_rows(*model.embedding, tokens);
        for (size_t i = 0; i < count; ++i) {
            require(rows.data()[i] >= 0 && rows.data()[i] < int64_t(settings.shape(0)), "a row has no settings");
        }
        std::vector<const int64_t*> blocks;
        for (const auto& table : tables) {
            require(table.shape(0) == count && table.shape(1) == tables[0].shape(1), "all tables must be [n, max_blocks]");
            blocks.push_back(table.data());
        }
        DecodeRun run(model, cache.layers, groups, blocks, blocks.empty() ? 0 : int64_t(tables[0].shape(1)),
                      {int64_t(count), starts.data(), settings.data(), rows.data()}, steps);
        for (size_t i = 0; i < groups.size(); ++i) {
            decoder.layers[i]->layer.tokens->check(cache.layers[i], *run.last_batches()[i]);
        }
        return run_steps(run, tokens.data(), count, is_stop, drawn.data(), steps, are_finite.data(), seconds, is_awaited);
    }

private:
    // Returns the number of steps.
    static int64_t run_steps(DecodeRun& run, const int64_t* tokens, size_t count, const Array<const bool, 1>& is_stop,
                             int64_t* drawn, int64_t steps, bool* are_finite, double seconds, const nb::callable& is_awaited) {
        using Clock = std::chrono::steady_clock;
        const auto begin = Clock::now();
        for (int64_t step = 0;;) {
            const auto step_begin = Clock::now();
            {
                nb::gil_scoped_release release;
                run.step(tokens, drawn, are_finite);
            }
            const auto end = Clock::now();
            const bool is_finite = std::all_of(are_finite, are_finite + count, [](bool each) { return each; });
            // The tokens drawn so far are valid. The failed step is the first step of the next run, which reports it.
            if (!is_finite && step > 0) {
                std::fill(are_finite, are_finite + count, true);
                return step;
            }
            const bool is_last = std::any_of(drawn, drawn + count, [&](int64_t token) {
                return token < int64_t(is_stop.size()) && is_stop.data()[token];
            });
            const std::chrono::duration<double> expected = (end - begin) + (end - step_begin);
            if (++step == steps || !is_finite || is_last || expected.count() > seconds) return step;
            if (nb::cast<bool>(is_awaited())) return step;
            tokens = drawn;
            drawn += count;
        }
    }
};

void store(Rows4 new_tokens, AnyArray cache, const PyStep& py_step, std::optional<AnyArray> scales) {
    const CacheView view = view_cache(cache, scales);
    require(int64_t(new_tokens.shape(0)) == py_step.step.tokens && new_tokens.shape(1) == 2 &&
                int(new_tokens.shape(2)) == view.kv_heads && int(new_tokens.shape(3)) == view.head_dim &&
                new_tokens.stride(3) == 1 && new_tokens.stride(2) == view.head_dim &&
                new_tokens.stride(1) == int64_t(view.kv_heads) * view.head_dim,
            "new must be [T, 2, kv_heads, head_dim], contiguous but for T");
    py_step.step.check(view);
    RopeStore how{};
    how.has_keys = true;
    nb::gil_scoped_release release;
    for (int64_t t = 0; t < py_step.step.tokens; ++t) {
        kernels().rope_store(new_tokens.data() + t * new_tokens.stride(0), 0, py_step.step.slots[t], how, view);
    }
}

void attend_py(Rows3 query, AnyArray cache, const PyStep& py_step, Array<float, 3> out, float scale,
               std::optional<int64_t> window, std::optional<float> cap, std::optional<Floats1> sinks,
               std::optional<AnyArray> scales) {
    const CacheView view = view_cache(cache, scales);
    const int heads = int(query.shape(1));
    require(int64_t(query.shape(0)) == py_step.step.tokens && int(query.shape(2)) == view.head_dim &&
                heads % view.kv_heads == 0 && heads / view.kv_heads <= kMaxGroupHeads && query.stride(2) == 1 &&
                query.stride(1) == view.head_dim,
            "query must be [T, heads, head_dim], contiguous but for T, with heads a multiple of the cache's");
    require(out.shape(0) == query.shape(0) && out.shape(1) == query.shape(1) && out.shape(2) == query.shape(2),
            "out must be like query");
    require(!window || *window > 0, "window must be positive");
    require(!cap || *cap > 0.0f, "cap must be positive");
    const Scoring scoring{scale, window.value_or(0), cap.value_or(0.0f), vector_or_null(sinks, size_t(heads), "sinks")};
    py_step.step.check(view);
    nb::gil_scoped_release release;
    attend(py_step.step, view, query.data(), query.stride(0), heads, scoring, out.data(),
           int64_t(heads) * view.head_dim);
}

void draw_py(Array<const float, 2> logits, Array<const int64_t, 2> settings, Ints1 rows, Ints1 positions,
             Array<int64_t, 1> tokens, Array<bool, 1> are_finite) {
    const size_t count = logits.shape(0);
    require(settings.shape(1) == 5 && logits.shape(1) > 0, "settings must be [rows, 5], logits [n, vocab]");
    require(rows.size() == count && positions.size() == count && tokens.size() == count && are_finite.size() == count,
            "rows, positions, tokens and are_finite must have a number for each row of logits");
    for (size_t i = 0; i < count; ++i) {
        require(rows.data()[i] >= 0 && rows.data()[i] < int64_t(settings.shape(0)), "a row has no settings");
    }
    nb::gil_scoped_release release;
    draw_rows(logits.data(), int64_t(count), int64_t(logits.shape(1)), settings.data(), rows.data(), positions.data(),
              tokens.data(), are_finite.data());
}

void logprobs_py(Array<const float, 2> logits, Ints1 targets, Array<int64_t, 2> ids, Array<float, 2> values) {
    const size_t count = logits.shape(0);
    const int64_t vocab_size = int64_t(logits.shape(1)), columns = int64_t(values.shape(1));
    require(targets.size() == count && ids.shape(0) == count && values.shape(0) == count && ids.shape(1) == values.shape(1) &&
                columns >= 1 && columns <= vocab_size + 1,
            "targets must be [n], ids and values [n, 1 + up to vocab]");
    for (size_t i = 0; i < count; ++i) {
        require(targets.data()[i] >= 0 && targets.data()[i] < vocab_size, "a target is no token");
    }
    nb::gil_scoped_release release;
    parallel_for(int64_t(count), 1, [&](int64_t i) {
        logprobs(logits.data() + i * vocab_size, vocab_size, targets.data()[i], columns - 1, ids.data() + i * columns,
                 values.data() + i * columns);
    });
}

void cap_logits_py(Array<float, 2> logits, float cap) {
    require(cap > 0.0f, "cap must be positive");
    nb::gil_scoped_release release;
    scale_logits(logits.data(), int64_t(logits.size()), 1.0f, cap);
}

}  // namespace
}  // namespace infinilm

NB_MODULE(_native, module) {
    using namespace infinilm;

    nb::set_leak_warnings(false);  // an interpreter may end with live objects, such as the server's tokenizer

    // noconvert: an array of another type or order is refused. A silent copy would be slow, or never written back.
    module.def("instruction_set", [] { return kernels().name; });
    module.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (const Kernels* each : usable_kernels()) names.push_back(each->name);
        return names;
    });
    module.def("use_instruction_set", &use_kernels, "name"_a);
    module.def("num_threads", &num_threads);
    module.def(
        "set_num_threads",
        [](int count) {
            require(count >= 1 && count <= 1024, "count=" + std::to_string(count) + " must be 1 to 1024");
            nb::gil_scoped_release release;
            set_num_threads(count);
        },
        "count"_a);

    nb::class_<Matrix>(module, "Matrix")
        .def(nb::init<const std::string&, int, int, int>(), "format"_a, "rows"_a, "columns"_a, "activation_bits"_a = 16)
        .def_prop_ro("format", [](const Matrix& matrix) { return matrix.floats() ? "floats" : matrix.view().format->name; })
        .def_prop_ro("rows", [](const Matrix& matrix) { return matrix.view().rows; })
        .def_prop_ro("columns", [](const Matrix& matrix) { return matrix.view().columns; })
        .def_prop_ro("activation_bits", [](const Matrix& matrix) { return matrix.view().activation_bits; })
        .def_prop_ro("num_bytes", &Matrix::num_bytes)
        .def(
            "load",
            [](Matrix& matrix, Array<const uint8_t, 2> blocks, Ints1 rows) {
                require(!matrix.floats(), "floats are loaded where they are");
                const Format& format = *matrix.view().format;
                const size_t row_bytes = size_t(matrix.view().columns / format.block_columns) * format.block_bytes;
                require(blocks.shape(0) == rows.size() && blocks.shape(1) == row_bytes,
                        "blocks must be [rows, " + std::to_string(row_bytes) + "]");
                check_rows(matrix, rows);
                nb::gil_scoped_release release;
                matrix.load(blocks.data(), rows.data(), int64_t(rows.size()));
            },
            "blocks"_a.noconvert(), "rows"_a.noconvert())
        .def(
            "dequantize",
            [](const Matrix& matrix, Ints1 rows, Array<float, 2> out) {
                require(!matrix.floats(), "floats are looked up where they are");
                require(out.shape(0) == rows.size() && int(out.shape(1)) == matrix.view().columns,
                        "out must be [rows, " + std::to_string(matrix.view().columns) + "]");
                check_rows(matrix, rows);
                nb::gil_scoped_release release;
                matrix.dequantize(rows.data(), int64_t(rows.size()), out.data());
            },
            "rows"_a.noconvert(), "out"_a.noconvert());

    module.def("float_matrix", &keep_floats, "weight"_a.noconvert(), "scales"_a.noconvert() = nb::none());
    nb::class_<PyLinear>(module, "Linear")
        .def(nb::init<std::vector<std::shared_ptr<const Matrix>>, std::optional<Floats1>>(), "matrices"_a,
             "bias"_a.noconvert().none())
        .def_prop_ro("in_features", [](const PyLinear& self) { return self.linear->in_features(); })
        .def_prop_ro("out_features", [](const PyLinear& self) { return self.linear->out_features(); })
        .def("multiply", &PyLinear::multiply, "x"_a.noconvert(), "out"_a.noconvert(), "accumulate"_a);

    nb::class_<PyExperts>(module, "Experts")
        .def(nb::init<const std::vector<PyLinear>&, const std::vector<PyLinear>&, const std::string&, float, float>(),
             "gate_up"_a, "down"_a, "activation"_a = "silu", "alpha"_a = 0.0f, "limit"_a = 0.0f)
        .def("mix", &PyExperts::mix, "x"_a.noconvert(), "ids"_a.noconvert(), "weights"_a.noconvert(),
             "out"_a.noconvert(), "accumulate"_a);
    module.def("score", &score_py, "x"_a.noconvert(), "weight"_a.noconvert(), "out"_a.noconvert());

    module.def("multiply_dense", &multiply_dense_py, "x"_a.noconvert(), "weight"_a.noconvert(), "out"_a.noconvert(),
               "is_table"_a = false, "scales"_a.noconvert() = nb::none());
    module.def("activate", &activate_py, "x"_a.noconvert(), "out"_a.noconvert(), "activation"_a);
    module.def("rms_norm", &rms_norm_py, "x"_a.noconvert(), "weight"_a.noconvert(), "out"_a.noconvert(), "eps"_a);

    using MaybeFloats = std::optional<Floats1>;
    nb::class_<PyTokenMixer>(module, "TokenMixer");
    nb::class_<PyAttention, PyTokenMixer>(module, "Attention")
        .def(nb::init<const PyLinear&, const PyLinear&, int, int, int, Array<const float, 2>, bool, MaybeFloats, MaybeFloats,
                      MaybeFloats, float, float, std::optional<int64_t>, std::optional<float>, MaybeFloats, MaybeFloats,
                      bool>(),
             nb::kw_only(), "qkv"_a, "out"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "rotary"_a.noconvert(),
             "is_interleaved"_a, "query_scale"_a.noconvert().none(), "q_norm"_a.noconvert().none(),
             "k_norm"_a.noconvert().none(), "eps"_a, "scale"_a, "window"_a.none(), "cap"_a.none(),
             "sinks"_a.noconvert().none(), "v_norm"_a.noconvert() = nb::none(), "has_gates"_a = false);
    nb::class_<PyDeltaNet, PyTokenMixer>(module, "DeltaNet")
        .def(nb::init<const PyLinear&, const PyLinear&, const PyDeltaHeads&>(), nb::kw_only(), "in_"_a, "out"_a, "heads"_a);
    nb::class_<PyLatentAttention, PyTokenMixer>(module, "LatentAttention")
        .def(nb::init<const PyLinear&, const PyLinear&, const PyLinear&, const PyLatentHeads&, MaybeFloats>(), nb::kw_only(),
             "latents"_a, "query"_a, "out"_a, "heads"_a, "query_norm"_a.noconvert().none());
    nb::class_<PyChannelMixer>(module, "ChannelMixer");
    nb::class_<PyMLP, PyChannelMixer>(module, "MLP")
        .def(nb::init<const PyLinear&, const PyLinear&, const std::string&>(), nb::kw_only(), "gate_up"_a, "down"_a,
             "activation"_a);
    nb::class_<PySparseMLP, PyChannelMixer>(module, "SparseMLP")
        .def(nb::init<const PyExperts&, Array<const float, 2>, MaybeFloats, MaybeFloats, int, bool, bool, int, int, int,
                      float, const PyMLP*, MaybeFloats, MaybeFloats, MaybeFloats>(),
             nb::kw_only(), "experts"_a, "router"_a.noconvert(), "router_bias"_a.noconvert().none(),
             "correction"_a.noconvert().none(), "top_k"_a, "renormalizes"_a, "is_sigmoid"_a, "num_groups"_a,
             "top_groups"_a, "group_best"_a, "scale"_a, "shared"_a.none(), "router_norm"_a.noconvert() = nb::none(),
             "factors"_a.noconvert() = nb::none(), "shared_gate"_a.noconvert() = nb::none());
    nb::class_<PyMixerSum, PyChannelMixer>(module, "MixerSum")
        .def(nb::init<const std::vector<const PyChannelMixer*>&, const std::vector<MaybeFloats>&,
                      const std::vector<MaybeFloats>&, float>(),
             "mixers"_a, nb::kw_only(), "before"_a, "after"_a, "eps"_a);
    nb::class_<PyOwnInput>(module, "OwnInput")
        .def(nb::init<const PyLinear&, const PyLinear&, Floats1, float, const std::string&>(), nb::kw_only(), "gate"_a,
             "projection"_a, "norm"_a.noconvert(), "eps"_a, "activation"_a);
    nb::class_<PyLayer>(module, "Layer")
        .def(nb::init<const PyTokenMixer&, const PyChannelMixer&, MaybeFloats, MaybeFloats, MaybeFloats, MaybeFloats, float,
                      float, const PyOwnInput*, float>(),
             "token_mixer"_a, "channel_mixer"_a, nb::kw_only(), "before_tokens"_a.noconvert().none(),
             "after_tokens"_a.noconvert().none(), "before_channels"_a.noconvert().none(),
             "after_channels"_a.noconvert().none(), "eps"_a, "residual_scale"_a, "own_input"_a.none() = nb::none(),
             "scale"_a = 1.0f);
    nb::class_<PyCache>(module, "Cache")
        .def(nb::init<std::vector<PyCache::Arrays>, std::vector<AnyArray>, int64_t>(), "layers"_a.noconvert(),
             "scales"_a.noconvert() = std::vector<AnyArray>(), "block_size"_a = 0);

    nb::class_<PyStep>(module, "Step")
        .def(nb::init<Ints1, Ints1, Array<const int64_t, 2>, Ints1, Ints1>(), "positions"_a.noconvert(), "slots"_a.noconvert(),
             "block_tables"_a.noconvert(), "query_lens"_a.noconvert(), "context_lens"_a.noconvert())
        .def("only_last", &PyStep::only_last, "last_lens"_a.noconvert());

    nb::class_<PyDecoder>(module, "Decoder")
        .def(nb::init<std::vector<std::shared_ptr<PyLayer>>, MaybeFloats, float>(), "layers"_a, "norm"_a.noconvert().none(),
             "eps"_a)
        .def("forward", &PyDecoder::forward, "hidden"_a.noconvert(), "cache"_a, "steps"_a,
             "inputs"_a.noconvert() = nb::none());

    nb::class_<PyGenerator>(module, "Generator")
        .def(nb::init<std::shared_ptr<const Matrix>, const PyDecoder&, const PyLinear&, float, float, std::optional<float>>(),
             "embedding"_a, "decoder"_a, "head"_a, nb::kw_only(), "embedding_scale"_a, "logit_scale"_a, "logit_cap"_a.none())
        .def("run", &PyGenerator::run, "cache"_a, nb::kw_only(), "groups"_a, "tables"_a.noconvert(), "tokens"_a.noconvert(),
             "starts"_a.noconvert(), "settings"_a.noconvert(), "rows"_a.noconvert(), "is_stop"_a.noconvert(),
             "drawn"_a.noconvert(), "are_finite"_a.noconvert(), "seconds"_a, "is_awaited"_a);

    nb::class_<PyDeltaHeads>(module, "DeltaHeads")
        .def(nb::init<int, int, int, int, Array<const float, 2>, Floats1, Floats1, Floats1, float>(), nb::kw_only(),
             "key_heads"_a, "value_heads"_a, "key_dim"_a, "value_dim"_a, "conv"_a.noconvert(), "decay"_a.noconvert(),
             "dt_bias"_a.noconvert(), "norm"_a.noconvert(), "eps"_a)
        .def("run", &PyDeltaHeads::run, "rows"_a.noconvert(), "cache"_a, "layer"_a, "step"_a);
    nb::class_<PyLatentHeads>(module, "LatentHeads")
        .def(nb::init<int, int, int, int, Array<const float, 2>, bool, Array<const float, 2>, Floats1, float, float>(),
             nb::kw_only(), "count"_a, "rank"_a, "plain_dim"_a, "value_dim"_a, "rotary"_a.noconvert(), "is_interleaved"_a,
             "expansion"_a.noconvert(), "norm"_a.noconvert(), "eps"_a, "scale"_a)
        .def("run", &PyLatentHeads::run, "latents"_a.noconvert(), "queries"_a.noconvert(), "cache"_a, "layer"_a, "step"_a,
             "out"_a.noconvert());

    module.def("store", &store, "new"_a.noconvert(), "cache"_a.noconvert(), "step"_a,
               "scales"_a.noconvert() = nb::none());
    module.def("attend", &attend_py, "query"_a.noconvert(), "cache"_a.noconvert(), "step"_a, "out"_a.noconvert(), "scale"_a, "window"_a.none(),
               "cap"_a = nb::none(), "sinks"_a = nb::none(), "scales"_a.noconvert() = nb::none());
    module.def("draw", &draw_py, "logits"_a.noconvert(), "settings"_a.noconvert(), "rows"_a.noconvert(),
               "positions"_a.noconvert(), "tokens"_a.noconvert(), "are_finite"_a.noconvert());
    module.def("logprobs", &logprobs_py, "logits"_a.noconvert(), "targets"_a.noconvert(), "ids"_a.noconvert(),
               "values"_a.noconvert());
    module.def("cap_logits", &cap_logits_py, "logits"_a.noconvert(), "cap"_a);
    bind_bpe(module);
}
