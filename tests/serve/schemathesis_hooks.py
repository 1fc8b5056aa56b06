"""What schemathesis cannot read off openapi.json: the model under test, and the rules between fields."""
import schemathesis

MODEL, VOCABULARY = "qwen3-tiny", 480


@schemathesis.hook
def before_load_schema(context, raw_schema):
    """Good requests name the model and its tokens."""
    schemas = raw_schema["components"]["schemas"]
    fields = schemas["GenerationFields"]["properties"]
    schemas["TokenId"]["maximum"] = VOCABULARY - 1
    fields["model"] = {"enum": [MODEL, "", None]}
    fields["logit_bias"]["propertyNames"]["pattern"] = "^([0-9]|[1-9][0-9]|[1-3][0-9][0-9])$"


# Why a request that is good field by field may be refused, by the param of the error.
RULES = {
    "stream_options": lambda body: not body.get("stream"),
    "top_logprobs": lambda body: not body.get("logprobs"),
    "min_tokens": lambda body: body["min_tokens"] > 1,
    "echo": lambda body: body.get("logprobs") is not None and body["logprobs"] is not False,
    "tool_choice": lambda body: body["tool_choice"] not in (None, "auto", "none"),
    "tools": lambda body: body.get("tools"),
    "messages": lambda body: True,  # the template's to judge
    "prompt": lambda body: isinstance(body["prompt"], list) and len(body["prompt"]) * (body.get("n") or 1) > 128,
}


@schemathesis.check
def good_requests_are_accepted(ctx, response, case):
    if response.status_code != 400 or not case.meta or not case.meta.generation.mode.is_positive:
        return
    error = response.json()["error"]
    if error["code"] == "context_length_exceeded":
        return
    if error["code"] == "invalid_json":
        limits = ("NUL byte in object key", "too big integer", "too big negative integer", "real number overflow")
        assert any(limit in error["message"] for limit in limits), error["message"]
        return
    rule = RULES.get(error["param"])
    assert rule and rule(case.body), "a good request is refused: " + error["message"]


@schemathesis.check
def errors_name_a_field(ctx, response, case):
    if response.status_code != 400 or not isinstance(case.body, dict):
        return
    error = response.json()["error"]
    assert error["param"] or error["code"], "no param: " + error["message"]


@schemathesis.check
def streams_have_an_end(ctx, response, case):
    if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n"), "the stream has no end"
