"""Measurements: what the hardware can do, and how near the kernels come. `musejax bench` prints them."""
