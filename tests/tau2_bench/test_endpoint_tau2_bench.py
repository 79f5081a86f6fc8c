"""A chat model behind HTTP: real requests to a server of this test, OpenAI-shaped, with all that goes wrong."""

import json
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest

from hf_pipelines.tau2_bench import ContextWindowExceeded, InfrastructureError, Orchestrator, load_tasks, score_run
from hf_pipelines.tau2_bench.agents.build import build_agent, describe
from hf_pipelines.tau2_bench.agents.endpoint import EndpointChat
from hf_pipelines.tau2_bench.users.build import build_user

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "refuel_data",
            "description": "Add data.",
            "parameters": {"type": "object", "properties": {"gb_amount": {"type": "number"}}, "required": []},
        },
    }
]


def completion(content=None, calls=(), finish="stop", **extra):
    """The body of a chat completion."""
    wire = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": wire or None, **extra}
    choice = {"index": 0, "finish_reason": finish, "message": message}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


@contextmanager
def serving(*answers):
    """A server that gives `(status, body)` one after the other, or waits where the status is a number of seconds."""
    requests, headers = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(body)
            headers.append(dict(self.headers))
            answer = answers[min(len(requests), len(answers)) - 1]
            status, content = answer(body) if callable(answer) else answer
            if isinstance(status, float):
                time.sleep(status)
                status = 200
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(OSError):  # the client may have given up
                self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests, headers
    finally:
        server.shutdown()
        server.server_close()


ASK = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def requests_allowed(monkeypatch):
    """The tests run with the Hub switched off; that switch also stops requests to a local server."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def chat(url, **options):
    """A chat that waits little."""
    return EndpointChat(url, model="m", **{"backoff_s": 0.01, "timeout_s": 5, **options})


def test_text_and_usage_come_back_when_the_server_answers():
    with serving((200, completion("Hello."))) as (url, requests, headers):
        answer = chat(url, api_key="secret-key")(ASK, tools=TOOLS, tool_choice="auto", seed=7)
    assert answer["content"] == "Hello." and answer["tool_calls"] == [] and answer["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 3}
    sent = requests[0]
    assert (sent["model"], sent["seed"], sent["temperature"], sent["tool_choice"]) == ("m", 7, 0.0, "auto")
    assert sent["messages"] == ASK and sent["tools"] == TOOLS and not sent.get("stream")
    assert headers[0].get("authorization", headers[0].get("Authorization")) == "Bearer secret-key"


def test_calls_and_reasoning_come_back_apart_when_the_model_thinks():
    body = completion("<think>hm</think>", [("refuel_data", {"gb_amount": 2})], reasoning_content="let me see")
    with serving((200, body)) as (url, _, _):
        answer = chat(url)(ASK, tools=TOOLS)
    assert answer["content"] is None and answer["reasoning"] == "let me see\nhm"
    (call,) = answer["tool_calls"]
    assert call["name"] == "refuel_data" and json.loads(call["arguments"]) == {"gb_amount": 2}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_request_is_tried_again_when_the_server_is_busy_or_broken(status):
    with serving((status, {"error": "no"}), (status, {"error": "no"}), (200, completion("At last."))) as (
        url,
        sent,
        _,
    ):
        assert chat(url)(ASK)["content"] == "At last."
    assert len(sent) == 3


@pytest.mark.parametrize("status", [429, 500])
def test_infrastructure_error_when_the_server_stays_broken(status):
    with (
        serving((status, {"error": "no"})) as (url, sent, _),
        pytest.raises(InfrastructureError, match=f"3 tries.*{status}"),
    ):
        chat(url, retries=2)(ASK)
    assert len(sent) == 3


def test_infrastructure_error_at_once_when_the_key_is_refused():
    with serving((401, {"error": "no"})) as (url, sent, _), pytest.raises(InfrastructureError, match="1 tries"):
        chat(url)(ASK)
    assert len(sent) == 1


def test_infrastructure_error_when_the_server_does_not_answer_in_time():
    with serving((1.0, completion("late"))) as (url, sent, _), pytest.raises(InfrastructureError, match="2 tries"):
        chat(url, timeout_s=0.2, retries=1)(ASK)
    assert len(sent) == 2


def test_infrastructure_error_when_nobody_listens():
    with serving((200, {})) as (url, _, _):
        pass
    with pytest.raises(InfrastructureError):
        chat(url, retries=1)(ASK)


def test_infrastructure_error_when_the_body_is_no_completion():
    with serving((200, b"<html>")) as (url, _, _), pytest.raises(InfrastructureError):
        chat(url, retries=1)(ASK)
    with serving((200, {"choices": []})) as (url, _, _), pytest.raises(InfrastructureError):
        chat(url, retries=1)(ASK)


def test_context_window_exceeded_when_the_server_says_so():
    error = {"error": {"message": "This model's maximum context length is 100 tokens."}}
    with serving((400, error)) as (url, _, _), pytest.raises(ContextWindowExceeded):
        chat(url)(ASK)


def test_a_run_ends_with_infrastructure_error_when_the_endpoint_is_down():
    task = load_tasks("telecom", "small")[0]
    with serving((500, {"error": "no"})) as (url, _, _):
        make = build_agent({"kind": "endpoint", "base_url": url, "model": "m", "retries": 1, "backoff_s": 0.01})
        run = Orchestrator(task, make(), build_user("scripted")()).run()
    assert run.termination == "infrastructure_error" and "2 tries" in run.reason
    assert score_run(task, run.messages, run.termination).reward == 0


def test_a_task_is_solved_over_http_when_the_model_knows_what_to_do():
    task = next(t for t in load_tasks("telecom", "small") if t.atoms == ("user_abroad_roaming_disabled_on",))

    def model(body):
        said = [message["content"] or "" for message in body["messages"]]
        called = [call for m in body["messages"] for call in m.get("tool_calls") or ()]
        if not called:
            return 200, completion(calls=[("enable_roaming", {"customer_id": "C1001", "line_id": "L1002"})])
        assert json.loads(called[0]["function"]["arguments"])["line_id"] == "L1002"
        assert body["messages"][-1]["role"] != "tool" or "enabled" in said[-1]
        return 200, completion("Does your phone work now?")

    with serving(model) as (url, sent, _):
        make = build_agent({"kind": "endpoint", "base_url": url, "model": "m"})
        run = Orchestrator(task, make(), build_user("scripted")()).run()
    assert run.termination == "user_stop" and score_run(task, run.messages, run.termination).success
    assert sent[0]["messages"][0]["role"] == "system" and "<policy>" in sent[0]["messages"][0]["content"]


def test_the_key_is_nowhere_when_a_chat_is_described():
    described = describe(EndpointChat("http://127.0.0.1:1/v1", "m", api_key="secret-key", max_tokens=9))
    assert described == {
        "kind": "endpoint",
        "base_url": "http://127.0.0.1:1/v1",
        "model": "m",
        "temperature": 0.0,
        "max_tokens": 9,
    }
    assert "secret" not in json.dumps(describe({"kind": "endpoint", "base_url": "http://x", "api_key": "secret-key"}))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"base_url": "ftp://x"}, "base_url='ftp://x'"), ({"base_url": "http://x", "retries": -1}, "retries=-1")],
)
def test_value_error_when_an_argument_is_out_of_range(options, words):
    with pytest.raises(ValueError, match=words):
        EndpointChat(**options)
