"""The base of pipelines that wrap any flow pipeline: loading, saving and placement act on the wrapped one."""

import inspect
import os
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from hf_pipelines.flow_control.pipeline_small_flow import SmallFlowPipeline, hub_arguments

_OWN_BASES = {SmallFlowPipeline.__name__: SmallFlowPipeline}


def load_flow_pipeline(path: str | os.PathLike, **kwargs) -> DiffusionPipeline:
    """Load a flow pipeline of diffusers, of this package, or of a repo with code.

    Args:
        path (`str`): A folder or a Hub id.
        kwargs: Arguments of [`~diffusers.DiffusionPipeline.from_pretrained`].

    Returns:
        [`~diffusers.DiffusionPipeline`]: the pipeline.
    """
    config = DiffusionPipeline.load_config(str(path), **hub_arguments(kwargs))
    pipeline_class = _OWN_BASES.get(_class_name(config), DiffusionPipeline)
    return pipeline_class.from_pretrained(str(path), **kwargs)


def _class_name(config: dict[str, Any]) -> str:
    """Name of the pipeline class in `model_index.json`; a repo with code writes it as [module, class]."""
    name = config["_class_name"]
    return name if isinstance(name, str) else name[-1]


class ControlledPipeline(DiffusionPipeline):
    """A pipeline whose component `base` is a flow pipeline.

    Args:
        base ([`~diffusers.DiffusionPipeline`]): Any flow-matching pipeline.

    Raises:
        TypeError: `base` is no pipeline.
    """

    _optional_components: list[str] = []  # noqa: RUF012  (as in diffusers)

    def _check_base(self, base: Any) -> None:
        if not isinstance(base, DiffusionPipeline):
            raise TypeError(f"`base` must be a DiffusionPipeline, got {type(base).__name__}.")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """Load this pipeline, or any flow pipeline, which is then wrapped.

        Args:
            pretrained_model_name_or_path (`str`): A folder or Hub id of this class, or of a flow pipeline.
            kwargs: Components of this class; all others go to the wrapped pipeline's
                [`~diffusers.DiffusionPipeline.from_pretrained`].

        Returns:
            the pipeline.
        """
        own = {key: kwargs.pop(key) for key in cls._own_arguments() if key in kwargs}
        path = str(pretrained_model_name_or_path)
        config = cls.load_config(path, **hub_arguments(kwargs))
        if _class_name(config) != cls.__name__:
            return cls(load_flow_pipeline(path, **kwargs), **own)
        # component by component: diffusers hands neither dtype nor quantization on to a pipeline inside a pipeline
        folder = Path(path) if Path(path).is_dir() else Path(cls.download(path, **hub_arguments(kwargs)))
        base = kwargs.pop("base", None) or load_flow_pipeline(folder / "base", **kwargs)
        saved = {name: config[name] for name in cls._own_arguments() if name in config}
        for name in cls._optional_components:
            present = saved.get(name) is not None and saved[name][0] is not None and name not in own
            saved[name] = cls._load_component(name, folder / name) if present else None
        return cls(base, **{**saved, **own})

    @classmethod
    def _load_component(cls, name: str, folder: Path) -> Any:
        """Load a component of this class, other than `base`, from its folder."""
        raise NotImplementedError(f"{cls.__name__} has no component {name!r}.")

    @classmethod
    def _own_arguments(cls) -> list[str]:
        return [name for name in inspect.signature(cls.__init__).parameters if name not in ("self", "base")]

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs):
        """Wrap a pipeline, or copy a wrapper, sharing all components and casting none.

        Args:
            pipeline ([`~diffusers.DiffusionPipeline`]): A flow pipeline or a wrapper of one.
            kwargs: Further components.
        """
        components = dict(pipeline.components) if isinstance(pipeline, ControlledPipeline) else {"base": pipeline}
        known = inspect.signature(cls.__init__).parameters
        return cls(**{name: value for name, value in {**components, **kwargs}.items() if name in known})

    def to(self, *args, **kwargs):
        """Move or cast the wrapped pipeline; arguments are those of [`~diffusers.DiffusionPipeline.to`]."""
        self.base.to(*args, **kwargs)
        return self

    @property
    def device(self) -> torch.device:
        """Device of the wrapped pipeline."""
        return self.base.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the wrapped pipeline."""
        return self.base.dtype

    @property
    def _execution_device(self) -> torch.device:
        return self.base._execution_device

    def enable_model_cpu_offload(self, *args, **kwargs) -> None:
        """Offload the wrapped pipeline's models but for the VAE, which decodes at every step."""
        self._keep_vae_on_device()
        self.base.enable_model_cpu_offload(*args, **kwargs)

    def enable_sequential_cpu_offload(self, *args, **kwargs) -> None:
        """Offload the wrapped pipeline's modules one by one, but for the VAE."""
        self._keep_vae_on_device()
        self.base.enable_sequential_cpu_offload(*args, **kwargs)

    def enable_group_offload(self, *args, **kwargs) -> None:
        """Offload groups of the wrapped pipeline's layers."""
        self.base.enable_group_offload(*args, **kwargs)

    def maybe_free_model_hooks(self) -> None:
        """Return offloaded models of the wrapped pipeline to their place."""
        self.base.maybe_free_model_hooks()

    def set_progress_bar_config(self, **kwargs) -> None:
        """Configure the wrapped pipeline's progress bar."""
        super().set_progress_bar_config(**kwargs)
        self.base.set_progress_bar_config(**kwargs)

    def _keep_vae_on_device(self) -> None:
        if getattr(self.base, "vae", None) is not None and "vae" not in self.base._exclude_from_cpu_offload:
            self.base._exclude_from_cpu_offload = [*self.base._exclude_from_cpu_offload, "vae"]
