"""The `megakernel` implementation of the decoder: FFI calls of the compiled library, and the pass made of them; and the
calls of the drafter's passes, their phases and the tree (draft_calls.py), for musejax/speculation/draft_kernels.py.

Bits are promised here (README, "Same bits"): on 1, 2, 4 or 8 devices, for a row alone or among others, for any number
of threads. So no floating-point arithmetic runs in XLA: it moves data (gathers, all-gathers, selects) and counts.
"""
