// Which of the compiled instruction sets this machine has.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace infinilm {

// Those that were compiled and can run here, the best first.
std::vector<const Kernels*> usable_kernels();

// The ones in use: the best, until others are asked for.
const Kernels& kernels();

// Use those of that name; throws std::invalid_argument if there are none.
void use_kernels(const std::string& name);

}  // namespace infinilm
