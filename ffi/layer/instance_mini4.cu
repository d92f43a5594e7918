// MINI, one rank of 4.
#include "layer/instance.cuh"

MUSEJAX_RANK_INSTANCE(Mini4, 128, 16, 8, 64, 128, 128, 16, 2, 2)
