"""vLLM's extra fields about a prompt: `prompt_logprobs`, and its ids by `return_token_ids`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.fake_engine_client import EOS_ID, FakeEngineClient, ids_of
from tests.fakes.frontend import (
    chat_request,
    grpc_stub,
    http_client,
    make_serving,
    running_frontend,
    sse_events,
)

CHAT = "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hé"},
    CHATS: {"messages": [{"role": "user", "content": "hé"}]},
}


async def ask(path: str, *, status: int = 200, client: Any = None, **body: Any) -> Any:
    serving = await make_serving(client or FakeEngineClient(reply=lambda request, index: "OK"))
    async with http_client(serving) as http:
        response = await http.post(path, json=PROMPTS[path] | body)
    assert response.status_code == status, response.text
    return sse_events(response.text) if body.get("stream") and status == 200 else response.json()


def check_entries(told: list[Any], ids: list[int]) -> None:
    assert told[0] is None
    assert [next(iter(entry)) for entry in told[1:]] == [str(token_id) for token_id in ids[1:]]
    for entry in told[1:]:
        for token in entry.values():
            assert set(token) == {"logprob", "rank", "decoded_token", "bytes"}
            assert token["logprob"] < 0


async def test_completions_tell_them_in_each_choice() -> None:
    answer = await ask(COMPLETIONS, prompt_logprobs=0, n=2)
    ids = ids_of("hé")
    for choice in answer["choices"]:
        check_entries(choice["prompt_logprobs"], ids)
        assert choice["text"] == "OK"
        assert choice["logprobs"] is None
    # A byte that is no text alone.
    entry = answer["choices"][0]["prompt_logprobs"][1]
    assert entry[str(ids[1])]["decoded_token"] == "\ufffd"
    entries = answer["choices"][0]["prompt_logprobs"][1:]
    told = [entry[str(token_id)]["bytes"] for token_id, entry in zip(ids[1:], entries, strict=True)]
    assert bytes(byte for token in told for byte in token) == "hé".encode()[1:]


async def test_completions_of_several_prompts_tell_each_its_own() -> None:
    answer = await ask(COMPLETIONS, prompt=["ab", "cde"], prompt_logprobs=1)
    assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [2, 3]


async def test_chats_tell_them_once() -> None:
    answer = await ask(CHATS, prompt_logprobs=2, n=2)
    check_entries(answer["prompt_logprobs"], ids_of(CHAT))
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])


async def test_grpc_s_chat_tells_them_once_streamed_and_whole() -> None:
    client = FakeEngineClient(reply=lambda request, index: "OK")
    request = chat_request("hé", sampling_params={"prompt_logprobs": 2, "n": 2})
    async with running_frontend(client) as server, grpc_stub(server) as stub:
        whole = await stub.ChatUnary(request)
        parts = [part async for part in stub.Chat(request)]
    streamed = [position for part in parts for position in part.prompt_logprobs]
    for told in (list(whole.prompt_logprobs), streamed):
        assert [position.token.token_id for position in told] == ids_of(CHAT)[1:]
        assert all(len(position.top) == 2 for position in told)
        assert all(token.text for position in told for token in (position.token, *position.top))
        text = b"".join(position.token.bytes for position in told).decode()
        assert "hé" in text, "put together from bytes that are no characters alone"
    assert not parts[-1].prompt_logprobs, "they come before the answer"


async def test_nobody_gets_them_unasked() -> None:
    for path in (COMPLETIONS, CHATS):
        answer = await ask(path)
        for place in (answer, answer["choices"][0]):
            assert not {"prompt_logprobs", "prompt_token_ids", "token_ids"} & set(place)


async def test_echo_shows_as_many_alternatives_as_logprobs_says() -> None:
    answer = await ask(COMPLETIONS, echo=True, logprobs=1, prompt_logprobs=3)
    (choice,) = answer["choices"]
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])
    check_entries(choice["prompt_logprobs"], ids_of("hé"))


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("number", [-1, 21, "all", 1.5, True])
async def test_a_number_that_cant_be_served_is_refused(path: str, number: Any) -> None:
    for also in ({}, {"echo": True, "logprobs": 2}) if path == COMPLETIONS else ({},):
        answer = await ask(path, status=400, prompt_logprobs=number, **also)
        assert answer["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("path", PROMPTS)
async def test_a_stream_has_none(path: str) -> None:
    answer = await ask(path, status=400, prompt_logprobs=1, stream=True)
    assert answer["error"]["param"] == "prompt_logprobs"
    assert "stream" in answer["error"]["message"]


async def test_a_beam_search_has_none() -> None:
    body = {"use_beam_search": True, "n": 2, "max_tokens": 4}
    answer = await ask(COMPLETIONS, status=400, prompt_logprobs=1, **body)
    assert answer["error"]["param"] == "prompt_logprobs"
    answer = await ask(COMPLETIONS, status=400, echo=True, logprobs=1, **body)
    assert answer["error"]["param"] == "echo"


async def test_prompts_without_a_tokenizer_have_no_texts() -> None:
    client = FakeEngineClient(has_tokenizer=False)
    answer = await ask(COMPLETIONS, client=client, prompt=[5, 6], prompt_logprobs=0)
    entry = answer["choices"][0]["prompt_logprobs"][1]["6"]
    assert (entry["decoded_token"], entry["bytes"]) == (None, None)


async def test_completions_tell_the_ids_of_prompt_and_output() -> None:
    output = [*ids_of("OK"), EOS_ID]
    for echo in (False, True):
        (choice,) = (await ask(COMPLETIONS, return_token_ids=True, echo=echo))["choices"]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids_of("hé"), output)
        *chunks, _ = await ask(COMPLETIONS, return_token_ids=True, echo=echo, stream=True)
        choices = [chunk["choices"][0] for chunk in chunks]
        assert choices[0]["prompt_token_ids"] == ids_of("hé")
        assert all("prompt_token_ids" not in choice for choice in choices[1:])
        assert [i for choice in choices for i in choice["token_ids"]] == output
        assert "".join(choice["text"] for choice in choices) == ("héOK" if echo else "OK")


async def test_chats_tell_the_ids_of_prompt_and_output() -> None:
    output = [*ids_of("OK"), EOS_ID]
    answer = await ask(CHATS, return_token_ids=True)
    assert answer["prompt_token_ids"] == ids_of(CHAT)
    assert answer["choices"][0]["token_ids"] == output
    *chunks, _ = await ask(CHATS, return_token_ids=True, stream=True, n=2)
    assert chunks[0]["prompt_token_ids"] == ids_of(CHAT)
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
