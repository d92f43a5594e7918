// Muse Spark Open, one rank of 2.
#include "layer/instance.cuh"

MUSEJAX_RANK_INSTANCE(Muse2, 8192, 128, 16, 64, 4096, 4096, 256, 8, 4)
