"""Turning a checkpoint of one dialect into another: `assay-kernels convert`."""

from assay_kernels.convert.run import ConversionError, Outcome, convert, render

__all__ = ["ConversionError", "Outcome", "convert", "render"]
