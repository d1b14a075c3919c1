// Products of floats: a part of kernels.cpp that is compiled separately.
#include "kernels.h"

#include "float_product.h"
