// Prints checksums of products, attention and delta rules over made-up numbers, with the generic kernels. They must be
// the same on every machine: `make aarch64` compares those of an emulated aarch64 with this machine's. Not part of the
// module.
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "decoder.h"
#include "dense.h"
#include "dispatch.h"
#include "half.h"

namespace infinilm {
namespace {

uint64_t state = 1;

uint32_t random_bits() {
    state = state * 6364136223846793005 + 1442695040888963407;
    return uint32_t(state >> 33);
}

std::vector<float> random_floats(size_t count) {
    std::vector<float> numbers(count);
    for (float& each : numbers) each = float(int(random_bits() % 2001) - 1000) * 1e-3f;
    return numbers;
}

void print(const char* what, int size, const std::vector<float>& numbers) {
    uint64_t sum = 14695981039346656037u;
    for (float each : numbers) sum = (sum ^ bits_of(each)) * 1099511628211;
    std::printf("%s %d: %016llx, the first %g\n", what, size, static_cast<unsigned long long>(sum), double(numbers[0]));
}

// Random blocks with small scales. Scales are float16 numbers at the beginning of blocks, or at the end in Q6_K.
std::vector<uint8_t> random_blocks(const Format& format, int rows, int columns) {
    std::vector<uint8_t> bytes(size_t(rows) * (columns / format.block_columns) * format.block_bytes);
    for (uint8_t& each : bytes) each = uint8_t(random_bits());
    for (size_t block = 0; block < bytes.size(); block += format.block_bytes) {
        const bool is_last = std::strcmp(format.name, "Q6_K") == 0;
        for (int i = 0; i < (is_last ? 1 : 2); ++i) {
            const uint16_t scale = float_to_half(1e-3f * float(1 + random_bits() % 100));
            const bool is_scale = i == 0 || format.has_minimum;
            if (is_scale) std::memcpy(&bytes[block + (is_last ? format.block_bytes - 2 : 2 * i)], &scale, 2);
        }
    }
    return bytes;
}

void check_products(const Format& format, int bits) {
    constexpr int kRows = 37, kColumns = 768;
    auto matrix = std::make_shared<Matrix>(format.name, kRows, kColumns, bits);
    std::vector<int64_t> rows(kRows);
    for (int i = 0; i < kRows; ++i) rows[i] = i;
    matrix->load(random_blocks(format, kRows, kColumns).data(), rows.data(), kRows);
    const Linear linear({matrix}, nullptr);
    for (int tokens : {1, 5, 64}) {
        const std::vector<float> x = random_floats(size_t(tokens) * kColumns);
        std::vector<float> out(size_t(tokens) * kRows);
        QuantizedRows quantized;
        quantized.reserve(tokens, kColumns, linear.activation_bits());
        for (int t = 0; t < tokens; ++t) kernels().quantize(x.data(), kColumns, nullptr, 0.0f, t, quantized.view());
        linear.multiply(quantized.view(), tokens, out.data(), false);
        print(bits == 8 ? "8 bits" : format.name, tokens, out);
    }
}

// Random bits, without large numbers and NaN.
void check_float_products(FloatType type, int bytes) {
    constexpr int kInputs = 130, kOutputs = 37;
    std::vector<uint8_t> weight(size_t(kInputs) * kOutputs * bytes);
    for (size_t i = 0; i < weight.size(); ++i) weight[i] = uint8_t(random_bits() & (i % bytes == size_t(bytes) - 1 ? 0xb7 : 0xff));
    const std::vector<float> scales(kOutputs, 0.75f);
    for (int rows : {1, 5, 64}) {
        const std::vector<float> x = random_floats(size_t(rows) * kInputs);
        std::vector<float> out(size_t(rows) * kOutputs);
        FloatMatrix matrix{weight.data(), type, kInputs, kOutputs, kOutputs};
        if (type == FloatType::kFloat8) matrix.scales = scales.data(), matrix.scale_stride = kOutputs, matrix.group = kInputs;
        multiply_dense({{{matrix, x.data(), rows, out.data(), kOutputs}}});
        print("floats", bytes, out);
    }
}

void check_attention(int head_dim) {
    constexpr int kHeads = 4, kKeyHeads = 2, kBlock = 16, kBlocks = 5, kTokens = 70;
    std::vector<float> cache = random_floats(size_t(kBlocks) * kBlock * 2 * kKeyHeads * head_dim);
    const CacheView view{cache.data(), FloatType::kFloat32, kBlocks, kBlock, kKeyHeads, head_dim};
    const std::vector<float> query = random_floats(size_t(kTokens) * kHeads * head_dim);
    std::vector<int64_t> positions(kTokens), slots(kTokens), table{4, 2, 0, 1, 3};
    for (int i = 0; i < kTokens; ++i) positions[i] = i, slots[i] = table[i / kBlock] * kBlock + i % kBlock;
    const int64_t length = kTokens;
    const Step step{kTokens, 1, kBlocks, positions.data(), slots.data(), table.data(), &length, &length};
    std::vector<float> out(query.size());
    attend(step, view, query.data(), int64_t(kHeads) * head_dim, kHeads, {0.125f, 0}, out.data(), int64_t(kHeads) * head_dim);
    print("attention", head_dim, out);
}

void check_delta_rule(int dim) {
    constexpr int kTokens = 9;
    const int64_t stride = 4 * dim;  // query, key, value, decay and rate of each token
    std::vector<float> tokens = random_floats(size_t(kTokens * stride)), state(size_t(dim) * dim);
    float* first = tokens.data();
    kernels().delta_rule({first, first + dim, first + 2 * dim, first + 3 * dim, first + 3 * dim + 1, stride, kTokens, dim, dim,
                          nullptr, state.data()});
    print("delta rule, results", dim, tokens);
    print("delta rule, state", dim, state);
}

void check_latents(int rank) {
    constexpr int kHeads = 2, kBlock = 16, kBlocks = 5, kTokens = 4, kPosition = 70;
    const int width = rank + 16;
    std::vector<float> cache = random_floats(size_t(kBlocks) * kBlock * width);
    CacheView view{cache.data(), FloatType::kFloat32, kBlocks, kBlock, 1, width};
    view.is_latent = true;
    const std::vector<float> query = random_floats(size_t(kTokens) * kHeads * width);
    const int64_t table[] = {4, 2, 0, 1, 3};
    std::vector<float> out(size_t(kTokens) * kHeads * rank);
    kernels().attend_latents({query.data(), out.data(), kTokens, kHeads, kHeads, rank, kPosition, table, 0.125f}, view);
    print("latents", rank, out);
}

}  // namespace
}  // namespace infinilm

int main() {
    infinilm::use_kernels("generic");
    for (int bits : {16, 8}) {
        for (const infinilm::Format& format : infinilm::kFormats) infinilm::check_products(format, bits);
    }
    const std::pair<infinilm::FloatType, int> types[] = {{infinilm::FloatType::kFloat32, 4}, {infinilm::FloatType::kFloat16, 2},
                                                         {infinilm::FloatType::kBFloat16, 2}, {infinilm::FloatType::kFloat8, 1}};
    for (const auto& [type, bytes] : types) infinilm::check_float_products(type, bytes);
    for (int head_dim : {64, 80, 128}) infinilm::check_attention(head_dim);
    for (int dim : {32, 128}) infinilm::check_delta_rule(dim);
    for (int rank : {48, 512}) infinilm::check_latents(rank);
}
