"""What the Hub tests share: processes that cannot import our package, and method rooms to try things on."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import hf_pipelines

SOURCE_ROOT = Path(hf_pipelines.__file__).parent.parent

# The card of a sound repository.
CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: unconditional-image-generation
tags:
- flow-matching
---

# Digits

See [the config](model/config.json) and [the paper](https://arxiv.org/abs/2601.23231), [below](#use).

```python
>>> from diffusers import DiffusionPipeline
>>> for _ in range(2):
...     pass
```
"""

# Two rooms as a developer would add them: a transformers method whose code reaches into another room, and a diffusers
# method with a pipeline inside a pipeline and a component whose code lies in three modules.
ROOMS = {
    "hf_models/toy_shared/__init__.py": """
        import lazy_loader

        __getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
    """,
    "hf_models/toy_shared/__init__.pyi": "from .scaling import ToyScale as ToyScale\n",
    "hf_models/toy_shared/scaling.py": """
        import torch

        class ToyScale(torch.nn.Module):
            def __init__(self, size: int):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(size))

            def forward(self, hidden):
                return hidden * self.weight
    """,
    "hf_models/toy_shared/offsets.py": "OFFSET = 0.25\n",
    "hf_models/toy_text/__init__.py": """
        import lazy_loader

        __getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

        def register():
            from transformers import AutoConfig, AutoModel

            from .configuration_toy_text import ToyTextConfig
            from .modeling_toy_text import ToyTextModel

            AutoConfig.register("toy_text", ToyTextConfig)
            AutoModel.register(ToyTextConfig, ToyTextModel)
            ToyTextConfig.register_for_auto_class()
            ToyTextModel.register_for_auto_class("AutoModel")
    """,
    "hf_models/toy_text/__init__.pyi": """
        from .configuration_toy_text import ToyTextConfig as ToyTextConfig
        from .modeling_toy_text import ToyTextModel as ToyTextModel
    """,
    "hf_models/toy_text/configuration_toy_text.py": """
        from transformers import PreTrainedConfig

        class ToyTextConfig(PreTrainedConfig):
            model_type = "toy_text"
            size: int = 3
    """,
    "hf_models/toy_text/modeling_toy_text.py": """
        from dataclasses import dataclass

        import torch
        from transformers import PreTrainedModel
        from transformers.utils import ModelOutput

        from hf_models.toy_shared import ToyScale
        from hf_models.toy_shared.offsets import (
            OFFSET as SHIFT,  # a comment that stays
        )
        from hf_models.toy_text.configuration_toy_text import ToyTextConfig

        @dataclass
        class ToyTextOutput(ModelOutput):
            score: torch.Tensor | None = None

        class ToyTextModel(PreTrainedModel):
            config_class = ToyTextConfig

            def __init__(self, config):
                super().__init__(config)
                self.scale = ToyScale(config.size)
                self.post_init()

            def forward(self, values):
                return ToyTextOutput(score=(self.scale(values) + SHIFT).sum(-1))
    """,
    "hf_pipelines/toy_text/__init__.py": """
        import lazy_loader

        __getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

        def register():
            from transformers import AutoModel
            from transformers.pipelines import PIPELINE_REGISTRY

            from .pipeline_toy_text import ToyTextPipeline

            PIPELINE_REGISTRY.register_pipeline("toy-task", pipeline_class=ToyTextPipeline, pt_model=AutoModel)
    """,
    "hf_pipelines/toy_text/__init__.pyi": "from .pipeline_toy_text import ToyTextPipeline as ToyTextPipeline\n",
    "hf_pipelines/toy_text/pipeline_toy_text.py": """
        import torch
        from transformers import Pipeline

        from hf_models.toy_text.modeling_toy_text import ToyTextOutput

        class ToyTextPipeline(Pipeline):
            _load_tokenizer = False
            _load_image_processor = False
            _load_feature_extractor = False
            _load_processor = False

            def _sanitize_parameters(self, **kwargs):
                return {}, {}, {}

            def preprocess(self, inputs):
                return {"values": torch.tensor(inputs["values"])[None]}

            def _forward(self, model_inputs):
                return ToyTextOutput(score=self.model(**model_inputs).score)

            def postprocess(self, model_outputs):
                return {"score": model_outputs.score.item()}
    """,
    "hf_models/toy_flow/__init__.py": """
        import lazy_loader

        __getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
    """,
    "hf_models/toy_flow/__init__.pyi": "from .modeling_toy_flow import ToyOperator as ToyOperator\n",
    "hf_models/toy_flow/modeling_toy_flow.py": """
        import torch
        from diffusers.configuration_utils import ConfigMixin, register_to_config
        from diffusers.models.modeling_utils import ModelMixin

        class ToyOperator(ModelMixin, ConfigMixin):
            @register_to_config
            def __init__(self, gain: float = 0.5):
                super().__init__()
                self.bias = torch.nn.Parameter(torch.full((1,), 0.125))

            def forward(self, images):
                from .toy_filters import blur

                return blur(images) * self.config.gain + self.bias
    """,
    "hf_models/toy_flow/toy_filters.py": """
        from .toy_kernels import KERNEL

        def blur(images):
            return sum(weight * images.roll(shift, -1) for shift, weight in enumerate(KERNEL))
    """,
    "hf_models/toy_flow/toy_kernels.py": "KERNEL = (0.25, 0.5, 0.25)\n",
    "hf_pipelines/toy_flow/__init__.py": """
        import lazy_loader

        __getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
    """,
    "hf_pipelines/toy_flow/__init__.pyi": "from .pipeline_toy_flow import ToyFlowPipeline as ToyFlowPipeline\n",
    "hf_pipelines/toy_flow/pipeline_toy_flow.py": """
        import torch
        from diffusers import DiffusionPipeline

        from hf_models.toy_flow import ToyOperator
        from hf_pipelines import SmallFlowPipeline

        class ToyFlowPipeline(DiffusionPipeline):
            _optional_components = ["operator"]

            def __init__(self, base: SmallFlowPipeline, operator: ToyOperator | None = None):
                super().__init__()
                self.register_modules(base=base, operator=operator)

            @torch.no_grad()
            def __call__(self, labels, **kwargs):
                images = self.base(labels, output_type="pt", **kwargs).images
                return images if self.operator is None else self.operator(images)
    """,
}

# What a test asks of a loaded repository, in our package and out of it: the same lines, so the same bytes must come.
DIGEST = """
import hashlib, torch

def digest(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()

def sample_digits(pipe):
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return digest(pipe([3, 8], num_inference_steps=3, generator=generator, output_type="pt").images)

def sample_nested(pipe):
    pipe.base.set_progress_bar_config(disable=True)
    return digest(pipe([3, 8], num_inference_steps=3, generator=torch.Generator().manual_seed(0)))
"""

# Builds and exports everything in one process with our package and the toy rooms.
BUILD = (
    DIGEST
    + """
import json, sys
from pathlib import Path

rooms, out = Path(sys.argv[1]), Path(sys.argv[2])
import hf_models, hf_pipelines
from hf_models._rooms import register_rooms
for package in (hf_models, hf_pipelines):
    package.__path__.append(str(rooms / package.__name__))
    register_rooms(package.__name__, [str(rooms / package.__name__)])  # as on import

from transformers import AutoConfig, AutoModel, pipeline
from hf_models.toy_flow import ToyOperator
from hf_models.toy_text import ToyTextConfig, ToyTextModel
from hf_pipelines import SmallFlowPipeline, hub
from hf_pipelines.toy_flow import ToyFlowPipeline

base = SmallFlowPipeline.from_pretrained(hub.repo("digits-16x16"))
reference = {"digits": sample_digits(base)}
nested = ToyFlowPipeline(base=base, operator=ToyOperator())
nested.save_pretrained(out / "saved" / "toy-nested")
reference["nested"] = sample_nested(nested)
ToyFlowPipeline(base=base).save_pretrained(out / "saved" / "toy-nested-bare")

model = ToyTextModel(ToyTextConfig(size=2))
model.scale.weight.data.copy_(torch.tensor([2.0, 3.0]))
model.save_pretrained(out / "saved" / "toy-text")
reference["auto"] = type(AutoModel.from_pretrained(out / "saved" / "toy-text")).__module__
reference["task"] = pipeline("toy-task", model=str(out / "saved" / "toy-text"))({"values": [1.0, 2.0]})

hub.export("digits-16x16", out / "digits-16x16")
for name in ("toy-nested", "toy-nested-bare", "toy-text"):
    hub.export(out / "saved" / name, out / name)
hub.export("digits", out / "digits", kind="dataset")
(out / "reference.json").write_text(json.dumps(reference))
"""
)

# Runs jobs in children forked from a process that cannot import our package: each starts with clean module caches.
RUN_JOBS = """
import importlib.abc, json, os, shutil, sys, traceback

task = json.loads(sys.argv[1])

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hf_models", "hf_pipelines", "datasets_scripts"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
exec(task["prelude"])
for name, source in task["jobs"].items():
    shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)
    if os.fork() == 0:
        try:
            scope = dict(globals())
            exec(source, scope)
            answer = {"result": scope["result"]}
        except BaseException as error:
            answer = {"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        with open(os.path.join(task["answers"], name + ".json"), "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.wait()
"""


def write_rooms(root: Path) -> None:
    """Write the toy rooms as further portions of our packages."""
    for name, source in ROOMS.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source).lstrip(), encoding="utf-8")


def environment(scratch: Path, **extra: str) -> dict[str, str]:
    """Environment variables with all caches in `scratch`, one thread and no network beyond localhost."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PYTHONPATH"))}
    caches = {"HF_HOME": str(scratch / "hf"), "HF_MODULES_CACHE": str(scratch / "modules")}
    return kept | caches | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | extra


def run_clean(scratch: Path, jobs: dict[str, str], prelude: str = DIGEST, **extra: str) -> dict[str, dict]:
    """Run each job's code where our package cannot be imported; a job leaves its answer in `result`."""
    answers = scratch / "answers"
    answers.mkdir(parents=True)
    task = {"jobs": jobs, "prelude": prelude, "answers": str(answers)}
    command = [sys.executable, "-I", "-c", RUN_JOBS, json.dumps(task)]
    done = subprocess.run(command, cwd=scratch, env=environment(scratch, **extra), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: json.loads((answers / f"{name}.json").read_text()) for name in jobs}


def run_python(code: str, *arguments: str | Path, cwd: Path, **extra: str) -> str:
    """Run code in a fresh process that can import our package; returns what it prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    variables = environment(cwd, PYTHONPATH=str(SOURCE_ROOT), **extra)
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
