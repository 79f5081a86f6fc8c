"""The telecom task generator: the public sets in order, new sets, and what every task must satisfy."""

from collections import Counter

import pytest
from tau2_data import DATA, needs_data, upstream_tasks

from hf_pipelines.tau2_bench import get_domain, load_tasks
from hf_pipelines.tau2_bench.domains.telecom_tasks import (
    CATEGORIES,
    Atom,
    assign_personas,
    compose,
    generate_tasks,
    init_step,
    sample_bins,
    step,
    validate,
)
from hf_pipelines.tau2_bench.tasks import read_json


@pytest.fixture(scope="module")
def everything():
    return generate_tasks("all")


@pytest.fixture(scope="module")
def full(everything):
    return [task for task in everything if "full" in task.splits]


@pytest.fixture(scope="module")
def base():
    return generate_tasks("base")


def test_sets_have_the_public_sizes_when_generated(everything, base):
    sizes = Counter(split for task in everything for split in task.splits)
    assert sizes == {"all": 3405, "full": 2285, "base": 114, "small": 20, "train": 74, "test": 40}
    assert len(base) == 114


def test_categories_have_the_public_sizes_when_composed():
    assert {name: len(compose(category)) for name, category in CATEGORIES.items()} == {
        "mobile_data_issue": 382,
        "service_issue": 47,
        "mms_issue": 2976,
    }


def test_full_set_has_the_public_counts_when_grouped_by_atoms(full):
    assert Counter(task.category for task in full) == {
        "mobile_data_issue": 254,
        "service_issue": 47,
        "mms_issue": 1984,
    }
    sizes = Counter(len(task.atoms) for task in full)
    assert [sizes[n] for n in range(1, 10)] == [20, 101, 283, 505, 596, 467, 235, 69, 9]


def test_base_set_has_the_public_make_up_when_sampled(base):
    assert Counter(t.category for t in base) == {"mobile_data_issue": 36, "service_issue": 29, "mms_issue": 49}
    assert Counter(t.persona_name for t in base) == {"None": 40, "Easy": 38, "Hard": 36}
    sizes = Counter(len(t.atoms) for t in base)
    assert [sizes[n] for n in range(2, 10)] == [25, 26, 21, 13, 11, 8, 4, 6]
    assert sum(t.must_transfer for t in base) == 20
    sides = Counter(action.requestor for t in base for action in t.actions)
    assert (round(sides["user"] / 114, 2), round(sides["assistant"] / 114, 2)) == (3.45, 1.08)


def test_train_and_test_partition_base_when_generated(base):
    train, test = (generate_tasks(split) for split in ("train", "test"))
    assert {t.id for t in train} | {t.id for t in test} == {t.id for t in base}
    assert {"base", "full", "all", "train"} == set(train[0].splits)


@needs_data
def test_ids_and_their_order_equal_the_public_file_when_generated(full):
    assert [task.id for task in full] == list(upstream_tasks("telecom", "full"))


@needs_data
def test_splits_equal_the_public_lists_when_generated(everything):
    for split, public in read_json(DATA / "telecom", "split_tasks", "telecom").items():
        assert {task.id for task in everything if split in task.splits} == set(public)
        assert split == "full" or {task.id for task in generate_tasks(split)} == set(public)


@needs_data
def test_set_up_gold_assertions_and_basis_equal_the_public_ones_when_generated(full):
    public = upstream_tasks("telecom", "full")
    different = [
        task.id
        for task in full
        for field in ("initial_state", "evaluation_criteria")
        if task.data[field] != public[task.id].data[field]
    ]
    assert different == []


def test_every_task_is_valid_when_its_gold_is_replayed(everything):
    broken = {task.id: problems for task in everything[::7] if (problems := validate(task))}
    assert broken == {}


@pytest.mark.slow
def test_all_3405_tasks_are_valid_when_their_gold_is_replayed(everything):
    assert [task.id for task in everything if validate(task)] == []


def test_validation_names_the_problem_when_the_gold_is_too_long(base):
    task = next(task for task in base if not task.must_transfer)
    data = task.to_dict()
    data["evaluation_criteria"]["actions"].append({"name": "check_status_bar", "arguments": {}, "requestor": "user"})
    broken = type(task)(data, "telecom")
    assert validate(broken) == [f"the goal is met before gold action {len(task.actions)} (check_status_bar)"]


@pytest.mark.parametrize("customer", [("C1002", "L1004"), ("C1001", "L1001")])
def test_tasks_are_valid_and_named_for_them_when_made_for_another_customer(customer):
    tasks = generate_tasks("all", for_customer=customer)
    assert all(task.id.endswith(f"@{customer[0]}/{customer[1]}") for task in tasks)
    assert [task.id for task in tasks[::80] if validate(task)] == []
    assert tasks[0].category == "mobile_data_issue"
    assert "John Smith" in tasks[0].ticket or customer[0] == "C1002"


def test_suspension_is_left_out_when_the_customer_already_has_an_overdue_bill():
    atoms = {atom for task in generate_tasks("all", for_customer=("C1002", "L1004")) for atom in task.atoms}
    assert "airplane_mode_on" in atoms and "overdue_bill_suspension" not in atoms


@pytest.mark.parametrize(
    ("customer", "words"),
    [(("C1009", "L1002"), "no customer 'C1009'"), (("C1001", "L1004"), "none of"), (("C1001", "L1003"), "Suspended")],
)
def test_customer_is_refused_when_no_task_can_start_from_it(customer, words):
    with pytest.raises(ValueError, match=words):
        generate_tasks("small", for_customer=customer)


def wifi_atom(name="wifi_radio_on"):
    """A harmless new fault for mobile data: Wi-Fi Calling in the way of nothing, mended by a toggle, plus data off."""
    return Atom(
        name,
        "data_mode",
        ("mobile_data_issue",),
        lambda subject: [init_step("user", "turn_data_off"), init_step("user", "toggle_wifi")],
        lambda subject: [step("user", "toggle_wifi"), step("user", "toggle_data")],
    )


def test_new_atom_takes_part_in_composition_when_given():
    tasks = generate_tasks("all", extra_atoms=[wifi_atom()])
    new = [task for task in tasks if "wifi_radio_on" in task.atoms]
    assert new and [task.id for task in new if validate(task)] == []
    assert all("data_mode_off" not in task.atoms for task in new)  # same selection set


def test_new_atom_is_refused_when_its_name_is_taken():
    with pytest.raises(ValueError, match="already an atom 'bad_vpn'"):
        generate_tasks("all", extra_atoms=[wifi_atom("bad_vpn")])


def test_fixed_split_is_refused_when_atoms_or_customer_differ():
    with pytest.raises(ValueError, match="fixed list"):
        generate_tasks("test", extra_atoms=[wifi_atom()])


def test_sampling_is_deterministic_and_filtered_when_asked():
    composites = assign_personas(compose(CATEGORIES["mms_issue"]))
    one, two = (sample_bins(composites, per_bin=2, seed=7, max_atoms=3, personas=["Hard"]) for _ in range(2))
    assert one == two and len(one) == 4
    assert {composite.persona for composite in one} == {"Hard"}
    assert one != sample_bins(composites, per_bin=2, seed=8, max_atoms=3, personas=["Hard"])


@pytest.mark.parametrize("arguments", [{"per_bin": 0}, {"min_atoms": 0}, {"min_atoms": 3, "max_atoms": 2}])
def test_sampling_is_refused_when_its_limits_exclude_each_other(arguments):
    with pytest.raises(ValueError, match="per_bin="):
        sample_bins([], **arguments)


def test_tickets_carry_every_consent_when_the_gold_needs_it(everything):
    for task in everything[::11]:
        assert task.category == "service_issue" or "2.0 GB" in task.ticket
        assert task.category != "service_issue" or "pay" in task.ticket


def test_scenarios_tell_the_truth_when_the_customer_travels(base):
    for task in base:
        abroad = any(atom.startswith("user_abroad") for atom in task.atoms)
        known = task.instructions["known_info"]
        assert ("France" in known) == abroad or task.category == "service_issue"
        assert task.category == "service_issue" or ("at home" in known) != abroad


def test_generated_tasks_load_when_asked_for_by_name():
    assert [len(load_tasks("telecom", split)) for split in ("base", "small")] == [114, 20]
    assert get_domain("telecom") is get_domain("telecom")
