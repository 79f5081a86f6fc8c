"""The embedded flow models: a small trained network and an exact Gaussian mixture."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
