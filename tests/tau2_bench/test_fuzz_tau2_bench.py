"""Nonsense from a model: never an exception, never a state change by a refused call."""

import random

import pytest

from hf_pipelines.tau2_bench import Environment, Message, Orchestrator, ToolCall, get_domain, load_tasks, score_run
from hf_pipelines.tau2_bench.orchestrator import MAX_STEPS

VALUES = (
    *(None, True, False, 0, -1, 2.5, 1e308, float("nan"), 10**400, "", "L1002", "C1001", "4g_only", "💥", "\x00"),
    *([], [1, "x", None], {}, {"apn_name": "internet"}, {"mmsc_url": 5}, [[["deep"]]], {"a": {"b": [{}]}}),
)


def random_arguments(rng, names):
    """Arguments with right, wrong and unknown names, or no object at all."""
    if rng.random() < 0.1:
        return rng.choice(VALUES)
    chosen = rng.sample(names, rng.randint(0, len(names))) + (["bogus"] if rng.random() < 0.2 else [])
    return {name: rng.choice(VALUES) for name in chosen}


def random_call(rng, env):
    """A call of either side with a tool of either side, a set-up primitive, or nothing."""
    kits = (env.agent, env.user)
    name = rng.choice([*kits[0].functions, *kits[1].functions, "nothing", "", "__init__"])
    function = next((kit.functions[name] for kit in kits if name in kit.functions), None)
    names = list(function.signature.parameters) if function else ["x"]
    return ToolCall("c", name, random_arguments(rng, names), rng.choice(("assistant", "user")))


@pytest.mark.parametrize("solo", [False, True])
def test_refused_calls_change_nothing_and_none_raises_when_5000_are_random(solo):
    rng, env, refused = random.Random(int(solo)), Environment(get_domain("telecom"), solo=solo), 0
    before = env.copy()
    for _ in range(5000):
        call = random_call(rng, env)
        answer = env.respond(call)
        if answer.error:
            refused += 1
            assert env.same_state(before), call
        else:
            before = env.copy()
    assert 1000 < refused < 5000  # both kinds were met
    assert env.hash() == before.hash()


class Noise:
    """A player that answers nonsense, drawn from its briefing's seed."""

    def start(self, briefing):
        """Draw anew."""
        self.rng, self.side = random.Random(f"{briefing.seed} {briefing.side}"), briefing.side
        self.env = Environment(get_domain("telecom"))

    def respond(self, view, notice=None):
        """A message, or something that is none."""
        draw = self.rng.random()
        if draw < 0.05:
            return self.rng.choice((None, "text", Message(self.side), Message(self.side, " "), 5))
        calls = [random_call(self.rng, self.env) for _ in range(self.rng.randint(1, 3))]
        text = self.rng.choice(("hello", "###STOP", "🙂", "x" * 1000))
        if draw < 0.4:
            return Message(self.side, text)
        return Message(self.side, text if draw < 0.5 else None, calls)


def test_runs_end_with_a_verdict_and_whole_protocol_when_both_players_are_random():
    tasks, ends = load_tasks("telecom", "small"), set()
    for seed in range(100):
        task = tasks[seed % len(tasks)]
        run = Orchestrator(task, Noise(), Noise(), seed=seed, max_steps=60, max_errors=40).run()
        ends.add(run.termination)
        assert run.steps <= MAX_STEPS and run.termination not in ("unexpected_error", "infrastructure_error"), (
            run.reason
        )
        verdict = score_run(task, run.messages, run.termination)
        assert verdict.info["replay_differences"] == []
        for place, message in enumerate(run.messages):
            calls = getattr(message, "tool_calls", None) or []
            answers = run.messages[place + 1 : place + 1 + len(calls)]
            assert [call.id for call in calls] == [answer.id for answer in answers]
            assert message.role == "tool" or bool(calls) != bool(message.content)
    assert len(ends) > 1


def test_verdict_equals_the_live_world_when_a_random_run_is_replayed():
    from hf_pipelines.tau2_bench.scoring import replayed

    task = load_tasks("telecom", "small")[3]
    for seed in range(30):
        game = Orchestrator(task, Noise(), Noise(), seed=seed, max_steps=60, max_errors=40)
        run = game.run()
        assert replayed(task, game.domain, run.messages)[0].hash() == game.env.hash()
