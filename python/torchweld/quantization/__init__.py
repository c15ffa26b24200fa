"""Models with 4-bit weights: quantise one in place, and load the checkpoints of other libraries."""

from .apply import dequantize_, quantize_
from .checkpoint import load_quantized
from .config import Int4
from .report import QuantizeReport

__all__ = ["Int4", "QuantizeReport", "dequantize_", "load_quantized", "quantize_"]
