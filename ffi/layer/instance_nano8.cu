// NANO, one rank of 8.
#include "layer/instance.cuh"

MUSEJAX_RANK_INSTANCE(Nano8, 128, 16, 8, 64, 128, 128, 16, 4, 1)
