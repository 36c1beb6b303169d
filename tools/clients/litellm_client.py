"""LiteLLM, by OpenAI's way and Anthropic's: an answer, a stream, a tool, a schema, errors."""

import json
import os

import litellm

URL = os.environ.get("KEEL_URL", "http://127.0.0.1:8080")
name = os.environ.get("KEEL_MODEL", "demo")
KEY = os.environ.get("KEEL_API_KEY", "none")
story = [{"role": "user", "content": "Tell me a story about a dog."}]
litellm.telemetry = False
openai = {"model": f"openai/{name}", "api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0}
anthropic = {"model": f"anthropic/{name}", "api_base": URL, "api_key": KEY, "num_retries": 0}

for way in (openai, anthropic):
    whole = litellm.completion(messages=story, max_tokens=20, temperature=0, **way)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens == 20, whole
    pieces = litellm.completion(messages=story, max_tokens=20, temperature=0, stream=True, **way)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text

    tool = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}}}
    called = litellm.completion(messages=story, max_tokens=80, tools=[tool], tool_choice="required", **way)
    call = called.choices[0].message.tool_calls[0]
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Bern", "Rome")
    answered = litellm.completion(max_tokens=10, tools=[tool], messages=[
        *story, called.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"}], **way)
    assert answered.usage.completion_tokens > 0

schema = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"], "additionalProperties": False}
shaped = litellm.completion(messages=story, max_tokens=40, response_format={
    "type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}}, **openai)
assert json.loads(shaped.choices[0].message.content)["kind"] in ("cat", "dog")

long = [{"role": "user", "content": "a long story " * 50_000}]
for kind, arguments in [
    (litellm.NotFoundError, {**openai, "model": "openai/other", "messages": story}),
    (litellm.BadRequestError, {**openai, "messages": long}),
    (litellm.BadRequestError, {**anthropic, "messages": long}),
]:
    try:
        litellm.completion(max_tokens=5, **arguments)
        raise AssertionError(f"{kind} was expected")
    except kind:
        pass
print("litellm works")
