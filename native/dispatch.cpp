#include "dispatch.h"

#include <atomic>
#include <stdexcept>

namespace infinilm {

#if defined(INFINILM_HAS_AVX512_VNNI)
namespace avx512_vnni { extern const Kernels table; }
#endif
#if defined(INFINILM_HAS_AVX_VNNI)
namespace avx_vnni { extern const Kernels table; }
#endif
#if defined(INFINILM_HAS_AVX2)
namespace avx2 { extern const Kernels table; }
#endif
#if defined(INFINILM_HAS_GENERIC)
namespace generic { extern const Kernels table; }
#endif

std::vector<const Kernels*> usable_kernels() {
    std::vector<const Kernels*> usable;
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    [[maybe_unused]] const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                                           __builtin_cpu_supports("f16c");
#if defined(INFINILM_HAS_AVX512_VNNI)
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni")) {
        usable.push_back(&avx512_vnni::table);
    }
#endif
#if defined(INFINILM_HAS_AVX_VNNI)
    if (has_avx2 && __builtin_cpu_supports("avxvnni")) usable.push_back(&avx_vnni::table);
#endif
#if defined(INFINILM_HAS_AVX2)
    if (has_avx2) usable.push_back(&avx2::table);
#endif
#endif
#if defined(INFINILM_HAS_GENERIC)
    usable.push_back(&generic::table);
#endif
    if (usable.empty()) throw std::runtime_error("the kernels were compiled for a machine with other instructions");
    return usable;
}

static std::atomic<const Kernels*> in_use{nullptr};

const Kernels& kernels() {
    const Kernels* current = in_use.load(std::memory_order_relaxed);
    if (current == nullptr) in_use.store(current = usable_kernels().front());
    return *current;
}

void use_kernels(const std::string& name) {
    std::string names;
    for (const Kernels* each : usable_kernels()) {
        if (each->name == name) return in_use.store(each);
        names += (names.empty() ? "" : ", ") + std::string(each->name);
    }
    throw std::invalid_argument("instruction set '" + name + "': this machine has " + names);
}

}  // namespace infinilm
