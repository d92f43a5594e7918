// MINI, one rank of 2.
#include "layer/instance.cuh"

MUSEJAX_RANK_INSTANCE(Mini2, 128, 16, 8, 64, 128, 128, 16, 2, 4)
