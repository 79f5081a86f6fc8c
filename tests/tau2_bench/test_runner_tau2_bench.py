"""`evaluate`: the same results for any number of workers, resume, the report, and the leaderboard's files."""

import json

import pytest

import hf_pipelines.tau2_bench as tau2
from hf_pipelines.tau2_bench.store_runs import RunStore
from hf_pipelines.tau2_bench.submit import submission, write_submission

TASKS = tau2.load_tasks("telecom", split="small")[:4]
CHANGING = ("start_time", "end_time", "duration", "messages")


def verdicts(report) -> list[dict]:
    rows = []
    for record in sorted(report.records, key=lambda r: (r.mode, r.task_id, r.trial)):
        row = {name: value for name, value in record.to_dict().items() if name not in CHANGING}
        row["messages"] = [{k: v for k, v in m.items() if k != "timestamp"} for m in record.messages]
        rows.append(row)
    return rows


def run(agent="workflow_script", tasks=TASKS, **settings):
    return tau2.evaluate(agent, tasks, **{"trials": 2, "progress": False, **settings})


def test_results_are_the_same_when_workers_and_order_change():
    user = {"kind": "scripted", "noise": {"omit": 0.3}}
    one = run("oracle_script", user=user)
    four = run("oracle_script", tasks=TASKS[::-1], user=user, workers=4)
    assert verdicts(one) == verdicts(four)
    assert len({record.seed for record in one.records}) == 2


def test_finished_runs_are_kept_when_a_run_goes_on(tmp_path):
    seen = []
    run(tasks=TASKS[:2], out=tmp_path)
    with next(iter((tmp_path / "cells").glob("*.jsonl"))).open("a") as stream:
        stream.write('{"task_id": "half a li')  # killed while writing
    report = run(out=tmp_path, on_record=seen.append)
    assert {record.task_id for record in seen} == {task.id for task in TASKS[2:]}
    assert len(report.records) == len(RunStore(tmp_path).records()) == 8
    assert verdicts(tau2.Report.load(tmp_path)) == verdicts(report)


def test_report_refuses_what_is_missing_when_not_allowed_to_be_partial(tmp_path):
    run(out=tmp_path, ranks=2, rank=0)
    with pytest.raises(ValueError, match="missing"):
        tau2.Report.load(tmp_path, tasks=TASKS)
    partial = tau2.Report.load(tmp_path, allow_partial=True, tasks=TASKS)
    assert partial.is_partial and "**PARTIAL**" in partial.to_markdown()
    with pytest.raises(ValueError, match="PARTIAL"):
        partial.to_eval_results(tmp_path, "org/tau2")
    run(out=tmp_path, ranks=2, rank=1)
    assert verdicts(tau2.Report.load(tmp_path, tasks=TASKS)) == verdicts(run())


def test_report_shows_modes_and_baselines_when_written(tmp_path):
    report = run(modes=("dual", "solo"))
    noop = run("noop")
    text = report.to_markdown({"noop": noop})
    assert report.pass_k["dual"].values == {1: 1.0, 2: 1.0} and noop.pass_k["dual"].values == {1: 0.0, 2: 0.0}
    assert "| noop | dual | 0.000" in text and "coordination gap (solo − dual) | 0.000" in text
    assert "not with the public leaderboard" in text
    saved = json.loads((report.save(tmp_path) / "report.json").read_text())
    assert saved["decomposition"]["scores"] == {"dual": 1.0, "solo": 1.0}
    assert noop.attribution and sum(noop.attribution.values()) == 8
    written = report.to_eval_results(tmp_path, "org/tau2").read_text()
    assert "tau2_bench_telecom" in written and "value: 100.0" in written


def test_submission_is_custom_and_says_why_when_the_customer_is_a_script(tmp_path):
    report = run()
    contact = {"email": "a@example.org"}
    with pytest.raises(ValueError, match=r"not standard: .*instead of a language model"):
        submission(report, "m", "o", contact, submission_type="standard")
    with pytest.raises(ValueError, match="must hold an 'email'"):
        submission(report, "m", "o", {})
    folder = write_submission(report, TASKS, tmp_path, "My Model", "Org", contact=contact)
    content = json.loads((folder / "submission.json").read_text())
    assert content["results"]["telecom"] == {
        "pass_1": 100.0,
        "pass_2": 100.0,
        "pass_3": None,
        "pass_4": None,
        "cost": None,
    }
    results = json.loads((folder / "trajectories" / content["trajectory_files"]["telecom"]).read_text())
    assert len(results["simulations"]) == 8 and len(results["tasks"]) == 4
    assert {s["termination_reason"] for s in results["simulations"]} == {"user_stop"}
    with pytest.raises(ValueError, match="exists already"):
        write_submission(report, TASKS, tmp_path, "My Model", "Org", contact=contact)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": []}, "tasks is empty"),
        ({"trials": 0}, "trials=0"),
        ({"modes": ()}, "modes is empty"),
        ({"modes": ("alone",)}, "mode='alone'"),
        ({"workers": 0}, "workers=0"),
        ({"infra": "drop"}, "infra='drop'"),
    ],
)
def test_settings_are_refused_by_name_when_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        run(**settings)


def test_configuration_is_the_same_when_written_and_read(tmp_path):
    config = tau2.RunConfig(trials=3, agent={"kind": "noop"})
    config.save(tmp_path / "c.json")
    assert tau2.RunConfig.load(tmp_path / "c.json") == config
    assert config.digest == tau2.RunConfig(trials=7, out="x", agent={"kind": "noop"}).digest
    assert config.digest != tau2.RunConfig(max_steps=100, agent={"kind": "noop"}).digest
    with pytest.raises(ValueError, match="unknown fields colour"):
        tau2.RunConfig.from_dict({"colour": 1})
