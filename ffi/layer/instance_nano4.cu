// NANO, one rank of 4.
#include "layer/instance.cuh"

MUSEJAX_RANK_INSTANCE(Nano4, 128, 16, 8, 64, 128, 128, 16, 4, 2)
