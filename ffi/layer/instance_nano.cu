// NANO, the model that the package ships.
#include "layer/instance.cuh"

MUSEJAX_LAYER_INSTANCE(Nano, 128, 16, 8, 64, 128, 128, 16, 4, 8)
