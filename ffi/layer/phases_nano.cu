// NANO, the model that the package ships.
#include "layer/phases_instance.cuh"

MUSEJAX_PHASES_INSTANCE(128, 16, 8, 64, 128, 128, 16, 4, 8)
