"""What schemathesis cannot read off openapi.json: the model under test, and the rules between fields."""
import re

import schemathesis

MODEL, VOCABULARY = "qwen3-tiny", 480


@schemathesis.hook
def before_load_schema(context, raw_schema):
    """Good requests name the model and its tokens."""
    schemas = raw_schema["components"]["schemas"]
    fields = schemas["GenerationFields"]["properties"]
    schemas["TokenId"]["maximum"] = VOCABULARY - 1
    fields["model"] = {"enum": [MODEL, "", None]}
    schemas["MessagesFields"]["properties"]["model"] = {"enum": [MODEL, ""]}
    fields["logit_bias"]["propertyNames"]["pattern"] = "^([0-9]|[1-9][0-9]|[1-3][0-9][0-9])$"


@schemathesis.hook
def before_call(context, case, kwargs):
    """Where a rule between fields would refuse most of the good requests, they keep it."""
    if not case.meta or not case.meta.generation.mode.is_positive or not isinstance(case.body, dict):
        return
    if case.path.startswith("/v1/messages") and case.body["messages"][-1]["role"] == "assistant":
        case.body["messages"].append({"role": "user", "content": "x"})
    if case.body.get("stream_options") is not None:
        case.body["stream"] = True


# Why a request that is good field by field may be refused, by the param of the error.
RULES = {
    "stream_options": lambda body: not body.get("stream"),
    "top_logprobs": lambda body: not body.get("logprobs"),
    "min_tokens": lambda body: body["min_tokens"] > 1,
    "echo": lambda body: body.get("logprobs") is not None and body["logprobs"] is not False,
    "tool_choice": lambda body: body["tool_choice"] not in (None, "auto", "none"),
    "tools": lambda body: body.get("tools"),
    # no "messages": the model's template refuses none
    "prompt": lambda body: isinstance(body["prompt"], list) and len(body["prompt"]) * (body.get("n") or 1) > 128,
}


def breaks_turns(messages):
    """Not so: each tool_use has an id of its own and one tool_result in the user's turn after it, before its text."""
    turns = []  # neighbours of one role are one
    for message in messages:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not turns or turns[-1][0] != message["role"]:
            turns.append((message["role"], []))
        turns[-1][1].extend(blocks)
    used, waiting = set(), set()
    for role, blocks in turns:
        if waiting and role != "user":
            return True
        text = False
        for block in blocks:
            text = text or block["type"] == "text"
            if block["type"] == "tool_use":
                if block["id"] in used:
                    return True
                used.add(block["id"])
                waiting.add(block["id"])
            if block["type"] == "tool_result":
                if text or block["tool_use_id"] not in waiting:
                    return True
                waiting.remove(block["tool_use_id"])
        if waiting and role == "user":
            return True
    return bool(waiting)


# The same for the Messages API.
MESSAGES_RULES = {
    "tools": lambda body: body.get("tools"),
    "tool_choice": lambda body: body["tool_choice"]["type"] in ("any", "tool"),
    "thinking": lambda body: body["thinking"]["budget_tokens"] >= (body.get("max_tokens") or 0),
    "messages": lambda body: breaks_turns(body["messages"]),
}


def refusal(response, case):
    """code, field and message of a 400. The Messages API has only the message, which says it all."""
    error = response.json()["error"]
    message = error["message"]
    if "/messages" not in case.path:
        return error["code"], error["param"], message
    if message.startswith("this model's maximum context length"):
        return "context_length_exceeded", None, message
    if message.startswith("the body is not valid JSON"):
        return "invalid_json", None, message
    field = re.match(r"[a-z_]+(?=[:.\[])", message)
    return None, field and field.group(), message


@schemathesis.check
def good_requests_are_accepted(ctx, response, case):
    if response.status_code != 400 or not case.meta or not case.meta.generation.mode.is_positive:
        return
    code, field, message = refusal(response, case)
    if code == "context_length_exceeded":
        return
    if code == "invalid_json":
        limits = ("NUL byte in object key", "too big integer", "too big negative integer", "real number overflow")
        assert any(limit in message for limit in limits), message
        return
    rule = (MESSAGES_RULES if "/messages" in case.path else RULES).get(field)
    assert rule and rule(case.body), "a good request is refused: " + message


@schemathesis.check
def errors_name_a_field(ctx, response, case):
    if response.status_code != 400 or not isinstance(case.body, dict):
        return
    code, field, message = refusal(response, case)
    assert field or code, "no field: " + message


@schemathesis.check
def streams_have_an_end(ctx, response, case):
    if not response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        return
    last = response.text.split("\n\n")[-2]
    if "/messages" in case.path:
        assert last.startswith(("event: message_stop\n", "event: error\n")), "the stream has no end"
    else:
        assert last == "data: [DONE]", "the stream has no end"
    assert response.text.endswith("\n\n"), "the last event has no end"
