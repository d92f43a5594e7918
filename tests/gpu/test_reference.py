"""The layer kernel at the released sizes, one rank of 8 with exchanges looped back, beside the reference layer as XLA
compiles it: three sliding layers and a full one, each from the kernel's own input bits, 16 rows of a chain, at contexts
on both sides of the borders of blocks, chunks, the window and groups."""

import jax
import numpy as np
import pytest
from rank_layers import check_released, reference_layer, row_errors

from musejax import ffi
from musejax.bench.cases import Case, admitted_experts
from musejax.bench.layer import LoopedLayers
from musejax.cache import LayerCache
from musejax.config import FULL, SLIDING


@pytest.mark.parametrize("context", [255, 256, 2031, 2032, 2047, 2048, 4095, 4096, 33000])
def test_layers_beside_the_reference(gpu, context):
    case = Case(context=context, layers=4)
    layers = LoopedLayers(case, seed=context, taps=True)
    assert [layers.config.layer_types[i] for i in layers.numbers] == [SLIDING] * 3 + [FULL]
    stored = [LayerCache(*(jax.numpy.copy(x) for x in layers.kept[4 * n:4 * n + 2])) for n in range(4)]
    stream = layers.stream(context)
    _, ids = layers.launch(stream)
    ffi.raise_wait_error()
    before = [stream, *layers.tapped[:-1]]
    for n, number in enumerate(layers.numbers):
        want = reference_layer(layers.config, number, layers.params[n], before[n], stored[n], context,
                               admitted_experts(case, layers.config))
        check_released(row_errors(np.asarray(layers.tapped[n]), np.asarray(ids[n]), *want))
