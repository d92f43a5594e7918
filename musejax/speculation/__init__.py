"""Speculative decoding with a DFlash drafter: config -> params -> draft -> tree -> accept; train for training one.
`packing` and `draft_kernels` are what the `megakernel` implementation runs in place of `draft`.

Verification, the commit of accepted rows and the loop around them belong to the decode step.
"""
