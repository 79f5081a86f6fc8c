"""Configs of exported models point at the code that travels with them; what cannot work is refused."""

import json

import pytest

from hf_pipelines.hub_code import carry_code, own_module

CONFIG = "from transformers import PreTrainedConfig\n\nclass TConfig(PreTrainedConfig):\n    model_type = 't'\n"


def plan(**configs: dict) -> dict[str, bytes]:
    return {f"{name}.json": json.dumps(value).encode() for name, value in configs.items()}


def test_module_is_found_when_a_room_lists_the_class(write_modules):
    write_modules(a__stub="from .x import X as X\n", a__x="class X: ...\n")
    assert own_module("X") == "hf_models.room_a.x"
    assert own_module("UNet2DModel") is None


def test_component_code_is_carried_when_the_pipeline_is_of_diffusers(write_modules):
    write_modules(a__x="class X: ...\n")
    files = plan(model_index={"_class_name": "DDPMPipeline", "unet": ["hf_models.room_a.x", "X"]})
    carry_code(files)
    assert json.loads(files["model_index.json"]) == {"_class_name": "DDPMPipeline", "unet": ["x", "X"]}
    assert files["unet/x.py"] == b"class X: ...\n"
    assert set(files) == {"model_index.json", "unet/x.py"}


def test_component_is_refused_when_a_pipeline_of_diffusers_would_miss_its_companions(write_modules):
    write_modules(a__x="from .y import Y\n", a__y="Y = 1\n")
    files = plan(model_index={"_class_name": "DDPMPipeline", "unet": ["hf_models.room_a.x", "X"]})
    with pytest.raises(ValueError, match=r"DDPMPipeline of diffusers itself cannot fetch unet\.y"):
        carry_code(files)


def test_component_is_refused_when_its_modules_import_each_other(write_modules):
    write_modules(a__x="from .y import Y\n", a__y="def f():\n    from .x import X\n")
    files = plan(model_index={"_class_name": "DDPMPipeline", "unet": ["hf_models.room_a.x", "X"]})
    with pytest.raises(ValueError, match="imports itself through other modules; diffusers cannot load"):
        carry_code(files)


def test_auto_map_is_written_when_a_single_diffusers_model_is_ours():
    files = plan(config={"_class_name": "SmallFlowModel", "hidden_size": 8})
    carry_code(files)
    config = json.loads(files["config.json"])
    assert config["auto_map"] == {"AutoModel": "modeling_small_flow.SmallFlowModel"}
    assert "modeling_small_flow.py" in files


@pytest.mark.parametrize(
    "configs",
    [
        {"config": {"model_type": "bert", "architectures": ["BertModel"]}},
        {"config": {"_class_name": "UNet2DModel"}},
        {
            "model_index": {
                "_class_name": "DDPMPipeline",
                "unet": ["diffusers", "UNet2DModel"],
                "scheduler": [None, None],
            }
        },
    ],
)
def test_nothing_is_added_when_all_classes_are_the_libraries(configs):
    files = plan(**configs)
    carry_code(files)
    assert {name: json.loads(text) for name, text in files.items()} == {f"{k}.json": v for k, v in configs.items()}


def test_model_is_refused_when_no_class_is_known():
    with pytest.raises(ValueError, match="`model_type` 'unheard_of' and `architectures` \\['Nobody'\\]"):
        carry_code(plan(config={"model_type": "unheard_of", "architectures": ["Nobody"]}))


def test_model_is_refused_when_it_has_no_auto_class(write_modules):
    write_modules(
        a__configuration_t=CONFIG,
        a__modeling_t="from .configuration_t import TConfig\n\nclass TModel:\n    config_class = TConfig\n",
        a__stub="from .modeling_t import TModel as TModel\n",
    )
    with pytest.raises(ValueError, match=r"TModel has no Auto class; call `TModel\.register_for_auto_class"):
        carry_code(plan(config={"model_type": "t", "architectures": ["TModel"]}))


def test_auto_map_is_written_when_a_feature_extractor_is_ours(write_modules):
    write_modules(
        a__processing_t="from .scale import SCALE\n\nclass TExtractor: ...\n",
        a__scale="SCALE = 2\n",
        a__stub="from .processing_t import TExtractor as TExtractor\n",
    )
    files = plan(preprocessor_config={"feature_extractor_type": "TExtractor"})
    carry_code(files)
    config = json.loads(files["preprocessor_config.json"])
    assert config["auto_map"] == {"AutoFeatureExtractor": "processing_t.TExtractor"}
    assert {"processing_t.py", "scale.py"} <= set(files)


@pytest.mark.parametrize(
    ("text", "message"), [(b"{", "is not valid JSON"), (b"[]", "must hold a JSON object, got list")]
)
def test_config_is_refused_when_it_is_no_json_object(text, message):
    with pytest.raises(ValueError, match=f"config.json {message}"):
        carry_code({"config.json": text})
