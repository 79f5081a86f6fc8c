"""Attention with Routed Memory (arXiv 2609.24417) beside its baselines: budgeted caches and densely written slots."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
