"""MPC-Flow: inverse problems with flow models by model predictive control (arXiv 2601.23231)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
