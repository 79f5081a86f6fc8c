"""What the world costs, as ratios that hold on any machine."""

import time

from tau2_data import DATA, needs_data

from hf_pipelines.tau2_bench import Environment, ToolCall, get_domain, load_tasks
from hf_pipelines.tau2_bench.performance_world import best_cpu_seconds, measure_airline
from hf_pipelines.tau2_bench.store import json_copy


def test_call_costs_less_than_a_copy_of_the_whole_state_when_it_writes():
    env = Environment.for_task(get_domain("telecom"), load_tasks("telecom", "small")[0])
    tables = get_domain("telecom").agent_state.tables
    call = ToolCall("c", "toggle_data", {}, "user")
    one_call = best_cpu_seconds(lambda: [env.respond(call) for _ in range(100)])
    copies = best_cpu_seconds(lambda: [json_copy(tables) for _ in range(100)])
    assert one_call < copies


@needs_data
def test_airline_set_up_costs_a_hundredth_of_a_deep_copy_when_an_episode_starts():
    figures = measure_airline(DATA)
    assert figures["airline set-up over a deep copy"] < 0.01
    assert figures["airline episode set-up (ms)"] < 20


def test_generator_takes_seconds_not_minutes_when_it_makes_all_tasks():
    load_tasks("telecom", "small")
    start = time.process_time()
    load_tasks("telecom", "all")
    assert time.process_time() - start < 5  # the target is 1 s on an idle core; this bound only catches a blow-up
