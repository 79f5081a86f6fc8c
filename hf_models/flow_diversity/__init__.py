"""Feature encoders of flow diversity: any vision tower of transformers, or a small trunk for digits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
