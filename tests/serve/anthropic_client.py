#!/usr/bin/env python3
"""The anthropic client against a server that has SmolLM2-135M-Instruct.

usage: anthropic_client.py URL [API_KEY]    (without /v1)
"""
import sys

import anthropic

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
ANSWER = "The capital of Japan is Tokyo."


def refused(call, part):
    try:
        call()
    except anthropic.BadRequestError as e:
        assert e.body["type"] == "error" and e.body["error"]["type"] == "invalid_request_error"
        assert part in e.body["error"]["message"], e.body
        return
    raise AssertionError("not refused: " + part)


def main():
    client = anthropic.Anthropic(base_url=sys.argv[1], api_key=sys.argv[2] if len(sys.argv) > 2 else "none",
                                 max_retries=0, timeout=120)
    model = "SmolLM2-135M-Instruct.Q4_1"
    asked = dict(model=model, max_tokens=50, messages=QUESTION, extra_body={"temperature": 0})

    whole = client.messages.create(**asked)
    assert whole.type == "message" and whole.role == "assistant" and whole.id.startswith("msg_")
    assert [b.type for b in whole.content] == ["text"] and whole.content[0].text == ANSWER, whole
    assert whole.stop_reason == "end_turn" and whole.usage.output_tokens == 8, whole
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == 37, whole.usage

    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert final.content[0].text == ANSWER and final.stop_reason == "end_turn"
    assert final.usage.output_tokens == 8

    cut = client.messages.create(**{**asked, "max_tokens": 3})
    assert cut.stop_reason == "max_tokens" and ANSWER.startswith(cut.content[0].text)
    stopped = client.messages.create(**asked, stop_sequences=[" is"])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == " is"
    assert stopped.content[0].text == "The capital of Japan"
    told = client.messages.create(**asked, system="Answer briefly.")
    assert "Tokyo" in told.content[0].text

    count = client.messages.count_tokens(model=model, messages=QUESTION)
    assert count.input_tokens == 37, count
    refused(lambda: client.messages.create(**{**asked, "messages": []}), "messages")
    refused(lambda: client.messages.create(**asked, tools=[
        {"name": "get_weather", "input_schema": {"type": "object"}}]), "tools")
    try:
        client.messages.create(**{**asked, "model": "no-such-model"})
    except anthropic.NotFoundError as e:
        assert e.body["error"]["type"] == "not_found_error"
    else:
        raise AssertionError("an unknown model answers")
    print("the anthropic client is content")


if __name__ == "__main__":
    main()
