"""The decoder in plain JAX: pure functions, one file an operation, and thin Flax modules around them."""
