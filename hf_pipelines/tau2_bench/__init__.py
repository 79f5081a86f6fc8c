"""τ²-bench (arXiv 2506.07982): a support agent and a customer talk, and both hold tools that act on one world."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
