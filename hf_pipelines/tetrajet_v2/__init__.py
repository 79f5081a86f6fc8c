"""TetraJet-v2 (arXiv 2510.27527) beside its baselines: gradient concentration, teacher and student, a tiny Llama."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
