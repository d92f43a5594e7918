// MINI, one rank of 8.
#include "layer/instance.cuh"

MUSEJAX_RANK_INSTANCE(Mini8, 128, 16, 8, 64, 128, 128, 16, 2, 1)
