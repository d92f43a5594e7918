// Muse Spark Open, on one GPU.
#include "layer/instance.cuh"

MUSEJAX_RANK_INSTANCE(Muse1, 8192, 128, 16, 64, 4096, 4096, 256, 8, 8)
