// Attention: a part of kernels.cpp that is compiled separately.
#include "kernels.h"

#include "attention.h"
#include "latent_heads.h"
