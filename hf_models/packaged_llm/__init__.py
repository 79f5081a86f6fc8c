"""A real instruct model that needs no download, for trying and testing methods on language models."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
