"""The official openai client: completions, chats, streams, tools, schemas, responses, errors."""

import json
import os

import openai

URL = os.environ.get("KEEL_URL", "http://127.0.0.1:8080")
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("KEEL_API_KEY", "none"), max_retries=0)
model = client.models.list().data[0].id
story = [{"role": "user", "content": "Tell me a story about a dog."}]

# A completion, and the same one streamed.
whole = client.completions.create(model=model, prompt="Once upon a time", max_tokens=20, temperature=0)
assert len(whole.choices[0].text) > 10 and whole.usage.completion_tokens == 20
pieces = client.completions.create(model=model, prompt="Once upon a time", max_tokens=20, temperature=0, stream=True)
assert "".join(p.choices[0].text for p in pieces if p.choices) == whole.choices[0].text

# A chat, streamed with usage, with several answers and log probabilities.
chat = client.chat.completions.create(model=model, messages=story, max_tokens=30, temperature=0)
text, usage = "", None
for chunk in client.chat.completions.create(
    model=model, messages=story, max_tokens=30, temperature=0, stream=True, stream_options={"include_usage": True}
):
    usage = chunk.usage or usage
    text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
assert text == chat.choices[0].message.content and usage.completion_tokens == chat.usage.completion_tokens
several = client.chat.completions.create(
    model=model, messages=story, max_tokens=10, n=3, seed=5, temperature=1.2, logprobs=True, top_logprobs=2
)
assert len(several.choices) == 3 and len(several.choices[0].logprobs.content[0].top_logprobs) == 2
assert usage.prompt_tokens_details.cached_tokens >= 0

# A schema, through the client's own parser.
from pydantic import BaseModel  # noqa: E402
from typing import Literal  # noqa: E402


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[2, 4]


parsed = client.chat.completions.parse(model=model, messages=story, response_format=Animal, max_tokens=60, temperature=0)
assert parsed.choices[0].message.parsed.legs in (2, 4)

# A tool, called, streamed and answered.
tool = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"],
    "additionalProperties": False}}}
call = client.chat.completions.create(
    model=model, messages=story, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=80)
called = call.choices[0].message.tool_calls[0]
assert call.choices[0].finish_reason == "tool_calls" and json.loads(called.function.arguments)["city"]
with client.chat.completions.stream(
    model=model, messages=story, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=80) as events:
    assert events.get_final_completion().choices[0].message.tool_calls[0].function.name == "weather"
answered = client.chat.completions.create(model=model, max_tokens=10, messages=[
    *story, call.choices[0].message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": called.id, "content": "sunny"}])
assert answered.choices[0].message.content is not None

# Responses.
response = client.responses.create(model=model, input="Tell me about a cat.", max_output_tokens=20, temperature=0)
with client.responses.stream(model=model, input="Tell me about a cat.", max_output_tokens=20, temperature=0) as events:
    streamed = "".join(e.delta for e in events if e.type == "response.output_text.delta")
assert response.output_text and streamed == response.output_text

# Errors are the client's own.
for kind, call in [
    (openai.NotFoundError, lambda: client.chat.completions.create(model="other", messages=story)),
    (openai.BadRequestError, lambda: client.completions.create(model=model, prompt="a long story " * 50_000, max_tokens=1)),
    (openai.BadRequestError, lambda: client.chat.completions.create(model=model, messages=story, temperature=-1)),
]:
    try:
        call()
        raise AssertionError(f"{kind} was expected")
    except kind as error:
        assert error.code and error.message
# More than fits is cut to what fits, as agents expect.
cut = client.completions.create(model=model, prompt="Once", max_tokens=10**8, temperature=0, stop=[" "])
assert cut.choices[0].finish_reason in ("stop", "length")
# A stream that is left in the middle.
with client.chat.completions.create(model=model, messages=story, max_tokens=2000, stream=True) as left:
    next(iter(left))
print("openai", openai.__version__, "works")
