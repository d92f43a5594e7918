// MINI, the model of the tests.
#include "layer/phases_instance.cuh"

MUSEJAX_PHASES_INSTANCE(128, 16, 8, 64, 128, 128, 16, 2, 8)
