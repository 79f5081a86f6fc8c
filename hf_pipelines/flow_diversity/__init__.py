"""Flow diversity: more modes from a fixed sampling budget (arXiv 2510.09060)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
