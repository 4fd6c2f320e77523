"""`LLM` over an engine whose answers are decided beforehand."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pagewire import LLM, SamplingParams, load_chat_template
from pagewire.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from pagewire.outputs import FinishReason, RequestTimes
from pagewire_frontend.engine_client.base import EngineRequest, TokenDelta
from pagewire_frontend.engine_client.in_process import InProcessEngineClient
from pagewire_frontend.engine_client.mailbox import Mailbox
from pagewire_frontend.llm_outputs import RequestMetrics
from tests.fakes import small_tokenizers
from tests.fakes.fake_engine import build_fake_engine, fake_config
from tests.fakes.replaying_client import ReplayingClient, turns_of

TOKENIZER = small_tokenizers.byte_level()
FILES = small_tokenizers.byte_level_files(
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def echo(request: EngineRequest) -> Sequence[list[TokenDelta] | Exception]:
    """Answers with the prompt, as far as max_tokens allows."""
    params = request.sampling_params
    answer = request.prompt_token_ids[: params.max_tokens]
    return [
        turn
        for index in range(params.n)
        for turn in turns_of(answer, [3, 1, 2], sequence_index=index)
    ]


def client(**options: object) -> ReplayingClient:
    return ReplayingClient(FILES, echo, vocab_size=TOKENIZER.vocab_size, **options)  # type: ignore[arg-type]  # keyword options


@pytest.fixture
def fake() -> ReplayingClient:
    return client()


@pytest.fixture
def llm(fake: ReplayingClient) -> Iterator[LLM]:
    with LLM.from_client(fake) as llm:
        yield llm


def test_an_output_tells_how_long_its_phases_took() -> None:
    def answer(request: EngineRequest) -> Sequence[list[TokenDelta] | Exception]:
        turns = turns_of(request.prompt_token_ids)
        turns[-1][0].times = RequestTimes(1.0, 2.0, 4.0, 3, 5, 6, 3.5)
        return turns

    fake = ReplayingClient(FILES, answer, vocab_size=TOKENIZER.vocab_size)
    with LLM.from_client(fake) as llm:
        (output,) = llm.generate("Hello", use_tqdm=False)
    assert output.metrics == RequestMetrics(1.0, 2.0, 4.0, steps=6, step_s=3.5, preemptions=5)
    assert (output.metrics.time_to_first_token_s, output.metrics.total_s) == (3.0, 7.0)
    assert output.num_cached_tokens == 3


def test_prompts_of_every_kind_come_back_in_order(llm: LLM) -> None:
    ids = TOKENIZER.encode("Some ids")
    prompts = ["One prompt", {"prompt": "Two"}, {"prompt_token_ids": ids}, "Four"] * 30
    outputs = llm.generate(prompts, SamplingParams(max_tokens=50), use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert texts == ["One prompt", "Two", "Some ids", "Four"] * 30
    assert outputs[0].prompt == "One prompt"
    assert (outputs[2].prompt, outputs[2].prompt_token_ids) == (None, ids)
    assert outputs[0].outputs[0].finish_reason == "length"


def test_one_prompt_needs_no_list(llm: LLM) -> None:
    (output,) = llm.generate("One", SamplingParams(n=2, max_tokens=9), use_tqdm=False)
    assert [answer.text for answer in output.outputs] == ["One", "One"]
    (output,) = llm.generate({"prompt": "Two"}, use_tqdm=False)
    assert output.outputs[0].text == "Two"
    assert llm.generate([], use_tqdm=False) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n) for n in (1, 3)]
    outputs = llm.generate(["One prompt here"] * 2, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3]


def test_a_list_of_parameters_of_another_length_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidArgumentError, match="3 sets of parameters for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()] * 3)


@pytest.mark.parametrize("params", [{"max_tokens": 1}, [5], 5])
def test_parameters_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="must be SamplingParams"):
        llm.generate(["a"], params)


def test_max_tokens_defaults_to_16_for_generate_and_to_the_context_for_chat(
    llm: LLM, fake: ReplayingClient
) -> None:
    llm.generate("x", use_tqdm=False)
    llm.chat([{"role": "user", "content": "x"}], use_tqdm=False)
    generate, chat = fake.requests
    assert generate.sampling_params.max_tokens == 16
    assert chat.sampling_params.max_tokens == 256 - len(chat.prompt_token_ids)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("", "prompt 1: is empty"),
        ({"prompt_token_ids": [10**6]}, "prompt 1: 1000000 is outside"),
        ({"text": "x"}, "needs prompt or prompt_token_ids"),
        ({"prompt_token_ids": ["x"]}, "whole numbers"),
        ({"prompt": 3}, "prompt must be text"),
        (3, "must be text"),
    ],
)
def test_one_bad_prompt_is_refused_before_any_runs(
    llm: LLM, fake: ReplayingClient, bad: object, says: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        llm.generate(["good", bad, "good"], use_tqdm=False)  # type: ignore[list-item]  # what users pass
    assert not fake.requests


def test_conversations_go_through_the_template(llm: LLM) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    params = SamplingParams(max_tokens=50)
    (one,) = llm.chat(hello, params, use_tqdm=False)
    assert one.prompt == one.outputs[0].text == "user: Hello\nassistant:"
    two = llm.chat([hello, [{"role": "user", "content": "Bye"}]], params, use_tqdm=False)
    assert [output.prompt for output in two] == [
        "user: Hello\nassistant:",
        "user: Bye\nassistant:",
    ]
    closed = llm.chat(hello, params, add_generation_prompt=False, use_tqdm=False)
    assert closed[0].prompt == "user: Hello\n"
    open_ = llm.chat(
        [*hello, {"role": "assistant", "content": "Sure"}],
        params,
        continue_final_message=True,
        use_tqdm=False,
    )
    assert open_[0].prompt == "user: Hello\nassistant: Sure"


def test_a_chat_may_bring_its_own_template_and_variables(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{{ mood }} {{ messages[0].content }} {{ tools | length }}")
    (output,) = llm.chat(
        [{"role": "user", "content": "Hello"}],
        chat_template=load_chat_template(str(path)),
        chat_template_kwargs={"mood": "calm"},
        tools=[{"type": "function", "function": {"name": "f"}}],
        use_tqdm=False,
    )
    assert output.prompt == "calm Hello 1"


def test_a_bad_conversation_is_named_and_nothing_runs(llm: LLM, fake: ReplayingClient) -> None:
    good = [{"role": "user", "content": "Hello"}]
    with pytest.raises(InvalidArgumentError, match="conversation 1: must be one of"):
        llm.chat([good, [{"role": "nobody", "content": "x"}]], use_tqdm=False)
    with pytest.raises(InvalidArgumentError, match="list of messages"):
        llm.chat([], use_tqdm=False)
    assert not fake.requests


def test_progress_tells_input_and_output_speed(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["One", "Two"])
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "input " in shown
    assert "output " in shown
    llm.generate(["One", "Two"], use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_it_works_from_within_a_running_event_loop(llm: LLM) -> None:
    async def cell() -> str:
        return llm.generate("One", use_tqdm=False)[0].outputs[0].text

    assert asyncio.run(cell()) == "One"


def test_threads_may_share_it(llm: LLM) -> None:
    texts: dict[int, list[str]] = {}

    def work(n: int) -> None:
        outputs = llm.generate([f"thread {n}"] * 5, use_tqdm=False)
        texts[n] = [output.outputs[0].text for output in outputs]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {n: [f"thread {n}"] * 5 for n in range(4)}


def test_get_tokenizer_gives_the_models(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("Hello there")) == "Hello there"


def test_an_interrupt_aborts_what_runs_and_leaves_the_model_usable() -> None:
    fake = client(endless=True)
    fake._answer = lambda _: []
    with LLM.from_client(fake) as llm:
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], use_tqdm=False)
        assert [stream.aborts for stream in fake.streams] == [1, 1, 1]
        fake._answer = echo
        assert llm.generate("One", use_tqdm=False)[0].outputs[0].text == "One"


def test_a_request_that_fails_ends_the_call_and_aborts_the_others() -> None:
    fake = client(endless=True)
    fake._answer = lambda r: [UnavailableError("gone")] if len(fake.requests) == 2 else []
    with LLM.from_client(fake) as llm, pytest.raises(UnavailableError, match="gone"):
        llm.generate(["a", "b", "c"], use_tqdm=False)
    assert all(stream.aborts == 1 for stream in fake.streams)


def test_after_shutdown_it_says_so(fake: ReplayingClient) -> None:
    llm = LLM.from_client(fake)
    llm.shutdown()
    llm.shutdown()
    for call in (lambda: llm.generate("x"), llm.get_tokenizer, lambda: llm.chat([])):
        with pytest.raises(FailedPreconditionError, match="shut down"):
            call()


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="blok_size: is not a setting"):
        LLM("somewhere", blok_size=4)
    with pytest.raises(InvalidArgumentError, match="block_size"):
        LLM("somewhere", block_size=0)


def test_a_bad_template_is_refused_at_once(fake: ReplayingClient) -> None:
    with pytest.raises(InvalidArgumentError, match="line 1"):
        LLM.from_client(fake, chat_template="{% if %}")


def test_a_script_that_forgets_to_shut_down_ends_quietly(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from pagewire import LLM\n"
        "from tests.unit.text.test_llm_offline import client\n"
        "fake = client()\n"
        "async def close():\n"
        "    print('closed')\n"
        "fake.close = close\n"
        "llm = LLM.from_client(fake)\n"
        "print(llm.generate('One', use_tqdm=False)[0].outputs[0].text)\n"
    )
    ended = run_script(script)
    assert ended.stdout.split() == ["One", "closed"]
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_prompt_wakes_nobody_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    wakes: list[Mailbox] = []
    wake = Mailbox.wake

    def counted(mailbox: Mailbox) -> None:
        wakes.append(mailbox)
        wake(mailbox)

    monkeypatch.setattr(Mailbox, "wake", counted)
    params = SamplingParams(max_tokens=40, ignore_eos=True, n=2)
    with LLM.from_client(InProcessEngineClient(fake_config(), build=build_fake_engine)) as llm:
        [output] = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
    assert [len(answer.token_ids) for answer in output.outputs] == [40, 40]
    assert len(wakes) == 1


@pytest.mark.parametrize(
    "ending", ["", "sys.exit(3)", "del llm", "threading.Thread(target=more).start()"]
)
def test_a_script_that_forgets_its_engine_ends_promptly_and_quietly(
    tmp_path: Path, ending: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, threading, time\n"
        "from pagewire import LLM, SamplingParams\n"
        "from pagewire_frontend.engine_client.in_process import InProcessEngineClient\n"
        "from tests.fakes.fake_engine import build_fake_engine, fake_config\n"
        "llm = LLM.from_client(InProcessEngineClient(fake_config(), build=build_fake_engine))\n"
        "def more():\n"
        "    params = SamplingParams(max_tokens=5)\n"
        "    llm.generate({'prompt_token_ids': [1, 2]}, params, use_tqdm=False)\n"
        "more()\n"
        "print(time.time(), flush=True)\n" + ending + "\n"
    )
    ended = run_script(script)
    assert ended.stderr == ""
    assert ended.returncode == (3 if "exit" in ending else 0)
    # It would be killed by `run_script` otherwise.
    assert time.time() - float(ended.stdout) < 40


def run_script(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else found(name)
    )
    with pytest.raises(FailedPreconditionError, match=r"pip install 'pagewire\[engine\]'"):
        LLM(model="m")


def test_priority_is_passed_on_for_all_prompts_or_one_for_each(fake: ReplayingClient) -> None:
    with LLM.from_client(fake) as llm:
        llm.generate(["a", "b", "c"], priority=[3, 1, 2], use_tqdm=False)
        assert [request.priority for request in fake.requests] == [1, 2, 3]
        llm.chat([{"role": "user", "content": "hi"}], priority=7, use_tqdm=False)
        assert fake.requests[-1].priority == 7
        for wrong, match in (([1], "1 priorities for 2 prompts"), ([1, 2**31], "32 bits")):
            with pytest.raises(InvalidArgumentError, match=match):
                llm.generate(["a", "b"], priority=wrong, use_tqdm=False)


CALLS = (
    "<think>\nLook it up.\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
)
NOW: dict[str, Any] = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object"}},
}


@pytest.fixture
def calling_llm() -> Iterator[LLM]:
    files = small_tokenizers.byte_level_files(
        "{# <tool_call> </think> #}{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    )
    replying = ReplayingClient(
        files,
        lambda request: turns_of(
            # The token that ends an answer is not shown.
            [*TOKENIZER.encode(CALLS), 0],
            [7, 100, 1000],
            finish_reason=FinishReason.STOP,
        ),
        vocab_size=TOKENIZER.vocab_size,
        max_model_len=1024,
    )
    with LLM.from_client(replying) as llm:
        yield llm


def test_an_answer_is_taken_apart_where_it_is_asked_for(calling_llm: LLM) -> None:
    hello = [{"role": "user", "content": "Time?"}]
    (whole,) = calling_llm.chat(hello, tools=[NOW], use_tqdm=False)
    assert whole.outputs[0].text == CALLS
    assert (whole.outputs[0].reasoning, whole.outputs[0].tool_calls) == ("", ())
    (parsed,) = calling_llm.chat(hello, tools=[NOW], parse_answer=True, use_tqdm=False)
    output = parsed.outputs[0]
    assert (output.reasoning, output.text) == ("Look it up.", "One moment.")
    (call,) = output.tool_calls
    assert (call.name, call.arguments) == ("now", '{"zone": "UTC"}')
    assert output.finish_reason == "tool_calls"
    assert output.token_ids == whole.outputs[0].token_ids


def test_a_choice_of_tools_needs_an_answer_that_is_taken_apart(calling_llm: LLM) -> None:
    hello = [{"role": "user", "content": "Time?"}]
    with pytest.raises(InvalidArgumentError, match="parse_answer=True"):
        calling_llm.chat(hello, tools=[NOW], tool_choice="required", use_tqdm=False)
    with pytest.raises(InvalidArgumentError, match="two tools"):
        calling_llm.chat(hello, tools=[NOW, NOW], parse_answer=True, use_tqdm=False)


def test_some_of_the_tools_may_be_allowed(calling_llm: LLM) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    found = []
    for name in ("now", "other"):
        function = {"type": "function", "function": {"name": name}}
        choice = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [function]},
        }
        (answer,) = calling_llm.chat(
            [{"role": "user", "content": "Time?"}],
            tools=[NOW, other],
            tool_choice=choice,
            parse_answer=True,
            use_tqdm=False,
        )
        found.append((len(answer.outputs[0].tool_calls), "<tool_call>" in answer.outputs[0].text))
    assert found == [(1, False), (0, True)]
