// Muse Spark Open, one rank of 8.
#include "layer/phases_instance.cuh"

MUSEJAX_PHASES_INSTANCE(8192, 128, 16, 64, 4096, 4096, 256, 8, 1)
