// MINI, the model of the tests.
#include "layer/instance.cuh"

MUSEJAX_LAYER_INSTANCE(Mini, 128, 16, 8, 64, 128, 128, 16, 2, 8)
