"""PowerSGD gradient compression (Vogels et al. 2019, arXiv:1905.13727) for training on slow links."""

from powersgd_triton.comm.control import DisagreementError
from powersgd_triton.compressor import Compressed, Compressor
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.saved_state import LoadReport
from powersgd_triton.integrations.attach import attach

__all__ = ["Compressed", "Compressor", "DisagreementError", "LoadReport", "PowerSGDConfig", "attach"]
__version__ = "0.1.0"
