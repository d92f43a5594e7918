"""Speculative decoding with a DFlash drafter: config -> params -> draft -> tree -> accept; train for training one.

Verification, the commit of accepted rows and the loop around them belong to the decode step.
"""
