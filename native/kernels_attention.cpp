// The part of kernels.cpp that attends.
#include "kernels.h"

#include "attention.h"
#include "latent_heads.h"
