// Muse Spark Open, one rank of 8.
#include "layer/instance.cuh"

MUSEJAX_LAYER_INSTANCE(Muse8, 8192, 128, 16, 64, 4096, 4096, 256, 8, 1)
