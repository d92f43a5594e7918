// Muse Spark Open, one rank of 4.
#include "layer/instance.cuh"

MUSEJAX_RANK_INSTANCE(Muse4, 8192, 128, 16, 64, 4096, 4096, 256, 8, 2)
