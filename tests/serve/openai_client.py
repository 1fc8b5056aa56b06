#!/usr/bin/env python3
"""The openai client against a server that has SmolLM2-135M-Instruct: every feature once.

usage: openai_client.py BASE_URL [API_KEY]    (BASE_URL ends in /v1)
"""
import sys

import openai

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
ANSWER = "The capital of Japan is Tokyo."


def text_of(stream):
    """The text of a chat stream, after checking the form of its chunks."""
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({c.id for c in chunks}) == 1 and chunks[0].id.startswith("chatcmpl-")
    ends = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert len(ends) == 1, ends
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), ends[0], chunks


def refused(call, field, code=None):
    try:
        call()
    except openai.BadRequestError as e:
        assert field is None or e.param == field, (e.param, e.message)
        assert code is None or e.code == code, e.code
        assert e.message
        return e
    raise AssertionError("not refused: " + str(field))


def check_chat(client, model):
    chat = client.chat.completions
    whole = chat.create(model=model, messages=QUESTION, temperature=0)
    assert whole.object == "chat.completion" and whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == ANSWER, whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.prompt_tokens == 37, whole.usage

    text, end, chunks = text_of(chat.create(model=model, messages=QUESTION, temperature=0, stream=True))
    assert (text, end) == (ANSWER, "stop") and all(c.usage is None for c in chunks)
    text, end, chunks = text_of(chat.create(model=model, messages=QUESTION, temperature=0, stream=True,
                                            stream_options={"include_usage": True}))
    assert text == ANSWER and chunks[-1].choices == [] and chunks[-1].usage == chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 32

    cut = chat.create(model=model, messages=QUESTION, temperature=0, max_tokens=3)
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 3
    assert ANSWER.startswith(cut.choices[0].message.content)
    assert chat.create(model=model, messages=QUESTION, temperature=0,
                       max_completion_tokens=3).usage.completion_tokens == 3
    stopped = chat.create(model=model, messages=QUESTION, temperature=0, stop=[" is", "xyz"])
    assert stopped.choices[0].message.content == "The capital of Japan"
    assert stopped.choices[0].finish_reason == "stop"

    sampled = dict(model=model, messages=QUESTION, temperature=1.0, top_p=0.9, max_tokens=20, n=3)
    one, two = chat.create(seed=7, **sampled), chat.create(seed=7, **sampled)
    texts = [c.message.content for c in one.choices]
    assert texts == [c.message.content for c in two.choices] and len(texts) == 3
    assert [c.index for c in one.choices] == [0, 1, 2] and len(set(texts)) > 1

    lp = chat.create(model=model, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3)
    tokens = lp.choices[0].logprobs.content
    assert "".join(t.token for t in tokens).startswith(ANSWER)
    for t in tokens:
        assert t.logprob <= 0 and len(t.top_logprobs) == 3
        assert t.top_logprobs[0].logprob >= t.logprob - 1e-6
    first = 504  # "The"
    other = chat.create(model=model, messages=QUESTION, temperature=0, max_tokens=4, logit_bias={first: -100})
    assert not other.choices[0].message.content.startswith("The")
    assert chat.create(model=model, messages=QUESTION, temperature=0, presence_penalty=0.5,
                       frequency_penalty=0.5, user="someone").choices[0].message.content
    extra = chat.create(model=model, messages=QUESTION, temperature=0,
                        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 12,
                                    "ignore_eos": False})
    assert extra.usage.completion_tokens >= 12
    parts = [{"role": "system", "content": "Answer briefly."},
             {"role": "user", "content": [{"type": "text", "text": "What is the capital of Japan?"}]}]
    assert "Tokyo" in chat.create(model=model, messages=parts, temperature=0).choices[0].message.content

    raw = client.chat.completions.with_raw_response.create(model=model, messages=QUESTION, temperature=0)
    assert raw.headers.get("x-request-id")


def check_completions(client, model):
    create = client.completions.create
    one = create(model=model, prompt="The capital of Japan is", temperature=0, max_tokens=5)
    assert one.object == "text_completion" and one.choices[0].text
    many = create(model=model, prompt=["The capital of Japan is", "One, two,"], temperature=0, max_tokens=5)
    assert [c.index for c in many.choices] == [0, 1] and many.choices[0].text == one.choices[0].text
    ids = client.post("/../tokenize", cast_to=dict, body={"prompt": "The capital of Japan is"})
    ids = ids.get("tokens", ids) if isinstance(ids, dict) else ids
    by_ids = create(model=model, prompt=ids, temperature=0, max_tokens=5)
    assert by_ids.choices[0].text == one.choices[0].text
    chunks = list(create(model=model, prompt="The capital of Japan is", temperature=0, max_tokens=5, stream=True))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == one.choices[0].text
    lp = create(model=model, prompt="The capital of Japan is", temperature=0, max_tokens=5, logprobs=2)
    assert len(lp.choices[0].logprobs.tokens) == 5 and "".join(lp.choices[0].logprobs.tokens) == one.choices[0].text
    refused(lambda: create(model=model, prompt="a", suffix="b"), "suffix")


def check_errors(client, model):
    chat = client.chat.completions
    refused(lambda: chat.create(model=model, messages=[]), "messages")
    refused(lambda: chat.create(model=model, messages=QUESTION, temperature=-1), "temperature")
    refused(lambda: chat.create(model=model, messages=QUESTION, n=0), "n")
    refused(lambda: chat.create(model=model, messages=QUESTION, top_logprobs=99, logprobs=True), "top_logprobs")
    long = [{"role": "user", "content": "word " * 9000}]
    e = refused(lambda: chat.create(model=model, messages=long), None, "context_length_exceeded")
    assert any(c.isdigit() for c in e.message)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    refused(lambda: chat.create(model=model, messages=QUESTION, tools=tools), "tools")
    try:
        chat.create(model="no-such-model", messages=QUESTION)
    except openai.NotFoundError as e:
        assert e.code == "model_not_found"
    else:
        raise AssertionError("an unknown model answers")


def main():
    client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2] if len(sys.argv) > 2 else "none",
                           max_retries=0, timeout=120)
    models = client.models.list().data
    model = models[0].id
    assert client.models.retrieve(model).id == model
    check_chat(client, model)
    check_completions(client, model)
    check_errors(client, model)
    print("the openai client is content")


if __name__ == "__main__":
    main()
