// NANO, one rank of 2.
#include "layer/instance.cuh"

MUSEJAX_RANK_INSTANCE(Nano2, 128, 16, 8, 64, 128, 128, 16, 4, 4)
