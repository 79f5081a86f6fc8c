"""Exported repositories load and answer in a process that cannot import our package."""

import json
import shutil
from pathlib import Path

import pytest
from hub_processes import DIGEST, run_clean, run_python
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_pipelines import hub

WARM = DIGEST + "from diffusers import DiffusionPipeline\nfrom transformers import AutoModel, AutoConfig, pipeline\n"

SHIPPED = [info.name for info in hub.list_repos() if info.kind == "model"]
LOAD_ANY = """
import json, pathlib, transformers
folder = pathlib.Path({folder!r})
if (folder / "model_index.json").is_file():
    result = type(DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)).__module__
else:
    names = json.loads((folder / "config.json").read_text()).get("auto_map", {{"AutoConfig": None}})
    loaded = [getattr(transformers, name).from_pretrained(folder, trust_remote_code=True) for name in names]
    result = type(loaded[-1]).__module__
"""


@pytest.fixture(scope="module")
def answers(exports, tmp_path_factory) -> dict:
    """What the exported repositories answer in clean processes."""

    def load(name: str) -> str:
        return f"DiffusionPipeline.from_pretrained({str(exports / name)!r}, trust_remote_code=True)"

    toy = repr(str(exports / "toy-text"))
    jobs = {
        "digits": f"result = sample_digits({load('digits-16x16')})",
        "nested": f"result = sample_nested({load('toy-nested')})",
        "bare": f"result = {load('toy-nested-bare')}.operator is None",
        "auto": f"""
model = AutoModel.from_pretrained({toy}, trust_remote_code=True)
result = [type(model).__name__, model(torch.tensor([[1.0, 2.0]])).score.tolist()]""",
        "config": f"result = AutoConfig.from_pretrained({toy}, trust_remote_code=True).size",
        "task": f"""
result = pipeline("toy-task", model={toy}, trust_remote_code=True)({{"values": [1.0, 2.0]}})""",
        "import": "import hf_models; result = None",
    }
    shipped = tmp_path_factory.mktemp("shipped")
    for name in SHIPPED:
        jobs[f"shipped {name}"] = LOAD_ANY.format(folder=str(hub.export(name, shipped / name, kind="model")))
    return run_clean(tmp_path_factory.mktemp("clean"), jobs, WARM)


def test_process_is_clean_when_our_package_is_blocked(answers):
    assert answers["import"]["error"] == "ModuleNotFoundError"


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_repository_loads_when_our_package_is_absent(answers, name):
    assert "result" in answers[f"shipped {name}"], answers[f"shipped {name}"]["traceback"]
    config = Path(hub.repo(name)) / "config.json"
    plain = config.is_file() and json.loads(config.read_text())["model_type"] in CONFIG_MAPPING_NAMES
    libraries = {"transformers"} if plain else {"diffusers_modules", "transformers_modules"}
    assert answers[f"shipped {name}"]["result"].partition(".")[0] in libraries


def test_images_are_bit_equal_when_the_pipeline_comes_from_an_export(answers, reference):
    assert answers["digits"] == {"result": reference["digits"]}


def test_images_are_bit_equal_when_a_nested_pipeline_comes_from_an_export(answers, reference):
    assert answers["nested"] == {"result": reference["nested"]}


def test_pipeline_loads_when_an_optional_component_is_absent(answers):
    assert answers["bare"] == {"result": True}


def test_auto_model_answers_when_the_code_comes_from_an_export(answers):
    # (2·1 + 0.25) + (3·2 + 0.25)
    assert answers["auto"] == {"result": ["ToyTextModel", [8.5]]}


def test_auto_config_loads_when_the_code_comes_from_an_export(answers):
    assert answers["config"] == {"result": 2}


def test_task_answers_when_the_pipeline_class_comes_from_an_export(answers, reference):
    assert reference["task"] == {"score": 8.5}
    assert answers["task"] == {"result": reference["task"]}


def test_classes_are_ours_when_the_room_registered_them_on_import(reference):
    assert reference["auto"] == "hf_models.toy_text.modeling_toy_text"


def test_nested_code_is_byte_identical_when_it_plays_two_roles(exports):
    base = exports / "toy-nested" / "base"
    assert (base / "modeling_small_flow.py").read_bytes() == (base / "model/modeling_small_flow.py").read_bytes()
    operator = exports / "toy-nested" / "operator"
    for name in ("modeling_toy_flow.py", "toy_filters.py", "toy_kernels.py"):
        assert (operator / name).read_bytes() == (exports / "toy-nested" / name).read_bytes()


def test_source_is_unchanged_when_a_module_imports_nothing_of_ours(exports):
    source = Path(hub.__file__).parent.parent / "hf_models/small_flow/modeling_small_flow.py"
    assert (exports / "digits-16x16/model/modeling_small_flow.py").read_bytes() == source.read_bytes()


def test_no_module_of_ours_is_named_when_code_is_exported(exports):
    files = [file for file in exports.rglob("*.py") if "saved" not in file.parts]
    assert len(files) > 10
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            assert not line.startswith(("from hf_", "import hf_")), f"{file}: {line}"


def test_config_points_at_the_code_when_a_transformers_model_is_exported(exports):
    config = json.loads((exports / "toy-text/config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "configuration_toy_text.ToyTextConfig",
        "AutoModel": "modeling_toy_text.ToyTextModel",
    }
    assert config["custom_pipelines"] == {
        "toy-task": {"impl": "pipeline_toy_text.ToyTextPipeline", "pt": ["AutoModel"]}
    }
    names = {path.name for path in (exports / "toy-text").glob("*.py")}
    assert names == {
        *("configuration_toy_text.py", "modeling_toy_text.py", "pipeline_toy_text.py", "scaling.py", "offsets.py")
    }


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_export_is_the_same_when_it_is_repeated(exports, tmp_path):
    source = exports / "saved/toy-nested-bare"
    before = tree(hub.export(source, tmp_path / "out"))
    assert tree(hub.export(source, tmp_path / "out")) == before
    assert tree(hub.export(source, tmp_path / "other")) == before


@pytest.mark.parametrize("name", ["digits-16x16", "toy-nested"])
def test_export_changes_nothing_when_its_source_is_an_export(exports, tmp_path, name):
    hub.export(exports / name, tmp_path / name)
    assert tree(tmp_path / name) == tree(exports / name)


def test_dataset_opens_when_exported(exports):
    from datasets import get_dataset_config_names, load_dataset

    folder = str(exports / "digits")
    data = load_dataset(folder, get_dataset_config_names(folder)[0], split="test", cache_dir=str(exports / "cache"))
    assert data.num_rows == 200


def test_source_is_untouched_when_exported(tmp_path):
    before = tree(Path(hub.repo("digits-8x8")))
    hub.export("digits-8x8", tmp_path / "out")
    assert tree(Path(hub.repo("digits-8x8"))) == before


def test_foreign_files_stay_when_out_is_not_an_export(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"`out` .* holds files that no export wrote \(notes.txt\)"):
        hub.export("digits-8x8", tmp_path)
    assert tree(tmp_path) == {"notes.txt": b"mine"}


def test_foreign_files_stay_when_they_lie_in_an_export(tmp_path):
    hub.export("digits-8x8", tmp_path / "out")
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        hub.export("digits-8x8", tmp_path / "out")
    assert (tmp_path / "out/notes.txt").read_text() == "mine"


def test_stale_files_go_when_an_export_is_written_again(tmp_path):
    source = tmp_path / "repo"
    shutil.copytree(hub.repo("digits-8x8"), source)
    (source / "old.txt").write_text("old")
    hub.export(source, tmp_path / "out")
    (source / "old.txt").unlink()
    hub.export(source, tmp_path / "out")
    assert not (tmp_path / "out/old.txt").exists()


def test_export_is_refused_when_out_lies_in_the_repository(tmp_path):
    source = tmp_path / "repo"
    shutil.copytree(hub.repo("digits-8x8"), source)
    with pytest.raises(ValueError, match="must not lie in one another"):
        hub.export(source, source / "out")


def test_export_is_refused_when_a_link_leads_out_of_the_repository(tmp_path):
    source = tmp_path / "repo"
    shutil.copytree(hub.repo("digits-8x8"), source)
    (source / "leak").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match="leak is a link that leads out"):
        hub.export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["", "..", "a/b", "../digits-16x16", "a\\b", ".hidden", "a..b"])
def test_repo_name_is_refused_when_it_is_not_plain(name):
    with pytest.raises(ValueError, match="`name` must be the plain name"):
        hub.repo(name)


def test_repo_is_a_hub_id_when_it_is_not_shipped():
    assert hub.repo("no-such-repo") == "closedloop/no-such-repo"


def test_repo_is_a_folder_when_it_is_shipped():
    assert (Path(hub.repo("digits-16x16")) / "model_index.json").is_file()


def test_name_is_refused_when_nothing_has_it(tmp_path):
    with pytest.raises(ValueError, match=r"one of .*digits-16x16 \(model\).*got 'no-such-repo'"):
        hub.export("no-such-repo", tmp_path / "out")


def test_kind_is_refused_when_it_is_unknown(tmp_path):
    with pytest.raises(ValueError, match=r"`kind` must be one of \('model', 'dataset', 'space'\).*got 'pipeline'"):
        hub.export("digits-16x16", tmp_path / "out", kind="pipeline")
    with pytest.raises(ValueError, match="`kind` must be one of"):
        hub.asset_root("tests")


def test_repos_are_listed_when_shipped():
    found = {(info.name, info.kind): info for info in hub.list_repos()}
    assert found["digits-16x16", "model"].size > 4_000_000
    assert found["digits", "dataset"].path is None


def test_shipped_repositories_are_found_when_installed_from_a_wheel(tmp_path):
    root = Path(hub.__file__).parent.parent
    for package in ("hf_models", "hf_pipelines", "datasets_scripts"):
        shutil.copytree(root / package, tmp_path / "site" / package, ignore=shutil.ignore_patterns("__pycache__"))
    shipped = tmp_path / "site/hf_pipelines/_shipped/model_cards/digits-8x8"
    shutil.copytree(hub.repo("digits-8x8"), shipped)
    code = "import sys; sys.path.insert(0, sys.argv[1]); from hf_pipelines import hub; print(hub.repo('digits-8x8'))"
    assert run_python(code, tmp_path / "site", cwd=tmp_path).strip() == str(shipped)
