// The part of kernels.cpp that multiplies floats.
#include "kernels.h"

#include "float_product.h"
