// Conversion of a file's blocks to the kernels' layout, and of that layout to floats.
#pragma once

#include <cstdint>
#include <string>

#include "format.h"

namespace infinilm {

// The format of that name; throws std::invalid_argument if there is none.
const Format& find_format(const std::string& name);

// Write up to 16 rows of GGML's blocks to a panel; null rows are left unchanged.
void pack_panel(const Format& format, int columns, const uint8_t* const* rows, uint8_t* panel);

// Read one row of a matrix as floats.
void unpack_row(const PackedMatrix& matrix, int row, float* out);

}  // namespace infinilm
