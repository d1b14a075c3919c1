// From a file's blocks to the kernels' layout, and back to floats.
#pragma once

#include <cstdint>
#include <string>

#include "format.h"

namespace infinilm {

// The format of that name; throws std::invalid_argument if there is none.
const Format& find_format(const std::string& name);

// Write one row of GGML's blocks to `row` of the matrix whose memory is `data`.
void pack_row(const Format& format, int columns, const uint8_t* blocks, int row, uint8_t* data);

// Read one row of a matrix as floats.
void unpack_row(const PackedMatrix& matrix, int row, float* out);

}  // namespace infinilm
