"""Loading tasks, refusing broken ones, and what the policies must tell an agent."""

import gzip
import json
import re

import pytest
from tau2_data import DATA, needs_data, upstream_tasks

from hf_pipelines.tau2_bench import DOMAINS, Environment, Task, get_domain, load_tasks
from hf_pipelines.tau2_bench.domains.base import Domain
from hf_pipelines.tau2_bench.domains.telecom_tasks import ATOMS
from hf_pipelines.tau2_bench.store import BaseState
from hf_pipelines.tau2_bench.tasks import check_tasks


def write_mock(folder, records, splits=None, packed=False):
    """Write a mock data folder."""
    place = folder / "mock"
    place.mkdir(exist_ok=True)
    (place / "db.json").write_text(json.dumps({"tasks": {}, "users": {"user_1": {"user_id": "user_1", "tasks": []}}}))
    data = json.dumps(records).encode()
    (place / ("tasks.json.gz" if packed else "tasks.json")).write_bytes(gzip.compress(data) if packed else data)
    (place / "split_tasks.json").write_text(json.dumps(splits or {"base": [record["id"] for record in records]}))
    return folder


# --------------------------------------------------------------------------------------------------------- loading


@needs_data
@pytest.mark.parametrize(
    ("domain", "split", "count", "with_actions"),
    [
        ("airline", "base", 50, 43),
        ("airline", "train", 30, None),
        ("retail", "base", 114, 112),
        ("mock", "base", 10, 8),
    ],
)
def test_public_files_load_with_the_public_counts_when_given_a_folder(domain, split, count, with_actions):
    assert len(load_tasks(domain, split, data_dir=DATA)) == count
    if with_actions is not None:
        assert len(load_tasks(domain, split, data_dir=DATA, only_with_actions=True)) == with_actions


@needs_data
@pytest.mark.parametrize("domain", ["airline", "retail"])
def test_editions_differ_in_the_known_tasks_when_loaded(domain):
    def writes(version):
        """Id → gold write actions."""
        kinds = get_domain(domain, DATA).agent_toolkit.tools()
        return {
            task.id: [(a.name, a.arguments) for a in task.actions if a.name in kinds and kinds[a.name].kind == "write"]
            for task in upstream_tasks(domain, version=version).values()
        }

    known = json.loads((DATA / "expected" / "known_task_defects.json").read_text())[domain]["version_diffs"]
    new, old, verified = (writes(version) for version in ("1.0.1", "0.2", "verified"))
    assert [i for i in new if old[i] != new[i]] == known["gold_writes_v0.2_vs_v1.0.1"]
    assert [i for i in new if verified[i] != new[i]] == known["gold_writes_verified_vs_v1.0.1"]


@needs_data
@pytest.mark.parametrize("domain", ["telecom", "airline", "retail", "mock"])
def test_unknown_fields_survive_when_a_task_makes_the_round_trip(domain):
    for task in upstream_tasks(domain).values():
        assert Task(task.to_dict(), domain) == task
    record = {"id": "t", "voice": {"x": [1]}, "evaluation_criteria": None}
    assert Task(record, "mock").to_dict() == record


def test_packed_file_and_domain_folder_load_when_given(tmp_path):
    write_mock(tmp_path, [{"id": "t", "evaluation_criteria": None}], packed=True)
    assert [load_tasks("mock", data_dir=place)[0].id for place in (tmp_path, tmp_path / "mock")] == ["t", "t"]


def test_tasks_load_from_a_hub_data_set_when_it_is_in_the_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    repo = tmp_path / "datasets--org--tau2"
    snapshot = repo / "snapshots" / ("0" * 40) / "domains"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    write_mock(snapshot, [{"id": "from_the_hub", "evaluation_criteria": None}])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    task = load_tasks("mock", hub_id="org/tau2")[0]
    assert task.id == "from_the_hub"
    assert list(get_domain("mock", task.data_dir).agent_state.tables["users"]) == ["user_1"]


def test_tasks_come_in_the_order_asked_for_when_ids_are_given():
    ids = ["update_task_1", "create_task_1"]
    assert [task.id for task in load_tasks("mock", task_ids=ids)] == ids


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"domain": "hotel"}, "domain='hotel' is not one of telecom"),
        ({"domain": "telecom", "split": "dev"}, "split='dev' is not one of base"),
        ({"domain": "mock", "split": "dev"}, "split='dev'"),
        ({"domain": "airline"}, "data_dir=None: the airline tasks are not packaged; give data_dir="),
        ({"domain": "retail", "version": "9"}, "version='9' is not one of 1.0.1"),
        ({"domain": "telecom", "version": "0.2"}, "only airline and retail"),
        ({"domain": "mock", "data_dir": "x", "hub_id": "y"}, "not both"),
        ({"domain": "mock", "task_ids": ["nope"]}, "'nope' is not in the split"),
        ({"domain": "mock", "task_ids": []}, "no task is left"),
    ],
)
def test_request_is_refused_with_the_cure_when_an_argument_is_wrong(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        load_tasks(**arguments)


def test_layout_is_named_when_the_folder_holds_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no airline/db\.json.*airline/tasks\.json \(or \.json\.gz\)"):
        load_tasks("airline", data_dir=tmp_path)


def test_file_is_named_when_it_is_not_json(tmp_path):
    write_mock(tmp_path, [])
    (tmp_path / "mock" / "tasks.json").write_text("{")
    with pytest.raises(ValueError, match=r"tasks\.json is not JSON"):
        load_tasks("mock", data_dir=tmp_path)


BASIS = {"evaluation_criteria": {"reward_basis": ["DB", "STYLE"]}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (BASIS, "task 't': evaluation_criteria.reward_basis has 'STYLE'"),
        (
            {"evaluation_criteria": {"env_assertions": [{"env_type": "user", "func_name": "assert_fun"}]}},
            "task 't': evaluation_criteria.env_assertions: 'assert_fun' is no assertion",
        ),
        (
            {"evaluation_criteria": {"env_assertions": [{"env_type": "assistant", "func_name": "get_users"}]}},
            "'get_users' is no assertion",
        ),
        (
            {"initial_state": {"initialization_actions": [{"env_type": "pilot", "func_name": "x"}]}},
            "task 't': initial_state.initialization_actions: env_type 'pilot'",
        ),
        (
            {"initial_state": {"initialization_actions": [{"env_type": "user", "func_name": "add_notification"}]}},
            "missing argument(s): notification_id, message",
        ),
        ({"initial_state": {"initialization_data": {"db": {}}}}, "initialization_data has 'db'"),
        ({"initial_state": {"message_history": [{"role": "tool"}]}}, "answers no call"),
        ({"evaluation_criteria": {"actions": [{"arguments": {}}]}}, "cannot be read (KeyError: 'name')"),
        ({"evaluation_criteria": {"actions": [{"name": "x", "requestor": "bot"}]}}, "requestor 'bot'"),
    ],
)
def test_task_is_refused_with_its_id_and_field_when_it_is_malformed(fields, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        check_tasks([Task({"id": "t", **fields}, "mock")], get_domain("mock"))


def test_task_is_refused_when_its_id_is_there_twice():
    twice = [Task({"id": "t"}, "mock")] * 2
    with pytest.raises(ValueError, match="'t' is there twice"):
        check_tasks(twice, get_domain("mock"))


def test_database_is_refused_when_a_record_has_an_unknown_field(tmp_path):
    (tmp_path / "telecom").mkdir()
    (tmp_path / "telecom" / "db.toml").write_text('[[plans]]\nplan_id = "P1"\ncolour = "red"\n')
    with pytest.raises(ValueError, match=r"plans\['P1'\] has unknown fields \['colour'\]"):
        get_domain("telecom", tmp_path)


@needs_data
def test_packaged_tables_hold_the_public_facts_when_compared():
    fiction = {"model", "email", "address", "imei", "activation_date", "last_esim_transfer_date", "payment_methods"}
    fiction |= {"line_items", "is_esim_capable", "activated", "device_type"}

    def facts(domain):
        """The tables without what is the product's own."""
        return {
            name: {key: {f: v for f, v in record.items() if f not in fiction} for key, record in table.items()}
            for name, table in domain.agent_state.tables.items()
        }

    assert facts(get_domain("telecom")) == facts(get_domain("telecom", DATA))


# -------------------------------------------------------------------------------------------------------- policies


def telecom_policies():
    """(variant, solo, text) of the four telecom policies."""
    domain = get_domain("telecom")
    return [(v, solo, domain.policy(v, solo)) for v in domain.variants for solo in (False, True)]


@pytest.mark.parametrize(("variant", "solo", "text"), telecom_policies())
def test_policy_names_every_tool_that_a_fix_needs_when_read(variant, solo, text):
    from hf_pipelines.tau2_bench.domains.telecom_tasks import Subject

    subject = Subject.of(get_domain("telecom"))
    needed = {item["name"] for atom in ATOMS.values() if atom.fix for item in atom.fix(subject)}
    needed |= {tool["function"]["name"] for tool in Environment(get_domain("telecom")).tools("user")}
    needed |= {"transfer_to_human_agents", "get_data_usage"}
    assert [name for name in needed if name not in text] == []


@pytest.mark.parametrize(("variant", "solo", "text"), telecom_policies())
def test_policy_names_only_tools_that_exist_when_read(variant, solo, text):
    env = Environment(get_domain("telecom"), solo=True)
    known = {tool["function"]["name"] for tool in env.tools("assistant")} | {"done"}
    modes = {"4g_5g_preferred", "4g_only", "3g_only", "2g_only"}
    values = {"sms", "storage", "phone", "network", "messaging", "app_name", "permission", "mode", "apn_settings"}
    words = {re.split(r"\W", word)[0] for word in re.findall(r"`([^`]+)`", text)}
    assert words - known - modes - values == set()


@pytest.mark.parametrize(("variant", "solo", "text"), telecom_policies())
def test_policy_says_who_owns_the_phone_when_read(variant, solo, text):
    assert ("You cannot call them" in text) == (not solo)
    assert ("call it yourself" in text) == solo and ("`done`" in text) == solo


def test_manual_is_the_default_when_no_variant_is_named():
    domain = get_domain("telecom")
    assert domain.policy() == domain.policy("manual") != domain.policy("workflow")


@pytest.mark.parametrize("name", DOMAINS)
def test_every_domain_has_its_policy_and_clock_when_read(name):
    domain = get_domain(name, DATA) if name in ("telecom", "mock") or DATA else None
    if domain is None:
        pytest.skip("needs the public data")
    text = domain.policy()
    assert "transfer_to_human_agents" in text
    if name in ("telecom", "airline"):
        day, clock = domain.clock.split()[:2]
        assert day in text and clock in text


@needs_data
@pytest.mark.parametrize("name", ["airline", "retail"])
def test_policy_names_only_tools_that_exist_when_the_domain_has_single_control(name):
    domain = get_domain(name, DATA)
    words = set(re.findall(r"`(\w+)`", domain.policy()))
    assert words <= set(domain.agent_toolkit.tools())
    with pytest.raises(ValueError, match="no solo mode"):
        domain.policy(solo=True)


def test_policy_is_refused_when_the_variant_is_unknown():
    with pytest.raises(ValueError, match=r"policy='poem' is not one of \['manual', 'workflow'\]"):
        get_domain("telecom").policy("poem")


def test_solo_is_not_possible_when_both_sides_share_a_tool_name():
    telecom = get_domain("telecom")
    shared = Domain(
        "twins",
        "",
        agent_toolkit=telecom.agent_toolkit,
        agent_state=BaseState({}),
        user_toolkit=telecom.agent_toolkit,
        user_state=BaseState({}),
        policies=telecom.policies,
    )
    assert telecom.supports_solo and not shared.supports_solo


# --------------------------------------------------------------------------------------------------------- schemas


def all_schemas():
    """(domain, schema) of every packaged tool, and of airline and retail from their classes."""
    from hf_pipelines.tau2_bench.domains.airline_writes import AirlineTools
    from hf_pipelines.tau2_bench.domains.mock import MockAgentTools, MockUserTools
    from hf_pipelines.tau2_bench.domains.retail_writes import RetailTools
    from hf_pipelines.tau2_bench.domains.telecom import TelecomCarrier, TelecomUserTools

    kits = (AirlineTools, MockAgentTools, MockUserTools, RetailTools, TelecomCarrier, TelecomUserTools)
    return [tool.schema for kit in kits for tool in kit.tools().values()]


def test_every_tool_and_argument_is_described_when_listed():
    undescribed = [
        schema["function"]["name"]
        for schema in all_schemas()
        if len(schema["function"]["description"]) < 15
        or any(not p["description"] for p in schema["function"]["parameters"]["properties"].values())
    ]
    assert undescribed == []


def test_schemas_have_the_openai_form_when_checked():
    def check(schema):
        """A JSON schema that a chat template can render."""
        for part in schema.get("anyOf", ()):
            check(part)
        assert "anyOf" in schema or schema["type"] in (
            "string",
            "number",
            "integer",
            "boolean",
            "array",
            "object",
            "null",
        )
        if schema.get("type") == "object" and "properties" in schema:
            assert set(schema["required"]) <= set(schema["properties"]) and schema["additionalProperties"] is False
            for part in schema["properties"].values():
                check(part)
        if schema.get("type") == "array":
            check(schema["items"])

    for schema in all_schemas():
        assert schema["type"] == "function" and set(schema["function"]) == {"name", "description", "parameters"}
        assert json.loads(json.dumps(schema)) == schema
        check(schema["function"]["parameters"])


def test_nested_arguments_are_described_when_a_booking_takes_them():
    from hf_pipelines.tau2_bench.domains.airline_writes import AirlineTools

    parameters = AirlineTools.tools()["book_reservation"].schema["function"]["parameters"]
    assert parameters["properties"]["cabin"]["enum"] == ["business", "economy", "basic_economy"]
    assert parameters["properties"]["payment_methods"]["items"]["properties"]["amount"] == {"type": "integer"}
    assert len(parameters["required"]) == 11
