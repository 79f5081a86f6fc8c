"""Optimal stopping by kernel ridge regression (arXiv 2509.20239): pipeline, baselines and reference prices."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def register() -> None:
    """Add the task `"optimal-stopping"`."""
    from transformers import AutoModel
    from transformers.pipelines import PIPELINE_REGISTRY

    from .pipeline_krr_soc import OptimalStoppingPipeline

    if "optimal-stopping" not in PIPELINE_REGISTRY.supported_tasks:  # a second registration warns
        PIPELINE_REGISTRY.register_pipeline(
            "optimal-stopping", pipeline_class=OptimalStoppingPipeline, pt_model=AutoModel
        )
