"""Kernels for NVFP4 weights: one interface, one implementation an architecture.

``interface`` states what every implementation offers (contract 3 of the design);
``cpu`` is the one that needs no GPU.
"""
