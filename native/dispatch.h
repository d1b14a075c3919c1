// Selects one of the compiled instruction sets that this machine has.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace infinilm {

// The kernels that were compiled and can run here, best first.
std::vector<const Kernels*> usable_kernels();

// The kernels in use: the best ones, unless use_kernels chose others.
const Kernels& kernels();

// Use the kernels of that name; throws std::invalid_argument if there are none.
void use_kernels(const std::string& name);

}  // namespace infinilm
