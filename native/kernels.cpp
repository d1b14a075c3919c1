// Compiled once for every instruction set, with INFINILM_ISA as its name.
#include "kernels.h"

#include <type_traits>

#include "delta_rule.h"
#include "elementwise.h"
#include "matmul.h"
#include "scan.h"

#define INFINILM_STRING(name) #name
#define INFINILM_NAME(name) INFINILM_STRING(name)

namespace infinilm::INFINILM_ISA {

// In kernels_floats.cpp.
std::remove_pointer_t<decltype(Kernels::multiply_floats)> multiply_floats;
std::remove_pointer_t<decltype(Kernels::multiply_float_table)> multiply_float_table;
// In kernels_attention.cpp.
std::remove_pointer_t<decltype(Kernels::attend)> attend;
std::remove_pointer_t<decltype(Kernels::attend_latents)> attend_latents;
std::remove_pointer_t<decltype(Kernels::merge)> merge;
std::remove_pointer_t<decltype(Kernels::partial_size)> partial_size;

extern const Kernels table;
const Kernels table = {
    INFINILM_NAME(INFINILM_ISA), quantize, gate_quantize, add_normed, score, activate_all, rms_norm, multiply, rope_store, attend, merge,
    partial_size, convolve, normalize_heads, delta_rule, gate_heads, turn_head, store_latent, attend_latents, dots, scan,
    multiply_floats, multiply_float_table, weigh,
};

}  // namespace infinilm::INFINILM_ISA
