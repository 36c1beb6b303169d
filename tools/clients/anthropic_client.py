"""The official anthropic client: messages, streams, tools, the count of tokens, errors."""

import os

import anthropic

URL = os.environ.get("KEEL_URL", "http://127.0.0.1:8080")
client = anthropic.Anthropic(base_url=URL, api_key=os.environ.get("KEEL_API_KEY", "none"), max_retries=0)
model = os.environ.get("KEEL_MODEL", "demo")
# Newer versions of the client know no temperature.
GREEDY = {"temperature": 0}
story = [{"role": "user", "content": "Tell me a story about a dog."}]

message = client.messages.create(model=model, max_tokens=30, extra_body=GREEDY, system="You tell stories.", messages=story)
assert message.content[0].text and message.stop_reason == "max_tokens" and message.usage.output_tokens == 30
with client.messages.stream(
    model=model, max_tokens=30, extra_body=GREEDY, system="You tell stories.", messages=story) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == message.content[0].text == final.content[0].text
count = client.messages.count_tokens(model=model, system="You tell stories.", messages=story)
usage = message.usage
assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)

tools = [{"name": "weather", "description": "Tells it.", "input_schema": {
    "type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"],
    "additionalProperties": False}}]
call = client.messages.create(model=model, max_tokens=80, messages=story, tools=tools,
                              tool_choice={"type": "any", "disable_parallel_tool_use": True})
used = call.content[-1]
assert call.stop_reason == "tool_use" and used.name == "weather" and used.input["city"] in ("Bern", "Rome")
with client.messages.stream(model=model, max_tokens=80, messages=story, tools=tools,
                            tool_choice={"type": "tool", "name": "weather"}) as stream:
    assert stream.get_final_message().content[-1].input["city"] in ("Bern", "Rome")
answer = client.messages.create(model=model, max_tokens=10, tools=tools, messages=[
    *story, {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in call.content]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}]}])
assert answer.type == "message"

long = [{"role": "user", "content": "a long story " * 50_000}]
for kind, arguments in [
    (anthropic.NotFoundError, {"model": "other", "max_tokens": 5, "messages": story}),
    (anthropic.BadRequestError, {"model": model, "max_tokens": 5, "messages": long}),
    (anthropic.BadRequestError, {"model": model, "max_tokens": 5, "messages": []}),
]:
    try:
        client.messages.create(**arguments)
        raise AssertionError(f"{kind} was expected")
    except kind as error:
        assert error.body["type"] == "error"
print("anthropic", anthropic.__version__, "works")
