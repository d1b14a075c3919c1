#pragma once

#include <nanobind/nanobind.h>

namespace infinilm {

void bind_bpe(nanobind::module_& module);

}  // namespace infinilm
