// Products of rows with 8 bits: a part of kernels.cpp that is compiled separately.
#include "byte_products.h"

namespace infinilm::INFINILM_ISA {

void multiply_bytes(const PackedMatrix& w, const Activations& x, int first_row, int end_row, int first_panel, int end_panel,
                    const float* bias, float* out, int64_t out_stride, bool accumulate) {
    INFINILM_CHOOSE_FORMAT(bytes::multiply_format)
    (w, x, first_row, end_row, first_panel, end_panel, bias, out, out_stride, accumulate);
}

}  // namespace infinilm::INFINILM_ISA
